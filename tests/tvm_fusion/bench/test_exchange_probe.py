# SPDX-License-Identifier: Apache-2.0
"""Data that cores pass to each other: which shares are copied, and the figure by hand."""

import numpy as np
import pytest
import tvm

from tvm_fusion.bench import machine_limits
from tvm_fusion.bench.machine_limits import ExchangeProbe, exchange_seconds
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.prediction.machines import NATIVE


@pytest.mark.parametrize("distance", [0, 1])
def test_threads_copy_the_share_of_the_next_one(distance, monkeypatch):
    monkeypatch.setattr(machine_limits, "_ROWS", 2)
    monkeypatch.setattr(machine_limits, "_WIDTH", 16)
    target = resolve(NATIVE, cores=3)
    kernel = tvm.compile(machine_limits._copy_block(3, distance), target)["main"]
    data = np.arange(3 * 2 * 16, dtype="float32").reshape(3, 2, 16)
    out = tvm.runtime.tensor(np.zeros_like(data))
    kernel(tvm.runtime.tensor(data), out)
    np.testing.assert_array_equal(out.numpy(), np.roll(data, -distance, axis=0))


@pytest.mark.parametrize(("own", "other", "expected"), [(1.0, 3.0, 0.5), (3.0, 1.0, None)])
def test_seconds_of_a_byte_by_hand(own, other, expected, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(machine_limits, "time", clock)
    copies = [lambda: clock.wait(own), lambda: clock.wait(other)]
    found = exchange_seconds(lambda: clock.wait(7.0), copies, 4)
    assert found == pytest.approx(expected or machine_limits._LEAST)


class Clock:
    """A clock that goes on when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """The time."""
        return self.now

    def wait(self, seconds: float) -> None:
        """Go on."""
        self.now += seconds


@pytest.mark.slow
def test_a_probe_of_this_machine() -> None:
    assert ExchangeProbe(resolve(NATIVE, cores=2), 2).seconds() >= machine_limits._LEAST
