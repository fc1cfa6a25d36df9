# SPDX-License-Identifier: Apache-2.0
"""16-bit floats are accumulated in float32, where their own sums overflow or stall.

All operators of a version are one model, and the reference is the same model in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from edge_values import ACCUMULATING
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import tvm_fusion

TYPES = {np.dtype(np.float16): TensorProto.FLOAT16, np.dtype(ml_dtypes.bfloat16): 16}
FIRST_BFLOAT16, LAST_OF_ONNX_RUNTIME, NEWEST = 22, 21, 27
"""Opset from which pools and norms take bfloat16, and one that ONNX Runtime has whole."""

_rng = np.random.default_rng(5)


def normal(*shape: int, scale: float = 1, mean: float = 0) -> np.ndarray:
    return _rng.standard_normal(shape) * scale + mean


LINE, VOLUME = normal(1, 4, 40, scale=300), normal(1, 2, 6, 6, 6, scale=300)
STEPS, GATES = normal(30, 2, 700), normal(1, 12, 700, scale=0.05)
BACK, SCORES = normal(1, 12, 3, scale=0.1), normal(3000, 5, scale=3)
LABELS = _rng.integers(0, 5, 3000)
IMAGE, HIGH = normal(1, 4, 14, 14, scale=300), normal(1, 2, 14, 14, mean=2000)
ROWS, ONES, GAIN = normal(2, 512, scale=100), np.ones((1, 3000)), normal(4)
FACTORS = normal(4, 3000, scale=9, mean=10), normal(3000, 4, scale=9), normal(4)
AXIS, START = np.array([1]), np.zeros((1, 3000), np.int64)
SIZES = np.array([1, 1, 1.7, 0.3], np.float32)

CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "AveragePool": ((HIGH,), {"kernel_shape": [7, 7], "strides": [3, 3]}),
    "AveragePool of a line": ((LINE + 2000,), {"kernel_shape": [30]}),
    "AveragePool of a volume": ((VOLUME + 2000,), {"kernel_shape": [3, 3, 3]}),
    "AveragePool with pads": (
        (HIGH,),
        {"kernel_shape": [7, 7], "pads": [2] * 4, "count_include_pad": 1},
    ),
    "AveragePool with holes": ((HIGH,), {"kernel_shape": [6, 6], "dilations": [2, 2]}),
    "Conv": ((np.ones((1, 700, 1, 1)) * 100, np.ones((1, 700, 1, 1)), normal(1, mean=-60000)), {}),
    "Conv of a line": ((LINE, normal(3, 4, 5, scale=9)), {}),
    "Conv of a volume": ((VOLUME, normal(3, 2, 3, 3, 3, scale=9)), {}),
    "ConvTranspose": ((IMAGE, normal(4, 3, 3, 3, scale=9), normal(3)), {}),
    "Col2Im": ((np.ones((1, 9 * 3, 36)) * 300, np.array([8, 8]), np.array([3, 3])), {}),
    "CumSum": ((ONES, AXIS), {}),
    "CumSum back": ((ONES, AXIS), {"reverse": 1, "exclusive": 1}),
    "DFT": ((normal(1, 600, 1, scale=40, mean=40), "", np.array(1)), {}),
    "DeformConv": (
        (IMAGE, normal(3, 4, 3, 3, scale=9), normal(1, 18, 12, 12, scale=0.3)),
        {"kernel_shape": [3, 3]},
    ),
    "Det": ((normal(3, 5, 5, scale=4),), {}),
    "Einsum": (FACTORS[:2], {"equation": "ij,jk->ik"}),
    "Einsum of a trace": ((normal(2100, 2100, mean=1),), {"equation": "ii->"}),
    "GRU": ((STEPS, GATES[:, :9], BACK[:, :9]), {"hidden_size": 3}),
    "Gemm": (FACTORS, {"alpha": 0.001, "beta": 0.3}),
    "GlobalAveragePool": ((HIGH,), {}),
    "GlobalLpPool": ((IMAGE,), {"p": 2}),
    "GlobalAveragePool of a line": ((LINE + 2000,), {}),
    "GridSample": ((HIGH, normal(1, 3, 3, 2, scale=0.3)), {}),
    "GroupNormalization": ((IMAGE, GAIN, GAIN), {"num_groups": 2}),
    "GroupNormalization of sums of float64": (
        (IMAGE, GAIN, GAIN),
        {"num_groups": 2, "stash_type": TensorProto.DOUBLE},
    ),
    "InstanceNormalization": ((IMAGE, GAIN, GAIN), {}),
    "LRN": ((IMAGE,), {"size": 3, "alpha": 0.01}),
    "LSTM": ((STEPS, GATES, BACK), {"hidden_size": 3}),
    "LayerNormalization": ((ROWS, normal(512)), {}),
    "LogSoftmax": ((np.zeros((1, 3000)),), {}),
    "LpNormalization": ((ROWS,), {"p": 2, "axis": 1}),
    "LpPool": ((IMAGE,), {"kernel_shape": [4, 4], "p": 3}),
    "LpPool of a line": ((LINE,), {"kernel_shape": [7], "p": 2}),
    "LpPool of a volume": ((VOLUME,), {"kernel_shape": [3, 3, 3], "p": 2}),
    "MatMul": (FACTORS[:2], {}),
    "Mean": ((HIGH * 20, HIGH * 20), {}),
    "MeanVarianceNormalization": ((IMAGE,), {}),
    "NegativeLogLikelihoodLoss": ((SCORES, LABELS), {"reduction": "sum"}),
    "NegativeLogLikelihoodLoss of means": ((SCORES, LABELS, normal(5, mean=9)), {}),
    "RNN": ((STEPS, GATES[:, :3], BACK[:, :3]), {"hidden_size": 3}),
    "ReduceL1": ((ROWS, AXIS), {}),
    "ReduceL2": ((ROWS, AXIS), {}),
    "ReduceLogSum": ((abs(ROWS) * 9, AXIS), {}),
    "ReduceLogSumExp": ((np.zeros((1, 3000)), AXIS), {}),
    "ReduceMean": ((HIGH, AXIS), {}),
    "ReduceProd": ((normal(2, 300, scale=0.01, mean=1), AXIS), {}),
    "ReduceSum": ((ONES, AXIS), {}),
    "ReduceSumSquare": ((ROWS / 50, AXIS), {}),
    "Resize": ((IMAGE, "", SIZES), {"mode": "cubic"}),
    "RoiAlign": (
        (HIGH, np.array([[1, 1, 9, 12.0]], np.float64), np.array([0])),
        {"output_height": 2, "output_width": 2, "sampling_ratio": 8},
    ),
    "STFT": (
        (normal(1, 900, 1, scale=40, mean=40), np.array(300), "", np.array(600)),
        {"onesided": 1},
    ),
    "ScatterElements": ((ONES[:, :4], START, ONES), {"axis": 1, "reduction": "add"}),
    "ScatterND": ((ONES[:, :4].T, START.T, ONES.T), {"reduction": "add"}),
    "Softmax": ((np.zeros((1, 3000)),), {}),
    "SoftmaxCrossEntropyLoss": ((SCORES, LABELS), {"reduction": "sum"}),
    "SoftmaxCrossEntropyLoss of means": ((SCORES, LABELS, normal(5, mean=9)), {}),
    "Sum": ((HIGH * 30, HIGH * 30, -HIGH * 30), {}),
}


NEWER: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "CausalConvWithState": ((normal(1, 3, 40, scale=300), normal(3, 1, 4, scale=30)), {}),
    "CumProd": ((normal(2, 300, scale=0.01, mean=1), np.array(1)), {}),
    "LinearAttention": (
        tuple(normal(1, 40, 8, scale=6) for _ in range(3)),
        {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear", "scale": 0.01},
    ),
    "RMSNormalization": ((ROWS, normal(512)), {}),
}
"""Those of a version that ONNX Runtime lacks; ONNX's own evaluator is their reference."""

WITH_STATES = ("CausalConvWithState", "LinearAttention")
"""Operators whose second output must have a name."""

EXEMPT = {
    "Attention": "its scores are rounded before the softmax",
    "BatchNormalization": "one multiplication and one addition",
    "RotaryEmbedding": "two products",
    "Shrink": "one difference",
    "SwiGLU": "one product",
}
"""Operators of which docs/limits.md says that they round more than once, or that do not sum."""


def test_every_operator_that_sums_has_a_case() -> None:
    operators = {name.split()[0] for name in (*CASES, *NEWER)}
    assert ACCUMULATING - operators == set(EXEMPT)


def model(kind: int, names: Sequence[str], opset: int) -> onnx.ModelProto:
    """One node of each case; floats of 64 bits are inputs of the model."""
    nodes, inputs, constants, outputs = [], [], [], []
    for number, name in enumerate(names):
        given, attributes = (CASES | NEWER)[name]
        operands = [f"x{number}_{k}" if not isinstance(v, str) else "" for k, v in enumerate(given)]
        for operand, value in zip(operands, given, strict=True):
            if operand and value.dtype == np.float64:
                inputs.append(helper.make_tensor_value_info(operand, kind, value.shape))
            elif operand:
                constants.append(onnx.numpy_helper.from_array(value, operand))
        results = [f"y{number}"] + [f"state{number}"] * (name in WITH_STATES)
        nodes.append(helper.make_node(name.split()[0], operands, results, **attributes))
        outputs.append(helper.make_tensor_value_info(f"y{number}", kind, None))
    graph = helper.make_graph(nodes, "sums", inputs, outputs, constants)
    opsets = [helper.make_operatorsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def feeds(dtype: np.dtype, names: Sequence[str]) -> dict[str, np.ndarray]:
    return {
        f"x{number}_{k}": value.astype(dtype)
        for number, name in enumerate(names)
        for k, value in enumerate((CASES | NEWER)[name][0])
        if not isinstance(value, str) and value.dtype == np.float64
    }


def reference(names: Sequence[str], given: dict[str, np.ndarray]) -> list[np.ndarray]:
    if names[0] in NEWER:
        return ReferenceEvaluator(model(TensorProto.FLOAT, names, NEWEST)).run(None, given)
    wide = model(TensorProto.FLOAT, names, LAST_OF_ONNX_RUNTIME).SerializeToString()
    session = onnxruntime.InferenceSession(wide, providers=["CPUExecutionProvider"])
    return session.run(None, given)


GROUPS = [
    (tuple(name for name in CASES if not name.startswith("Einsum")), FIRST_BFLOAT16),
    (tuple(name for name in CASES if name.startswith("Einsum")), NEWEST + 1),
    (tuple(NEWER), NEWEST),
]
"""Cases, and an opset in which all have bfloat16."""


@pytest.mark.quick_cases("bfloat16-28")
@pytest.mark.parametrize(("names", "opset"), GROUPS, ids=["22", "28", "27"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_results_are_rounded_once(dtype: np.dtype, names: Sequence[str], opset: int) -> None:
    fed = feeds(dtype, names)
    wanted = reference(names, {name: value.astype(np.float32) for name, value in fed.items()})
    compiled = tvm_fusion.compile(model(TYPES[dtype], names, opset), threads=1)
    found = compiled(**fed)
    step = float(ml_dtypes.finfo(dtype).eps)
    for name, one, other in zip(names, found, wanted, strict=True):
        assert one.dtype == dtype, name
        limit = {"rtol": step, "atol": step * 0.02 * float(abs(other).max())}
        np.testing.assert_allclose(one.astype(np.float32), other, err_msg=name, **limit)


LENGTHS = st.integers(2049, 4200)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=6, deadline=None)
@given(length=LENGTHS, other=st.integers(1, 9), is_last=st.booleans(), seed=st.integers(0, 99))
def test_sums_of_any_length(
    dtype: np.dtype, length: int, other: int, is_last: bool, seed: int
) -> None:
    """Counts pass 2048 and sums of squares 65504, along the last axis and along the first."""
    names = ("L1", "L2", "LogSum", "LogSumExp", "Mean", "Sum", "SumSquare")
    axis = int(is_last)
    nodes = "".join(f"y{n} = Reduce{n}<keepdims = 0>(x, axes) " for n in names)
    shape = (other, length) if is_last else (length, other)
    kind = "float16" if dtype == np.float16 else "bfloat16"
    outputs = ", ".join(f"{kind}[{other}] y{n}" for n in names)
    text = f"""<ir_version: 10, opset_import: ["": 28]>
        g ({kind}[{shape[0]}, {shape[1]}] x) => ({outputs})
        <int64[1] axes = {{{axis}}}> {{ {nodes} }}"""
    x = np.random.default_rng(seed).uniform(0.5, 5.5, shape).astype(dtype)
    wide = x.astype(np.float64)
    total, squares = wide.sum(axis), (wide**2).sum(axis)
    logs = np.log(total), np.log(np.exp(wide).sum(axis))
    wanted = [total, np.sqrt(squares), *logs, total / length, total, squares]
    found = tvm_fusion.compile(onnx.parser.parse_model(text), threads=1)(x)
    step = float(ml_dtypes.finfo(dtype).eps)
    for name, one, right in zip(names, found, wanted, strict=True):
        with np.errstate(over="ignore"):
            right = right.astype(dtype).astype(np.float64)
        np.testing.assert_allclose(one.astype(np.float64), right, rtol=step, err_msg=name)
