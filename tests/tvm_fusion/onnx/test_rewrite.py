# SPDX-License-Identifier: Apache-2.0
"""Every mend keeps what the model computes: the numbers are those of ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
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
from tvm_fusion.errors import InvalidModelError, ModelWarning, UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx

OLD = {
    "Dropout": {"ratio": 0.3},
    "Clip": {"min": -0.5, "max": 6.0},
    "Pad": {"pads": [0, 0, 1, -1, 0, 0, 0, 1], "value": 0.5},
    "Softmax": {"axis": 1},
    "LRN": {"size": 3, "alpha": 0.1},
    "Split": {"axis": 1, "split": [1, 3]},
    "ReduceMean": {"axes": [2, 3]},
    "ReduceSum": {"axes": [1], "keepdims": 0},
    "Slice": {"starts": [1, -2], "ends": [3, 2**63 - 1], "axes": [1, 3]},
    "Unsqueeze": {"axes": [0, 3]},
    "Upsample": {"scales": [1.0, 1.0, 2.0, 3.0], "mode": "linear"},
    "AveragePool": {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("op_type", OLD)
def test_operators_of_opset_7(op_type: str) -> None:
    """Attributes that later became inputs, with other defaults."""
    model = one_node(op_type, (2, 4, 5, 6), opset=7, listed=True, **OLD[op_type])
    if op_type == "Split":
        model.graph.node[0].output.append("z")
    assert_same_as_onnx_runtime(model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("opset", [7, 9, 12])
def test_batch_normalization_with_the_outputs_of_training(opset: int) -> None:
    parameters = [np.abs(normal(4, seed=i)) + 0.5 for i in range(4)]
    model = one_node("BatchNormalization", (2, 4, 3, 3), *parameters, opset=opset, listed=True)
    if opset < 9:
        model.graph.node[0].output.extend(["mean", "var", "saved_mean", "saved_var"])
    imported = assert_same_as_onnx_runtime(model) if opset >= 9 else import_onnx(model)
    assert "relax.nn.batch_norm" in relax_ops(imported)
    assert len(imported.outputs) == 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("opset", [15, 19])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_batch_normalization_in_training_mode(opset: int, dtype: str) -> None:
    """The statistics of the data are also outputs; ONNX's reference has few types."""
    parameters = [np.abs(normal(4, seed=i)).astype(dtype) + np.ones((), dtype) for i in range(4)]
    names = ["scale", "bias", "old_mean", "old_variance"]
    outputs = ["y", "mean", "variance"]
    node = helper.make_node(
        "BatchNormalization",
        ["x", *names],
        outputs,
        epsilon=0.25,
        momentum=0.75,
        training_mode=1,
    )
    constants = dict(zip(names, parameters, strict=True))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = onnx_model([node], {"x": (2, 4, 3, 5)}, outputs, constants, opset, dtype=kind)
    for value in model.graph.output:
        value.type.tensor_type.elem_type = kind
    x = (3 * normal(2, 4, 3, 5, seed=9) + 1).astype(dtype)
    scale, bias, mean, variance = (p.astype("f8").reshape(4, 1, 1) for p in parameters)
    own, axes = x.astype("f8"), (0, 2, 3)
    wanted = (own - own.mean(axes, keepdims=True)) / np.sqrt(own.var(axes, keepdims=True) + 0.25)
    statistics = [
        (0.75 * old.ravel() + 0.25 * new)
        for old, new in ((mean, own.mean(axes)), (variance, own.var(axes)))
    ]
    found = run_relax(import_onnx(model), [x])
    tolerance = 2e-3 if dtype == "float16" else 1e-5
    for one, other in zip(found, [wanted * scale + bias, *statistics], strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(one.astype("f8"), other, rtol=tolerance, atol=tolerance)


def test_weights_that_are_standardised_become_constants() -> None:
    parameters = {"scale": normal(8), "bias": normal(8, seed=2), "shape": int64(8, 3, 3, 3)}
    parameters |= {"w": normal(1, 8, 27), "m": np.zeros(8, "f4"), "v": np.ones(8, "f4")}
    nodes = [
        helper.make_node(
            "BatchNormalization", ["w", "scale", "bias", "m", "v"], ["n", "a", "b"], training_mode=1
        ),
        helper.make_node("Reshape", ["n", "shape"], ["k"]),
        helper.make_node("Conv", ["x", "k"], ["y"]),
    ]
    imported = assert_same_as_onnx_runtime(
        onnx_model(nodes, {"x": (1, 3, 8, 8)}, ["y"], parameters)
    )
    assert relax_ops(imported) == {"relax.nn.conv2d"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("op_type", "opset"), [("Upsample", 9), ("Resize", 10)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resizing_before_coordinate_modes(op_type: str, opset: int, mode: str) -> None:
    scales = np.array([1, 1, 2, 3], np.float32)
    model = one_node(op_type, (1, 2, 3, 4), scales, opset=opset, mode=mode)
    assert_same_as_onnx_runtime(model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resizing_before_coordinate_modes_inside_of_a_branch(mode: str) -> None:
    nodes = [helper.make_node("Upsample", ["x", "scales"], ["r"], mode=mode)]
    scales = {"scales": np.array([1, 1, 2, 3], np.float32)}
    assert_same_as_onnx_runtime(_always(nodes, (1, 2, 3, 4), scales, opset=9))


@pytest.mark.slow
@pytest.mark.parametrize("opset", [1, 11, 12])
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_softmaxes_of_matrices(opset: int, axis: int | None) -> None:
    """Before opset 13 the axes from ``axis`` on, by default 1, are one."""
    given = {} if axis is None else {"axis": axis}
    for op_type in ("Hardmax", "LogSoftmax", "Softmax"):
        assert_same_as_onnx_runtime(one_node(op_type, (2, 3, 4), opset=opset, **given))
    nodes = [helper.make_node("Hardmax", ["x"], ["r"], **given)]
    assert_same_as_onnx_runtime(_always(nodes, (2, 3, 4), {}, opset=max(opset, 11)))


def test_opset_that_cannot_be_upgraded() -> None:
    """Scalar broadcasting along an axis ended with opset 7."""
    model = one_node("Add", (2, 3, 4), normal(3), opset=6, listed=True, broadcast=1, axis=1)
    model.graph.node[0].attribute[0].i = 7
    with pytest.raises(InvalidModelError, match="model of opset 6 cannot be converted to 17"):
        import_onnx(model)


def test_undefined_names_in_a_model_that_is_upgraded() -> None:
    model = one_node("Mish", (2, 3), opset=12)
    model.graph.node[0].input[0] = "lost"
    with (
        pytest.warns(ModelWarning, match="Mish, of opset 18"),
        pytest.raises(InvalidModelError, match=r"cannot be converted to 18 \(Input lost is undef"),
    ):
        import_onnx(model)


def test_sum_becomes_additions() -> None:
    node = helper.make_node("Sum", ["a", "b", "c"], ["y"], name="total")
    model = onnx_model([node], {"a": (2, 3), "b": (3,)}, ["y"], {"c": normal(2, 1)})
    assert relax_ops(assert_same_as_onnx_runtime(model)) == {"relax.add"}


def test_sum_inside_of_a_branch() -> None:
    nodes = [helper.make_node("Sum", ["x", "x", "c"], ["r"])]
    imported = assert_same_as_onnx_runtime(_always(nodes, (2, 3), {"c": normal(3)}))
    assert relax_ops(imported) == {"relax.add"}


def test_expanded_operators_inside_of_a_branch() -> None:
    nodes = [helper.make_node("Celu", ["x"], ["t"]), helper.make_node("Celu", ["t"], ["r"])]
    assert_same_as_onnx_runtime(_always(nodes, (2, 3), {}))


def test_identity_and_dropout_vanish() -> None:
    nodes = [
        helper.make_node("Identity", ["x"], ["a"]),
        helper.make_node("Dropout", ["a", "ratio"], ["b", "unused"]),
        helper.make_node("Dropout", ["b", "ratio", "off"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Identity", ["d"], ["y"]),
    ]
    constants = {"ratio": np.array(0.4, np.float32), "off": np.array(False)}
    model = onnx_model(nodes, {"x": (2, 3)}, ["y"], constants)
    assert relax_ops(assert_same_as_onnx_runtime(model)) == {"relax.nn.relu"}


@pytest.mark.parametrize(
    ("start", "end", "step", "vanishes"),
    [
        (0, 2**63 - 1, 1, True),
        (0, 2**31 - 1, 1, True),
        (1, 2**63 - 1, 1, False),
        (-1, 2**63 - 1, 1, False),
        (0, 4, 1, False),
        (0, 2**63 - 1, 2, False),
    ],
)
def test_slice_of_all_vanishes(start: int, end: int, step: int, vanishes: bool) -> None:
    bounds = [int64(*both) for both in ((0, start), (2**63 - 1, end), (0, 1), (1, step))]
    names = ["start", "end", "axes", "step"]
    nodes = [
        helper.make_node("Slice", ["x", *names], ["part"]),
        helper.make_node("Relu", ["part"], ["y"]),
    ]
    model = onnx_model(nodes, {"x": (3, 5)}, ["y"], dict(zip(names, bounds, strict=True)))
    assert ("relax.strided_slice" not in relax_ops(import_onnx(model))) == vanishes


def test_mask_of_a_dropout_that_drops_nothing() -> None:
    nodes = [helper.make_node("Dropout", ["x"], ["y", "mask"])]
    model = onnx_model(nodes, {"x": (2, 3)}, ["y"])
    model.graph.output.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, (2, 3)))
    assert_same_as_onnx_runtime(model)


def test_shape_arithmetic_is_folded() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["batch"]),
        helper.make_node("Unsqueeze", ["batch", "axis"], ["first"]),
        helper.make_node("Concat", ["first", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["flat"]),
        helper.make_node("Shape", ["flat"], ["again"], start=1),
        helper.make_node("Cast", ["again"], ["factor"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["flat", "factor"], ["y"]),
    ]
    constants = {"zero": np.array(0, np.int64), "axis": int64(0), "rest": int64(-1)}
    model = onnx_model(nodes, {"x": (2, 3, 4)}, ["y"], constants)
    imported = assert_same_as_onnx_runtime(model)
    assert relax_ops(imported) == {"relax.reshape", "relax.multiply"}


def test_shape_arithmetic_on_a_symbolic_batch() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], end=1),
        helper.make_node("Concat", ["shape", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    model = onnx_model(nodes, {"x": ("n", 3, 4)}, ["y"], {"rest": int64(12)})
    imported = import_onnx(model, {"n": "n"})
    assert imported.outputs[0].shape == ("n", 12)
    data = normal(5, 3, 4)
    np.testing.assert_array_equal(run_relax(imported, [data])[0], data.reshape(5, 12))


def test_axes_and_shapes_may_be_scalars() -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["x", "axis"], ["apart"]),
        helper.make_node("Mul", ["apart", "x"], ["y"]),
        helper.make_node("Expand", ["number", "size"], ["z"]),
    ]
    constants = {"axis": np.array(-2), "size": np.array(4), "number": normal(1)}
    assert_same_as_onnx_runtime(onnx_model(nodes, {"x": (2, 3)}, ["y", "z"], constants))


def test_weights_made_by_nodes_are_folded() -> None:
    value = helper.make_tensor("value", TensorProto.FLOAT, [1], [0.25])
    nodes = [
        helper.make_node("ConstantOfShape", ["size"], ["w"], value=value),
        helper.make_node("Unsqueeze", ["flat"], ["bias"], axes=[0]),
        helper.make_node("Gemm", ["x", "w", "bias"], ["y"]),
    ]
    constants = {"size": int64(300, 2), "flat": normal(2)}
    imported = assert_same_as_onnx_runtime(
        onnx_model(nodes, {"x": (2, 300)}, ["y"], constants, opset=9, listed=True)
    )
    assert not relax_ops(imported) & {"relax.broadcast_to", "relax.expand_dims"}


def test_constants_that_would_fill_the_memory_are_refused() -> None:
    nodes = [
        helper.make_node("ConstantOfShape", ["size"], ["c"], name="huge"),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    model = onnx_model(nodes, {"x": (1,)}, ["y"], {"size": int64(30_000, 30_000)})
    with pytest.raises(InvalidModelError, match=r"'huge' \(ConstantOfShape\): .* more than 4 GiB"):
        import_onnx(model)


@pytest.mark.parametrize(
    ("op_type", "sizes", "message"),
    [
        ("ConstantOfShape", [-(10**13)], "of the negative size -10000000000000"),
        ("ConstantOfShape", [-2, -2], "of the negative size -2"),
        ("Tile", [-(10**13), 1], "of the negative size -10000000000000"),
        ("ConstantOfShape", [2**31], "of 2147483648 elements; expected at most 2147483647"),
        ("Tile", [2**40, 1], r"of \d+ elements; expected at most 2147483647"),
    ],
)
def test_constants_of_absurd_sizes_are_refused(
    op_type: str, sizes: list[int], message: str
) -> None:
    """Sizes that another node computes, which the inference of shapes does not see."""
    names = ["size"] if op_type == "ConstantOfShape" else ["row", "size"]
    nodes = [
        helper.make_node("Neg", ["minus"], ["size"]),
        helper.make_node(op_type, names, ["c"], name="op"),
        helper.make_node("ReduceMax", ["c"], ["top"]),
        helper.make_node("Add", ["x", "top"], ["y"]),
    ]
    constants = {"minus": -int64(*sizes), "row": normal(1, 3)}
    with pytest.raises(InvalidModelError, match=rf"'op' \({op_type}\) makes a constant {message}"):
        import_onnx(onnx_model(nodes, {"x": (1,)}, ["y"], constants))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "exponent", [np.array(3, np.int64), np.array(2.1, np.float64), np.array(0.5, np.float64)]
)
def test_exponent_of_another_type(exponent: np.ndarray) -> None:
    model = one_node("Pow", (2, 3), exponent)
    assert_same_as_onnx_runtime(model, {"x": np.abs(normal(2, 3))})


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("exponent", [*range(1, 10), -2])
def test_whole_exponents_become_products(exponent: int) -> None:
    model = one_node("Pow", (2, 3), np.array(exponent, np.float32))
    imported = assert_same_as_onnx_runtime(model, {"x": normal(2, 3)})
    count = str(imported.mod).count("R.multiply")
    assert count == {2: 1, 3: 2, 4: 2, 5: 3, 6: 3, 7: 4, 8: 3}.get(exponent, 0)


def test_exponents_with_more_axes_than_the_base_stay() -> None:
    model = one_node("Pow", (3,), np.full((1, 1), 2, np.float32))
    assert "R.power" in str(assert_same_as_onnx_runtime(model).mod)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("opset", "attributes"),
    in_turns(
        [13, 17, 18, 22],
        [{}, {"axis": 1, "p": 1}, {"axis": -3, "p": 2}],
    ),
)
def test_lp_normalization(attributes: dict[str, int], opset: int) -> None:
    data = normal(3, 4, 5)
    data[1], data[:, 2], data[2, 3, 1] = 0, 0, np.nan
    model = one_node("LpNormalization", (3, 4, 5), opset=opset, **attributes)
    assert_same_as_onnx_runtime(model, {"x": data})


@settings(max_examples=settings.default.max_examples // 5)
@given(st.data())
def test_automatic_padding(data: st.DataObject) -> None:
    op_type = data.draw(st.sampled_from(["AveragePool", "Conv", "LpPool", "MaxPool"]))
    size = data.draw(st.tuples(st.integers(3, 9), st.integers(3, 9)))
    attributes: dict[str, Any] = {
        "kernel_shape": data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        "auto_pad": data.draw(st.sampled_from(["SAME_LOWER", "SAME_UPPER"])),
    }
    # ONNX Runtime refuses strides that skip elements here.
    attributes["strides"] = [data.draw(st.integers(1, k)) for k in attributes["kernel_shape"]]
    weights = [normal(3, 2, *attributes["kernel_shape"])] if op_type == "Conv" else []
    model = one_node(op_type, (1, 2, *size), *weights, **attributes)
    assert_same_as_onnx_runtime(model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("mode", "op_type"),
    in_turns(
        ["SAME_LOWER", "SAME_UPPER"],
        ["AveragePool", "LpPool", "MaxPool"],
    ),
)
def test_automatic_padding_of_dilated_windows(op_type: str, mode: str) -> None:
    """ONNX Runtime forgets the dilation here, so it gets the padding written out."""
    attributes = {"kernel_shape": [3, 2], "strides": [2, 3], "dilations": [2, 2]}
    shape = (1, 2, 9, 8)
    # Windows that span 5 and 3 of 9 and 8 elements, 5 and 3 times: 4 and 1 elements of padding.
    pads = [2, 0, 2, 1] if mode == "SAME_UPPER" else [2, 1, 2, 0]
    explicit = one_node(op_type, shape, opset=19, pads=pads, **attributes)
    implied = one_node(op_type, shape, opset=19, auto_pad=mode, **attributes)
    expected = assert_same_as_onnx_runtime(explicit)
    tvm.ir.assert_structural_equal(import_onnx(implied).mod, expected.mod)


def test_automatic_padding_with_a_symbolic_batch() -> None:
    attributes = {"kernel_shape": [2, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"}
    model = one_node("MaxPool", (1, 2, 9, 9), **attributes)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    assert import_onnx(model, {"n": "n"}).outputs[0].shape == ("n", 2, 5, 5)


@settings(max_examples=settings.default.max_examples // 7)
@given(st.data())
def test_output_shape_of_transposed_convolutions(data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, 3))
    kernel = data.draw(st.integers(1, 4))
    size = data.draw(st.integers(2, 5))
    full = stride * (size - 1) + kernel
    wanted = data.draw(st.integers(max(1, full - kernel), full + stride - 1))
    upper = data.draw(st.sampled_from(["NOTSET", "SAME_UPPER", "SAME_LOWER"]))
    model = one_node(
        "ConvTranspose",
        (1, 2, size, size),
        normal(2, 3, kernel, kernel),
        strides=[stride, stride],
        output_shape=[wanted, wanted],
        auto_pad=upper,
    )
    assert assert_same_as_onnx_runtime(model).outputs[0].shape == (1, 3, wanted, wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_output_padding_beside_automatic_padding(mode: str) -> None:
    """ONNX Runtime keeps the size times the stride, and ONNX infers more."""
    constants = {f"w{kernel}": normal(2, 3, kernel, kernel) for kernel in (1, 3, 4)}
    nodes = [
        helper.make_node(
            "ConvTranspose",
            ["x", f"w{kernel}"],
            [f"y{kernel}"],
            auto_pad=mode,
            strides=[3, 2],
            output_padding=[2, 1],
        )
        for kernel in (1, 3, 4)
    ]
    names = [node.output[0] for node in nodes]
    assert_same_as_onnx_runtime(onnx_model(nodes, {"x": (1, 2, 5, 4)}, names, constants))


RESIZES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"mode": "nearest"}, [None, np.array([1, 1, 2, 3], np.float32)]),
    ({"mode": "linear"}, [None, np.array([1, 1, 0.5, 2], np.float32)]),
    ({"mode": "linear", "coordinate_transformation_mode": "align_corners"}, [int64(1, 2, 9, 7)]),
    ({"mode": "cubic", "coordinate_transformation_mode": "asymmetric"}, [int64(1, 2, 8, 12)]),
    ({"mode": "nearest", "nearest_mode": "floor", "axes": [3, 2]}, [int64(12, 8)]),
    ({"mode": "linear", "axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"}, [int64(8, 18)]),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("attributes", "inputs"), RESIZES)
def test_resize(attributes: dict[str, Any], inputs: list[Any]) -> None:
    constants = inputs if len(inputs) == 2 else [None, None, *inputs]
    opset = 18 if "axes" in attributes else 13
    assert_same_as_onnx_runtime(
        one_node("Resize", (1, 2, 4, 6), *constants, opset=opset, **attributes)
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(
    ("before", "after"), [((1, 5), (1, 9)), ((4, 1), (8, 2)), ((4, 6), (1, 3)), ((1, 1), (1, 1))]
)
def test_corners_of_a_single_pixel_are_aligned(
    mode: str, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    model = one_node(
        "Resize",
        (1, 2, *before),
        *(None, None, int64(1, 2, *after)),
        mode=mode,
        coordinate_transformation_mode="align_corners",
    )
    assert_same_as_onnx_runtime(model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("op_type", ["Celu", "Softsign", "HardSwish", "HardSigmoid"])
def test_activations(op_type: str) -> None:
    assert_same_as_onnx_runtime(one_node(op_type, (2, 3, 4)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("op_type", "constants", "attributes"),
    [
        ("Clip", [np.array(0, np.float32), np.array(6, np.float32)], {}),
        ("Clip", [None, np.array(0.25, np.float32)], {}),
        ("Pad", [int64(0, 0, 1, 2, 0, 0, -1, 0), np.array(2, np.float32)], {}),
        ("Pad", [int64(0, 0, 1, 2, 0, 0, 1, 0)], {"mode": "reflect"}),
        ("Reshape", [int64(0, -1, 2)], {}),
        ("ReduceSum", [int64(1, 3)], {"keepdims": 0}),
        ("ReduceMax", [], {"axes": [-1]}),
        ("Split", [int64(1, 2, 1)], {"axis": 1}),
        ("Concat", [normal(2, 1, 5, 6)], {"axis": 1}),
        ("LRN", [], {"size": 5}),
        ("Flatten", [], {"axis": 2}),
        ("DepthToSpace", [], {"blocksize": 2, "mode": "CRD"}),
        ("MaxPool", [], {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}),
        ("AveragePool", [], {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2]}),
        ("Conv", [normal(4, 2, 3, 3), normal(4)], {"group": 2, "auto_pad": "SAME_LOWER"}),
    ],
)
def test_operators_of_networks(op_type: str, constants: list[Any], attributes: Any) -> None:
    model = one_node(op_type, (2, 4, 5, 6), *constants, opset=13, **attributes)
    if op_type == "Split":
        model.graph.node[0].output.extend(["y1", "y2"])
    assert_same_as_onnx_runtime(model)


def _always(
    nodes: list[onnx.NodeProto],
    shape: tuple[int, ...],
    constants: dict[str, np.ndarray],
    opset: int = 17,
) -> onnx.ModelProto:
    """An If that always runs the nodes, which compute "r" from "x" and the constants."""
    result = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
    branch = helper.make_graph(nodes, "branch", [], [result])
    node = helper.make_node("If", ["c0"], ["y"], then_branch=branch, else_branch=branch)
    constants = {"c0": np.array(True), **constants}
    return onnx_model([node], {"x": shape}, ["y"], constants, opset)


def _choice(condition: bool | None) -> onnx.ModelProto:
    """y = relu(x * w) or -x; the condition is an input if it is None."""

    def branch(nodes: list[onnx.NodeProto], weight: np.ndarray) -> onnx.GraphProto:
        result = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
        tensors = [onnx.numpy_helper.from_array(weight, "w")]
        return helper.make_graph(nodes, "branch", [], [result], tensors)

    first = [helper.make_node("Mul", ["x", "w"], ["t"]), helper.make_node("Relu", ["t"], ["r"])]
    second = [helper.make_node("Sub", ["w", "x"], ["r"])]
    nodes = [
        helper.make_node(
            "If",
            ["condition"],
            [name],
            name=name,
            then_branch=branch(first, normal(3)),
            else_branch=branch(second, np.zeros(3, np.float32)),
        )
        for name in ("y", "z")
    ]
    constants = {} if condition is None else {"condition": np.array(condition)}
    model = onnx_model(nodes, {"x": (2, 3)}, ["y", "z"], constants)
    if condition is None:
        value = helper.make_tensor_value_info("condition", TensorProto.BOOL, ())
        model.graph.input.append(value)
    return model


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("condition", "op"), [(True, "multiply"), (False, "subtract")])
def test_branches_of_known_conditions(condition: bool, op: str) -> None:
    """Both branches hold tensors of the same names, and two Ifs hold the same branches."""
    assert f"relax.{op}" in relax_ops(assert_same_as_onnx_runtime(_choice(condition)))


def test_branches_of_other_shapes_need_a_known_condition() -> None:
    model = _choice(None)
    for node in model.graph.node:
        [branch] = [entry.g for entry in node.attribute if entry.name == "else_branch"]
        branch.node[0].CopyFrom(helper.make_node("Transpose", ["x"], ["r"]))
    with pytest.raises(UnsupportedOperatorError, match="If of ai.onnx.*its condition depends on"):
        import_onnx(model)


def _with_functions(model: onnx.ModelProto, bodies: dict[str, list[onnx.NodeProto]]) -> None:
    domain = helper.make_operatorsetid("local", 1)
    model.opset_import.append(domain)
    for name, nodes in bodies.items():
        model.functions.append(
            helper.make_function("local", name, ["a"], ["b"], nodes, list(model.opset_import))
        )


def test_functions_of_the_model_are_inlined() -> None:
    nodes = [helper.make_node("Twice", ["x"], ["t"], domain="local")]
    nodes.append(helper.make_node("Twice", ["t"], ["y"], domain="local"))
    model = onnx_model(nodes, {"x": (2, 3)}, ["y"])
    _with_functions(model, {"Twice": [helper.make_node("Add", ["a", "a"], ["b"])]})
    assert relax_ops(assert_same_as_onnx_runtime(model)) == {"relax.add"}


def test_functions_that_call_themselves_are_refused() -> None:
    model = onnx_model([helper.make_node("F", ["x"], ["y"], domain="local")], {"x": (2,)}, ["y"])
    _with_functions(model, {"F": [helper.make_node("F", ["a"], ["b"], domain="local")]})
    with pytest.raises(InvalidModelError, match="function 'F' calls itself|checker refuses"):
        import_onnx(model)


def test_functions_that_explode_are_refused() -> None:
    """Thirty functions, each calling the next one twice, are 2**30 nodes."""
    model = onnx_model([helper.make_node("F0", ["x"], ["y"], domain="local")], {"x": (2,)}, ["y"])
    bodies = {
        f"F{i}": [
            helper.make_node(f"F{i + 1}", ["a"], ["t"], domain="local"),
            helper.make_node(f"F{i + 1}", ["t"], ["b"], domain="local"),
        ]
        for i in range(30)
    }
    _with_functions(model, {**bodies, "F30": [helper.make_node("Relu", ["a"], ["b"])]})
    with pytest.raises(InvalidModelError, match="more than 200000 nodes once its functions are"):
        import_onnx(model)
