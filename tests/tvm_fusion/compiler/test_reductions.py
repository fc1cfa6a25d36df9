# SPDX-License-Identifier: Apache-2.0
"""Reductions of compiled models on the CPU: numbers of every operator, NaN, infinities, kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

import tvm_fusion
from tests.selection import in_turns
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.explain import explain
from tvm_fusion.compiler.targets import resolve

Array = NDArray[Any]


def _log_sum_exp(data: Array, axis: Any, keepdims: bool) -> Array:
    top = np.max(data, axis=axis, keepdims=True)
    total = np.log(np.sum(np.exp(data - top), axis=axis, keepdims=True)) + top
    return total if keepdims else np.squeeze(total, axis)


REFERENCES: dict[str, Callable[..., Array]] = {
    "ReduceSum": np.sum,
    "ReduceMean": np.mean,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
    "ReduceL1": lambda data, **more: np.sum(np.abs(data), **more),
    "ReduceL2": lambda data, **more: np.sqrt(np.sum(data * data, **more)),
    "ReduceSumSquare": lambda data, **more: np.sum(data * data, **more),
    "ReduceLogSum": lambda data, **more: np.log(np.sum(data, **more)),
    "ReduceLogSumExp": _log_sum_exp,
    "ArgMax": np.argmax,
    "ArgMin": np.argmin,
}
OF_ALL_TYPES = ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ArgMax", "ArgMin")
AXES: list[tuple[int, ...]] = [(0, 1, 2, 3), (1,), (-1,), (0, 2), (1, 2, 3)]
SHAPE = (3, 5, 37, 4)
Reduction = tuple[str, tuple[int, ...], bool]


def reducing(
    reductions: Sequence[Reduction], shape: Sequence[int], dtype: str = "float32"
) -> onnx.ModelProto:
    """Every reduction of the one input ``x``, in outputs by their position."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes, axes_of, outputs = [], [], []
    for number, (op, axes, keepdims) in enumerate(reductions):
        kind_of_output = TensorProto.INT64 if op.startswith("Arg") else kind
        outputs.append(helper.make_tensor_value_info(f"y{number}", kind_of_output, None))
        more: dict[str, Any] = {"keepdims": int(keepdims)}
        inputs = ["x"]
        if op.startswith("Arg"):
            more["axis"] = axes[0]
        else:
            inputs.append(f"axes{number}")
            axes_of.append(numpy_helper.from_array(np.array(axes, "int64"), inputs[-1]))
        nodes.append(helper.make_node(op, inputs, [f"y{number}"], **more))
    graph = helper.make_graph(
        nodes, "reduce", [helper.make_tensor_value_info("x", kind, shape)], outputs, axes_of
    )
    return helper.make_model(graph, opset_imports=[helper.make_operatorsetid("", 18)], ir_version=8)


def expected(data: Array, op: str, axes: tuple[int, ...], keepdims: bool) -> Array:
    """The result in float64, or in the type of integers."""
    wide = data.astype("float64") if data.dtype.kind == "f" else data
    axis = axes[0] if op.startswith("Arg") else axes
    with np.errstate(all="ignore"):
        return np.asarray(REFERENCES[op](wide, axis=axis, keepdims=keepdims))


def outputs_of(model: onnx.ModelProto, data: Array) -> list[Array]:
    found = tvm_fusion.compile(model)(data)
    return [np.asarray(array) for array in (found if isinstance(found, list | tuple) else [found])]


def draw(dtype: str, shape: Sequence[int] = SHAPE) -> Array:
    generator = np.random.default_rng(7)
    if np.dtype(dtype).kind == "f":  # positive for logarithms, near 1 for products
        return np.exp2(generator.standard_normal(shape) / 8).astype(dtype)
    return generator.integers(1, 4, shape).astype(dtype)


@pytest.mark.quick_cases("float16")
@pytest.mark.parametrize("dtype", in_turns(["float32", "float64", "float16", "int32", "int64"]))
def test_numbers_of_every_operator(dtype: str) -> None:
    operators = REFERENCES if dtype == "float32" else OF_ALL_TYPES
    cases = [
        (op, AXES[(place + turn) % len(AXES)], bool((place + turn) % 2))
        for place, op in enumerate(operators)
        for turn in ((0, 2) if dtype == "float32" else (1,))
    ]
    data = draw(dtype)
    found = outputs_of(reducing(cases, SHAPE, dtype), data)
    tolerance = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}.get(dtype, 0)
    for case, result in zip(cases, found, strict=True):
        exact = expected(data, *case)
        assert result.shape == exact.shape, case
        wide = exact.astype(result.dtype) if result.dtype.kind == "i" else exact
        np.testing.assert_allclose(result, wide, rtol=tolerance, err_msg=str(case))


@pytest.mark.parametrize(("axis", "dtype"), in_turns([0, 1], ["float32", "float16"], every=3))
def test_nan_and_infinities_are_as_in_numpy(dtype: str, axis: int) -> None:
    rows = np.random.default_rng(0).standard_normal((7, 83)).astype(dtype)
    rows[0, [50, 77]] = np.nan
    rows[1, [3, 82]] = -np.inf
    rows[2, [5, 80]] = np.inf
    rows[3, 0], rows[3, 1:] = np.nan, np.inf
    rows[4], rows[5] = -np.inf, np.inf
    data = rows if axis else np.ascontiguousarray(rows.T)
    ops = ("ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "ReduceSum", "ReduceMean", "ReduceL1")
    cases = [(op, (axis,), False) for op in ops]
    found = outputs_of(reducing(cases, data.shape, dtype), data)
    for (op, *more), result in zip(cases, found, strict=True):
        exact = expected(data, op, *more)
        if op in ops[:4]:
            np.testing.assert_array_equal(result, exact.astype(result.dtype), err_msg=op)
        else:
            np.testing.assert_allclose(result, exact, rtol=2e-2, atol=2e-2, err_msg=op)


def test_extremes_after_a_producer_keep_nan() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("ReduceMax", ["r"], ["y"], axes=[1], keepdims=0),
    ]
    floats = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in _VALUES]
    graph = helper.make_graph(nodes, "relu", floats[:1], floats[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_operatorsetid("", 17)])
    data = np.array([[1, np.nan] * 20, [-np.inf] * 40, [2] * 40], "float32")
    [result] = outputs_of(model, data)
    np.testing.assert_array_equal(result, np.array([np.nan, 0, 2], "float32"))
    [kernel] = explain(model)["functions"]
    assert kernel["rule"] == "CoalescedReduce (rows)" and not kernel["slow"]


_VALUES = (("x", (3, 40)), ("y", (3,)))


@pytest.mark.parametrize(("op", "exact"), [(relax.op.sum, 0), (relax.op.prod, 1)])
def test_reducing_nothing_gives_the_identity(op: Any, exact: float) -> None:
    x, builder = relax.Var("x", relax.TensorType((3, 0), "float32")), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(op(x, 1)))
        builder.emit_func_output(result)
    target = resolve("native")
    program = pipeline.build(pipeline.optimize(builder.get(), target), target)
    data = tvm.runtime.tensor(np.zeros((3, 0), "float32"))
    found = relax.VirtualMachine(program, tvm.cpu())["main"](data)
    np.testing.assert_array_equal(found.numpy(), np.full(3, exact, "float32"))


@pytest.mark.parametrize(
    ("shape", "axes", "form"),
    [
        ((64, 1000), (1,), "rows"),
        ((4, 1000, 200), (1,), "columns"),
        ((2, 16, 7, 7), (2, 3), "rows"),
        ((1000, 3), (0,), "stream"),
    ],
)
def test_explain_tells_how_a_reduction_is_computed(
    shape: tuple[int, ...], axes: tuple[int, ...], form: str
) -> None:
    for op in ("ReduceSum", "ReduceMax"):
        [kernel] = explain(reducing([(op, axes, False)], shape))["functions"]
        assert kernel["rule"] == f"CoalescedReduce ({form})" and kernel["calls"] == 1


@pytest.mark.parametrize(
    ("op", "attributes", "rule"),
    [
        ("Softmax", {"axis": -1}, "Softmax"),
        ("LogSoftmax", {"axis": 1}, "Softmax"),
        ("GlobalAveragePool", {}, "CoalescedReduce (rows)"),
        ("AveragePool", {"kernel_shape": [3, 3]}, "Pooling"),
    ],
)
def test_chains_and_pools_stay_one_kernel(op: str, attributes: dict[str, Any], rule: str) -> None:
    node = helper.make_node(op, ["x"], ["y"], **attributes)
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 16, 12, 20))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "one", values, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_operatorsetid("", 17)])
    assert [use["rule"] for use in explain(model)["functions"]] == [rule]
