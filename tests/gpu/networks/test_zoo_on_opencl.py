# SPDX-License-Identifier: Apache-2.0
"""Whole models as GPU kernels, run in OpenCL: their numbers, and how few kernels they are."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_reference import assert_same, run_onnx
from relax_on_opencl import OPENCL, RelaxOnOpenCL

from examples.onnx_builder import random_inputs
from examples.zoo import ZOO
from tvm_fusion.compiler.pipeline import optimize
from tvm_fusion.onnx.frontend import import_onnx

TRANSFORMER = {"layers": 1, "sequence": 12, "width": 32, "heads": 4, "vocabulary": 99}

# Sizes, and launches of one call.
CASES = {
    "bert_base": (TRANSFORMER, 10),
    "gpt2": (TRANSFORMER, 7),
    "wide_and_deep": ({"rows": 50, "embedding": 4, "layers": (24, 16), "crosses": 7}, 5),
}


def run(model: onnx.ModelProto) -> tuple[list[np.ndarray], RelaxOnOpenCL]:
    """Check a model twice, and return what it ran on."""
    machine = RelaxOnOpenCL(optimize(import_onnx(model).mod, OPENCL))
    for seed in range(2):
        feed = random_inputs(model, seed)
        results = machine(*feed.values())
        assert_same(results, run_onnx(model, feed), limit=1e-5)
    return results, machine


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_model(name: str) -> None:
    sizes, launches = CASES[name]
    _, machine = run(ZOO[name](2, **sizes))
    names = [launch.kernel for launch in machine.launches]
    assert len(names) == launches, names
