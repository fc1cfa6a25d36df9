# SPDX-License-Identifier: Apache-2.0
"""Models that would give wrong numbers or crash the process are refused, or made safe."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_cases import (
    assert_same_as_onnx_runtime,
    int64,
    normal,
    one_node,
    onnx_model,
    relax_ops,
    run_relax,
)

from tests.selection import in_turns
from tvm_fusion.errors import InvalidModelError, UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx

PARAMETERS = [np.abs(normal(4, seed=i)) for i in range(4)]

REFUSED: list[tuple[str, list[Any], dict[str, Any], int, str]] = [
    (
        "Dropout",
        [np.array(0.5, np.float32), np.array(True)],
        {},
        13,
        "it is in training mode, and drops numbers at random; export the model after",
    ),
    (
        "Resize",
        [None, None, int64(2, 4, 5, 3)],
        {"coordinate_transformation_mode": "half_pixel_of_mine"},
        19,
        "its coordinate_transformation_mode is 'half_pixel_of_mine'",
    ),
    (
        "Resize",
        [None, None, int64(2, 4, 5, 3)],
        {"mode": "lanczos"},
        13,
        "its mode is 'lanczos' with nearest_mode None",
    ),
    ("LpPool", [], {"kernel_shape": [2, 2], "ceil_mode": 1}, 18, "its ceil_mode is 1"),
    (
        "GridSample",
        [normal(2, 3, 3, 2)],
        {"mode": "spline"},
        16,
        "its mode is 'spline' with padding_mode 'zeros'",
    ),
    (
        "ConvTranspose",
        [normal(4, 3, 3, 3)],
        {"output_shape": [40, 40]},
        13,
        r"no padding gives its output_shape \[40, 40\]",
    ),
    ("GatherND", [int64(-1)], {"batch_dims": -7}, 12, "its attribute batch_dims is -7; expected 0"),
    ("Einsum", [], {"equation": "x?"}, 13, r"its equation is 'x\?'"),
    ("LRN", [], {"size": 0}, 13, "its size is 0; expected 1 or more"),
    ("LpNormalization", [], {"p": 3}, 13, "its p is 3; ONNX has 1 and 2"),
    ("Concat", [None], {"axis": 0}, 13, "its input 1 is missing"),
    ("Trilu", [int64(1, 2)], {}, 14, r"its input 'c0' has the shape \(2,\); expected one number"),
    ("CumProd", [int64(1, 2)], {}, 26, r"its axis is \[1, 2\]; expected one number"),
    ("Flatten", [], {"axis": 2**40}, 13, "its attribute axis is 1099511627776"),
    ("Split", [], {"num_outputs": 3, "axis": 1}, 18, "its num_outputs is 3, and it has 1 outputs"),
]


@pytest.mark.parametrize(("op_type", "constants", "attributes", "opset", "reason"), REFUSED)
def test_refusals(
    op_type: str, constants: list[Any], attributes: dict[str, Any], opset: int, reason: str
) -> None:
    model = one_node(op_type, (2, 4, 5, 6), *constants, opset=opset, **attributes)
    with pytest.raises(
        UnsupportedOperatorError, match=f"node 'op': {op_type} of ai.onnx, opset {opset}: {reason}"
    ):
        import_onnx(model)


def test_outputs_that_the_importer_does_not_compute() -> None:
    constants = [np.ones(4, np.float32)] * 4
    model = one_node("BatchNormalization", (2, 4, 5), *constants, opset=15)
    model.graph.node[0].output.extend(["extra", "more"])
    model.graph.output.append(helper.make_tensor_value_info("extra", TensorProto.FLOAT, None))
    with pytest.raises(UnsupportedOperatorError, match="its output 'extra' is not supported"):
        import_onnx(model)


def test_limits_that_are_no_numbers() -> None:
    node = helper.make_node("NonMaxSuppression", ["x", "scores", "most"], ["y"], name="op")
    constants = {"scores": normal(1, 1, 4), "most": int64(1, 2)}
    model = onnx_model([node], {"x": (1, 4, 4)}, ["y"], constants)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    with pytest.raises(UnsupportedOperatorError, match="'most' has the shape .* one number"):
        import_onnx(model)


def test_steps_that_are_no_numbers() -> None:
    node = helper.make_node("STFT", ["x", "step", "window"], ["y"], name="op")
    constants = {"step": np.zeros(0, np.int64), "window": normal(8)}
    with pytest.raises(InvalidModelError, match="shapes do not fit together"):
        import_onnx(onnx_model([node], {"x": (1, 32, 1)}, ["y"], constants))


def test_all_problems_in_one_error() -> None:
    nodes = [
        helper.make_node("Dropout", ["x", "ratio", "on"], ["a"], name="first"),
        helper.make_node("Dropout", ["a", "ratio", "on"], ["y"], name="second"),
    ]
    constants = {"ratio": np.array(0.5, np.float32), "on": np.array(True)}
    with pytest.raises(UnsupportedOperatorError, match="(?s)2 nodes .*'first'.*'second'"):
        import_onnx(onnx_model(nodes, {"x": (2, 3)}, ["y"], constants))


@pytest.mark.parametrize(
    ("op_type", "shape"), [("Reshape", (2,)), ("Expand", (2,)), ("Tile", (2,)), ("Slice", (2,))]
)
def test_shapes_that_depend_on_data(op_type: str, shape: tuple[int, ...]) -> None:
    names = ["x", "size", "size"] if op_type == "Slice" else ["x", "size"]
    model = onnx_model([helper.make_node(op_type, names, ["y"], name="op")], {"x": (2, 3)}, ["y"])
    model.graph.input.append(helper.make_tensor_value_info("size", TensorProto.INT64, shape))
    with pytest.raises(UnsupportedOperatorError, match="its input 'size' depends on data"):
        import_onnx(model)


def test_axes_that_depend_on_data() -> None:
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], name="op")
    model = onnx_model([node], {"x": (2, 3)}, ["y"])
    model.graph.input.append(helper.make_tensor_value_info("axes", TensorProto.INT64, (1,)))
    with pytest.raises(UnsupportedOperatorError, match="its axes 'axes' depend on data"):
        import_onnx(model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("op_type", ["Gather", "GatherElements"])
def test_constant_indices(op_type: str) -> None:
    model = one_node(op_type, (3, 4), np.array([[1, -1], [-4, 0]]), axis=1)
    imported = assert_same_as_onnx_runtime(model)
    assert "relax.minimum" not in relax_ops(imported)


@pytest.mark.parametrize("bad", [4, -5, 2**40])
@pytest.mark.parametrize("op_type", ["Gather", "GatherElements", "ScatterElements"])
def test_constant_indices_out_of_range(op_type: str, bad: int) -> None:
    constants = [np.array([[1, bad]])]
    if op_type == "ScatterElements":
        constants.append(normal(1, 2))
    model = one_node(op_type, (3, 4), *constants, axis=1)
    message = rf"node 'op' \({op_type}\) has the index {bad}; 'x' has the shape \(3, 4\)"
    with pytest.raises(InvalidModelError, match=message):
        import_onnx(model)


def test_constant_indices_far_out_of_range_of_constants() -> None:
    """numpy would wrap them, a size at a time."""
    graph = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]> far (float[2] x) => (float[2] y)
        <float[3] data = {1, 2, 3}, int64[2] places = {-7275828153236176120, 1}>
        { kept = GatherElements(data, places) y = Add(x, kept) }
    """)
    with pytest.raises(InvalidModelError, match="has the index -7275828153236176120"):
        import_onnx(graph)


def test_constant_coordinates_out_of_range() -> None:
    model = one_node("GatherND", (3, 4), np.array([[2, 3], [3, 0]]))
    with pytest.raises(InvalidModelError, match=r"'op' \(GatherND\) has the index 3; 'x' has the"):
        import_onnx(model)


def test_axis_of_indices_out_of_range() -> None:
    model = one_node("GatherElements", (3, 4), np.array([[1]]), axis=2)
    with pytest.raises(InvalidModelError, match="axis 2; 'x' has 2 dimensions|do not fit together"):
        import_onnx(model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("op_type", ["Div", "Mod"])
def test_integer_divisions(op_type: str) -> None:
    def quotient(divisor: str) -> onnx.ModelProto:
        node = helper.make_node(op_type, ["x", divisor], ["y"], name="op")
        constants = {"two": np.array([2, 2], np.int32), "zero": np.array([2, 0], np.int32)}
        model = onnx_model([node], {"x": (2,)}, ["y"], constants, dtype=TensorProto.INT32)
        model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT32
        return model

    feeds = {"x": np.array([7, 9], np.int32)}
    assert_same_as_onnx_runtime(quotient("two"), feeds)
    with pytest.raises(UnsupportedOperatorError, match="it divides integers by zero"):
        import_onnx(quotient("zero"))


def _quotient(op_type: str, divisor: np.ndarray, shape: tuple[int, ...]) -> onnx.ModelProto:
    node = helper.make_node(op_type, ["x", "divisor"], ["y"], name="op")
    kind = helper.np_dtype_to_tensor_dtype(divisor.dtype)
    model = onnx_model([node], {"x": shape}, ["y"], {"divisor": divisor}, dtype=kind)
    model.graph.output[0].type.tensor_type.elem_type = kind
    return model


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("op_type", ["Div", "Mod"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_divisions_by_minus_one(op_type: str, dtype: str) -> None:
    """The smallest integer has no positive counterpart: to divide it by -1 would trap."""
    smallest = np.iinfo(dtype).min
    data = np.array([[smallest, 7, 0]], dtype)
    imported = import_onnx(_quotient(op_type, np.full((2, 1), -1, dtype), data.shape))
    expected = [smallest, -7, 0] if op_type == "Div" else [0, 0, 0]
    np.testing.assert_array_equal(run_relax(imported, [data])[0], [expected] * 2)
    harmless = {"x": data[:, 1:]}
    assert_same_as_onnx_runtime(_quotient(op_type, np.full(2, -1, dtype), (1, 2)), harmless)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("op_type", ["Div", "Mod"])
def test_divisions_by_minus_one_among_others(op_type: str) -> None:
    smallest = np.iinfo(np.int32).min
    feeds = {"x": np.array([smallest, 7, 5], np.int32)}
    imported = import_onnx(_quotient(op_type, np.array([-1, 2, -1], np.int32), (3,)))
    expected = [smallest, 3, -5] if op_type == "Div" else [0, 1, 0]
    np.testing.assert_array_equal(run_relax(imported, list(feeds.values()))[0], expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("dtype", "op_type"), in_turns(["int8", "int32", "int64", "uint16"], ["Div", "Mod"])
)
def test_divisions_by_numbers_from_data(op_type: str, dtype: str) -> None:
    """Divided by zero, which ONNX leaves open, the quotient is the dividend and the remainder 0."""
    least = np.iinfo(dtype).min
    pairs = [(x, y) for x in (least, 7, 9) for y in (3, 2, 1, 0, *([-1, -4] if least else []))]
    x, y = (np.array(values, dtype) for values in zip(*pairs, strict=True))
    model = _quotient(op_type, y, x.shape)
    kind = helper.np_dtype_to_tensor_dtype(y.dtype)
    model.graph.input.append(helper.make_tensor_value_info("divisor", kind, y.shape))
    del model.graph.initializer[:]
    found = run_relax(import_onnx(model), [x, y])[0]
    wanted = []
    for a, b in pairs:
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else a
        quotient = a if (a, b) == (least, -1) else quotient
        wanted.append(quotient if op_type == "Div" else a % b if b else 0)
    np.testing.assert_array_equal(found, np.array(wanted, dtype))


def test_powers_of_integers() -> None:
    node = helper.make_node("Pow", ["x", "x"], ["y"], name="op")
    model = onnx_model([node], {"x": (3,)}, ["y"], dtype=TensorProto.INT32)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT32
    assert_same_as_onnx_runtime(model, {"x": np.array([3, 0, 9], np.int32)})


def test_constant_outputs_without_elements() -> None:
    constants = {"c": normal(2, 3), "low": int64(1), "high": int64(1)}
    nodes = [
        helper.make_node("Slice", ["c", "low", "high"], ["y"]),
        helper.make_node("Relu", ["x"], ["z"]),
    ]
    model = onnx_model(nodes, {"x": (2,)}, ["z", "y"], constants)
    with pytest.raises(
        UnsupportedOperatorError, match=r"output 'y' of shape \(0, 3\) is empty; em"
    ):
        import_onnx(model)


@pytest.mark.parametrize(("operator", "opset"), [("CumSum", 17), ("CumProd", 26)])
@pytest.mark.parametrize("axis", [2, -3])
def test_sums_along_a_dimension_that_is_not_there(operator: str, opset: int, axis: int) -> None:
    """The importer leaves that to TVM, which fails when it lowers the operator."""
    text = f"""<ir_version: 10, opset_import: ["": {opset}]> g (float[2,3] x) => (float[2,3] y)
        <int32 axis = {{{axis}}}> {{ y = {operator}(x, axis) }}"""
    with pytest.raises(UnsupportedOperatorError, match=f"its axis is {axis}; expected one of 2"):
        import_onnx(onnx.parser.parse_model(text))


def test_operators_that_no_others_define_with_these_attributes() -> None:
    """ONNX has no body for them: to expand the model again and again would never end."""
    text = """<ir_version: 13, opset_import: ["": 25]>
        g (float[2,4,4,8] Q, float[2,2,6,8] K, float[2,2,6,6] V) => (float[2,4,4,6] Y)
        { Y = Attention<is_causal = 1, softmax_precision = 0>(Q, K, V) }"""
    with pytest.raises(UnsupportedOperatorError, match=r"\(Attention\) cannot be imported: O"):
        import_onnx(onnx.parser.parse_model(text))
