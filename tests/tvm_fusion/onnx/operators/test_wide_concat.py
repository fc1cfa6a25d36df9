# SPDX-License-Identifier: Apache-2.0
"""A Concat of many inputs becomes kernels of few arguments, and compiles in seconds."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from onnx import helper
from onnx_cases import onnx_model

import tvm_fusion
from tvm_fusion.onnx.frontend import import_onnx
from tvm_fusion.onnx.operators.shapes import GROUP

COUNT = 100


@pytest.mark.slow
def test_concatenation_of_many_inputs() -> None:
    names = [f"x{number}" for number in range(COUNT)]
    node = helper.make_node("Concat", names, ["y"], axis=-1)
    model = onnx_model([node], dict.fromkeys(names, (2, 3)), ["y"])
    kernels = [
        func
        for func in import_onnx(model).mod.functions.values()
        if isinstance(func, tvm.tirx.PrimFunc)
    ]
    assert kernels and max(len(func.params) for func in kernels) == GROUP + 1
    generator = np.random.default_rng(0)
    feeds = {name: generator.random((2, 3), dtype=np.float32) for name in names}
    found = tvm_fusion.compile(model, threads=1)(feeds)
    np.testing.assert_array_equal(found, np.concatenate(list(feeds.values()), -1))
