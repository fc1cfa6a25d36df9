# SPDX-License-Identifier: Apache-2.0
"""16-bit floats are accumulated in float32, where their own sums overflow or stall.

All operators are one model, and the reference is the same model in float32, by ONNX Runtime.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import tvm_fusion

TYPES = {np.dtype(np.float16): TensorProto.FLOAT16, np.dtype(ml_dtypes.bfloat16): 16}
FIRST_BFLOAT16, LAST_OF_ONNX_RUNTIME = 22, 21
"""Opset from which pools and norms take bfloat16, and one that ONNX Runtime has whole."""

_rng = np.random.default_rng(5)


def normal(*shape: int, scale: float = 1, mean: float = 0) -> np.ndarray:
    return _rng.standard_normal(shape) * scale + mean


IMAGE, HIGH = normal(1, 4, 14, 14, scale=300), normal(1, 2, 14, 14, mean=2000)
ROWS, ONES, GAIN = normal(2, 512, scale=100), np.ones((1, 3000)), normal(4)
FACTORS = normal(4, 3000, scale=9, mean=10), normal(3000, 4, scale=9), normal(4)
AXIS, START = np.array([1]), np.zeros((1, 3000), np.int64)
SIZES = np.array([1, 1, 1.7, 0.3], np.float32)

CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "AveragePool": ((HIGH,), {"kernel_shape": [7, 7], "strides": [3, 3]}),
    "AveragePool with pads": (
        (HIGH,),
        {"kernel_shape": [7, 7], "pads": [2] * 4, "count_include_pad": 1},
    ),
    "AveragePool with holes": ((HIGH,), {"kernel_shape": [6, 6], "dilations": [2, 2]}),
    "Conv": ((np.ones((1, 700, 1, 1)) * 100, np.ones((1, 700, 1, 1)), normal(1, mean=-60000)), {}),
    "CumSum": ((ONES, AXIS), {}),
    "CumSum back": ((ONES, AXIS), {"reverse": 1, "exclusive": 1}),
    "Gemm": (FACTORS, {"alpha": 0.001, "beta": 0.3}),
    "GlobalAveragePool": ((HIGH,), {}),
    "GlobalLpPool": ((IMAGE,), {"p": 2}),
    "GridSample": ((HIGH, normal(1, 3, 3, 2, scale=0.3)), {}),
    "InstanceNormalization": ((IMAGE, GAIN, GAIN), {}),
    "LRN": ((IMAGE,), {"size": 3, "alpha": 0.01}),
    "LayerNormalization": ((ROWS, normal(512)), {}),
    "LogSoftmax": ((np.zeros((1, 3000)),), {}),
    "LpNormalization": ((ROWS,), {"p": 2, "axis": 1}),
    "LpPool": ((IMAGE,), {"kernel_shape": [4, 4], "p": 3}),
    "MatMul": (FACTORS[:2], {}),
    "Mean": ((HIGH * 20, HIGH * 20), {}),
    "MeanVarianceNormalization": ((IMAGE,), {}),
    "ReduceL1": ((ROWS, AXIS), {}),
    "ReduceL2": ((ROWS, AXIS), {}),
    "ReduceLogSum": ((abs(ROWS) * 9, AXIS), {}),
    "ReduceLogSumExp": ((np.zeros((1, 3000)), AXIS), {}),
    "ReduceMean": ((HIGH, AXIS), {}),
    "ReduceProd": ((normal(2, 300, scale=0.01, mean=1), AXIS), {}),
    "ReduceSum": ((ONES, AXIS), {}),
    "ReduceSumSquare": ((ROWS / 50, AXIS), {}),
    "Resize": ((IMAGE, "", SIZES), {"mode": "cubic"}),
    "ScatterElements": ((ONES[:, :4], START, ONES), {"axis": 1, "reduction": "add"}),
    "ScatterND": ((ONES[:, :4].T, START.T, ONES.T), {"reduction": "add"}),
    "Softmax": ((np.zeros((1, 3000)),), {}),
    "Sum": ((HIGH * 30, HIGH * 30, -HIGH * 30), {}),
}


def model(kind: int, names: list[str], opset: int) -> onnx.ModelProto:
    """One node of each case; floats of 64 bits are inputs of the model."""
    nodes, inputs, constants, outputs = [], [], [], []
    for number, name in enumerate(names):
        given, attributes = CASES[name]
        operands = [f"x{number}_{k}" if not isinstance(v, str) else "" for k, v in enumerate(given)]
        for operand, value in zip(operands, given, strict=True):
            if operand and value.dtype == np.float64:
                inputs.append(helper.make_tensor_value_info(operand, kind, value.shape))
            elif operand:
                constants.append(onnx.numpy_helper.from_array(value, operand))
        nodes.append(helper.make_node(name.split()[0], operands, [f"y{number}"], **attributes))
        outputs.append(helper.make_tensor_value_info(f"y{number}", kind, None))
    graph = helper.make_graph(nodes, "sums", inputs, outputs, constants)
    opsets = [helper.make_operatorsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def feeds(dtype: np.dtype, names: list[str]) -> dict[str, np.ndarray]:
    return {
        f"x{number}_{k}": value.astype(dtype)
        for number, name in enumerate(names)
        for k, value in enumerate(CASES[name][0])
        if not isinstance(value, str) and value.dtype == np.float64
    }


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_results_are_rounded_once(dtype: np.dtype) -> None:
    names = list(CASES)
    given = feeds(dtype, names)
    session = onnxruntime.InferenceSession(
        model(TensorProto.FLOAT, names, LAST_OF_ONNX_RUNTIME).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    wanted = session.run(None, {name: value.astype(np.float32) for name, value in given.items()})
    found = tvm_fusion.compile(model(TYPES[dtype], names, FIRST_BFLOAT16), threads=1)(**given)
    step = float(ml_dtypes.finfo(dtype).eps)
    for name, one, other in zip(names, found, wanted, strict=True):
        assert one.dtype == dtype, name
        limit = {"rtol": step, "atol": step * 0.02 * float(abs(other).max())}
        np.testing.assert_allclose(one.astype(np.float32), other, err_msg=name, **limit)
