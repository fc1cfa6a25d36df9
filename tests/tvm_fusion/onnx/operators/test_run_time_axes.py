# SPDX-License-Identifier: Apache-2.0
"""Axes from data: the numbers of ONNX Runtime, and an error where they fit no shape."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx_cases import normal

import tvm_fusion
from tvm_fusion.errors import InvalidInputError, UnsupportedOperatorError
from tvm_fusion.onnx.operators.reductions import REDUCTIONS


def _model(graph: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> graph {graph}')


def _expected(model: onnx.ModelProto, *arguments: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, arguments, strict=True)))[0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("op_type", REDUCTIONS)
def test_a_shape_that_one_set_of_axes_gives(op_type: str) -> None:
    model = _model(
        f"(float[2,3,4] x, int64[2] axes) => (float[1,3,1] y) {{ y = {op_type}(x, axes) }}"
    )
    compiled = tvm_fusion.compile(model, threads=1)
    data = np.abs(normal(2, 3, 4))
    for axes in ([0, 2], [-1, 0], [2, -3]):
        found = compiled(data, np.array(axes))
        np.testing.assert_allclose(found, _expected(model, data, np.array(axes)), rtol=1e-5)


def test_a_shape_that_several_axes_give() -> None:
    model = _model(
        "(float[3,3,3] x, int64[1] axes) => (float[3,3] y)"
        " { [sum] y = ReduceSum<keepdims = 0>(x, axes) }"
    )
    compiled = tvm_fusion.compile(model, threads=1)
    data = normal(3, 3, 3)
    for axis in range(-3, 3):
        expected = data.sum(axis)
        np.testing.assert_allclose(compiled(data, np.array([axis])), expected, 1e-4, 1e-5)
    message = r"node 'sum' \(ReduceSum\) has axes out of bounds; 'x' has the shape \(3, 3, 3\)"
    for axis in (3, -4, 1 << 40):
        with pytest.raises(InvalidInputError, match=message):
            compiled(data, np.array([axis]))


def test_axes_that_give_another_shape() -> None:
    model = _model(
        "(float[2,3,4] x, int64[2] axes) => (float[2,1,1] y) { [mean] y = ReduceMean(x, axes) }"
    )
    compiled = tvm_fusion.compile(model, threads=1)
    data = normal(2, 3, 4)
    np.testing.assert_allclose(
        compiled(data, np.array([2, 1])), data.mean((1, 2), keepdims=True), 1e-5, 1e-6
    )
    message = r"'mean' \(ReduceMean\) has axes that do not give the shape \(2, 1, 1\) of its result"
    for axes in ([0, 1], [0, 2], [1, 1], [0, 0], [2, -1]):
        with pytest.raises(InvalidInputError, match=message):
            compiled(data, np.array(axes))


def test_all_axes_give_a_number() -> None:
    model = _model(
        "(int32[2,3] x, int64[2] axes) => (int32 y) { y = ReduceMax<keepdims = 0>(x, axes) }"
    )
    data = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert tvm_fusion.compile(model, threads=1)(data, np.array([-2, 1])) == 5


def test_the_shape_of_a_result_must_be_known() -> None:
    model = _model("(float[2,3] x, int64[1] axes) => (float[a,b] y) { y = ReduceSum(x, axes) }")
    with pytest.raises(UnsupportedOperatorError, match="a model that declares that shape"):
        tvm_fusion.compile(model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("op_type", ["CumSum", "CumProd"])
@pytest.mark.parametrize("kind", ["int64", "int32[1]"])
def test_an_axis_of_a_scan(op_type: str, kind: str) -> None:
    model = _model(
        f"(float[2,3,4] x, {kind} axis) => (float[2,3,4] y)"
        f" {{ [scan] y = {op_type}<reverse = 1>(x, axis) }}",
        26,
    )
    compiled = tvm_fusion.compile(model, threads=1)
    data, scan = normal(2, 3, 4), np.cumsum if op_type == "CumSum" else np.cumprod
    dtype, size = kind.split("[")[0], (1,) if "[" in kind else ()
    for axis in range(-3, 3):
        expected = np.flip(scan(np.flip(data, axis), axis), axis)
        found = compiled(data, np.full(size, axis, dtype))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    message = rf"'scan' \({op_type}\) has an axis out of bounds; 'x' has the shape \(2, 3, 4\)"
    for axis in (3, -4):
        with pytest.raises(InvalidInputError, match=message):
            compiled(data, np.full(size, axis, dtype))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("op_type", "wanted"), [("ReduceMax", -np.inf), ("ReduceMin", np.inf), ("ReduceSum", 0)]
)
def test_reductions_of_nothing(op_type: str, wanted: float) -> None:
    model = _model(
        f"(float[2,0,4] x, int64[1] axes) => (float[2,1,4] y) {{ y = {op_type}(x, axes) }}", 20
    )
    compiled = tvm_fusion.compile(model, threads=1)
    data = np.zeros((2, 0, 4), np.float32)
    arguments = {"x": data, "axes": np.array([1])}
    found = compiled(*(arguments[spec.name] for spec in compiled.inputs))
    np.testing.assert_array_equal(found, np.full((2, 1, 4), wanted, np.float32))
