# SPDX-License-Identifier: Apache-2.0
"""Several copies of a model at the same time."""

from __future__ import annotations

import numpy as np
import pytest
from small_onnx import small_model

import tvm_fusion
from tvm_fusion.bench.throughput import throughput
from tvm_fusion.errors import InvalidInputError
from tvm_fusion.runtime.compiled_model import CompiledModel

INPUTS = {"image": np.ones((1, 3, 12, 12), "float32")}


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return tvm_fusion.compile(small_model(), threads=1)


def test_calls_are_counted(model: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[CompiledModel] = []
    call = CompiledModel.__call__

    def counted(self: CompiledModel, *args: object) -> object:
        called.append(self)
        return call(self, *args)

    monkeypatch.setattr(CompiledModel, "__call__", counted)
    found = throughput(model, 3, INPUTS, seconds=0.05)
    assert len(set(map(id, called))) == found.streams == 3
    assert found.calls == len(called) - 3  # one call each before the clock starts
    assert found.calls_per_second == pytest.approx(found.calls / found.seconds)
    assert found.seconds >= 0.05


def test_bad_input(model: CompiledModel) -> None:
    with pytest.raises(InvalidInputError, match="streams is 0"):
        throughput(model, 0, INPUTS)
    with pytest.raises(InvalidInputError, match="'image' is missing|missing"):
        throughput(model, 2, {})
