# SPDX-License-Identifier: Apache-2.0
"""What cores pass to each other: which shares are copied, and the figure by hand."""

import numpy as np
import pytest
import tvm

from tvm_fusion.bench import exchange_probe
from tvm_fusion.bench.exchange_probe import ExchangeProbe
from tvm_fusion.compiler.targets.target import resolve
from tvm_fusion.prediction.machines import NATIVE


@pytest.mark.parametrize("distance", [0, 1])
def test_threads_copy_the_share_of_the_next_one(distance, monkeypatch):
    monkeypatch.setattr(exchange_probe, "_ROWS", 2)
    monkeypatch.setattr(exchange_probe, "_WIDTH", 16)
    target = resolve(NATIVE, cores=3)
    kernel = tvm.compile(exchange_probe._copy(3, distance), target)["main"]
    data = np.arange(3 * 2 * 16, dtype="float32").reshape(3, 2, 16)
    out = tvm.runtime.tensor(np.zeros_like(data))
    kernel(tvm.runtime.tensor(data), out)
    np.testing.assert_array_equal(out.numpy(), np.roll(data, -distance, axis=0))


def test_seconds_of_a_byte_by_hand(monkeypatch):
    probe = ExchangeProbe(resolve(NATIVE, cores=2), 2)
    size = 2 * 512 * 256 * 4
    for times, expected in (([1e-4, 3e-4], 2e-4 / size), ([2e-4, 1e-4], exchange_probe._LEAST)):
        monkeypatch.setattr(probe, "_measure", lambda times=times: times)
        assert probe.seconds() == pytest.approx(expected)
    monkeypatch.undo()
    assert exchange_probe._LEAST <= probe.seconds() < 1e-6
