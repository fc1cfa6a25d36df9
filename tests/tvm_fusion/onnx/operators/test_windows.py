# SPDX-License-Identifier: Apache-2.0
"""Resize by sums of slices, windows put back into images, and deformed windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx_cases import assert_same_as_onnx_runtime, int64, normal, one_node, onnx_model

import tvm_fusion
from tests.selection import in_turns
from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("shape", [(1, 2, 1, 4), (2, 1, 3, 1), (1, 1, 1, 1)])
def test_reflection_along_one_pixel(mode: str, shape: tuple[int, ...]) -> None:
    grid = np.random.default_rng(0).uniform(-3, 3, (shape[0], 3, 5, 2)).astype("float32")
    feeds = {"x": normal(*shape), "grid": grid}
    options = {"mode": mode, "padding_mode": "reflection", "align_corners": 1}
    node = helper.make_node("GridSample", list(feeds), ["y"], **options)
    inputs = {name: value.shape for name, value in feeds.items()}
    compiled = tvm_fusion.compile(onnx_model([node], inputs, ["y"], opset=20), threads=1)
    wide = [np.concatenate([feeds["x"]] * 2, axis) for axis in (2, 3) if shape[axis] == 1]
    x = np.concatenate([wide[0]] * 2, 3) if len(wide) == 2 else wide[0]
    reference = ReferenceEvaluator(onnx_model([node], inputs | {"x": x.shape}, ["y"], opset=20))
    (wanted,) = reference.run(None, feeds | {"x": x})
    np.testing.assert_allclose(compiled(**feeds), wanted, rtol=1e-4, atol=1e-5)


HALVES = np.array([1, 1, 0.6, 0.7], np.float32)


def resize(
    shape: tuple[int, ...], scales: Any, sizes: Any = None, roi: Any = None, **attributes: Any
) -> onnx.ModelProto:
    return one_node("Resize", shape, roi, scales, sizes, opset=19, **attributes)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "attributes",
    [
        {"mode": "linear"},
        {"mode": "cubic"},
        {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1},
        {"mode": "linear", "antialias": 1},
        {"mode": "cubic", "antialias": 1, "exclude_outside": 1},
        {"mode": "nearest", "nearest_mode": "ceil"},
        {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"},
        {"mode": "linear", "coordinate_transformation_mode": "asymmetric"},
        {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"},
    ],
)
def test_scales_that_give_no_whole_sizes(attributes: dict[str, Any]) -> None:
    assert_same_as_onnx_runtime(resize((2, 3, 11, 9), HALVES, **attributes))


def test_corners_are_those_of_the_results() -> None:
    """The first and the last element stay, though the scale says otherwise."""
    aligned = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    model = resize((1, 1, 3, 5), HALVES, **aligned)
    imported = assert_same_as_onnx_runtime(model)
    assert imported.outputs[0].shape == (1, 1, 1, 3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_every_axis_can_change(mode: str) -> None:
    assert_same_as_onnx_runtime(resize((5, 7), None, int64(9, 4), mode=mode))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounding", "mode"),
    in_turns(
        ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"],
        ["half_pixel", "align_corners"],
    ),
)
def test_nearest_pixels_half_way_between_two(rounding: str, mode: str) -> None:
    """Places are quotients by the scale, whose inverse is rounded."""
    options = {"nearest_mode": rounding, "coordinate_transformation_mode": mode}
    for before, after in [((2, 3), (7, 9)), ((5, 7), (6, 14)), ((6, 4), (2, 6)), ((3, 2), (21, 8))]:
        model = resize((1, 1, *before), None, int64(1, 1, *after), mode="nearest", **options)
        assert_same_as_onnx_runtime(model)


def test_the_smaller_scale_for_both_axes() -> None:
    attributes = {"axes": [2, 3], "keep_aspect_ratio_policy": "not_larger", "mode": "linear"}
    model = resize((1, 2, 7, 9), None, int64(5, 5), **attributes)
    feeds = {"x": normal(1, 2, 7, 9)}
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    found = tvm_fusion.compile(model, threads=1)(feeds)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_region_of_some_axes() -> None:
    region = np.array([0.2, -0.3, 0.9, 0.8], np.float32)
    attributes = {
        "axes": [2, 3],
        "coordinate_transformation_mode": "tf_crop_and_resize",
        "extrapolation_value": 9.0,
        "mode": "linear",
    }
    model = resize((1, 2, 6, 7), None, int64(4, 5), region, **attributes)
    imported = import_onnx(model)
    assert imported.outputs[0].shape == (1, 2, 4, 5)
    feeds = {"x": normal(1, 2, 6, 7)}
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    found = tvm_fusion.compile(model, threads=1)(feeds)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert (found == 9).any()


def test_sums_of_too_many_slices_are_refused() -> None:
    model = resize((1, 1, 400, 4), None, int64(1, 1, 4, 4), mode="linear", antialias=1)
    with pytest.raises(UnsupportedOperatorError, match="'op': Resize .*: it uses antialias"):
        import_onnx(model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("image", "block", "attributes"),
    [
        ((7, 6), (2, 3), {"strides": [2, 1], "pads": [1, 0, 0, 2]}),
        ((6, 6), (2, 2), {"dilations": [2, 1]}),
        ((9,), (4,), {"strides": [3]}),
    ],
)
def test_windows_in_columns(
    image: tuple[int, ...], block: tuple[int, ...], attributes: dict[str, list[int]]
) -> None:
    rank = len(image)
    strides, dilations = (attributes.get(n, [1] * rank) for n in ("strides", "dilations"))
    pads = attributes.get("pads", [0] * 2 * rank)
    counts = [
        (image[i] + pads[i] + pads[rank + i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1
        for i in range(rank)
    ]
    shape = (2, 3 * int(np.prod(block)), int(np.prod(counts)))
    model = one_node("Col2Im", shape, int64(*image), int64(*block), opset=18, **attributes)
    assert_same_as_onnx_runtime(model)


def test_unpooled_maxima() -> None:
    """The places that a MaxPool has found, in an image of the size of its own."""
    x = normal(2, 3, 6, 8)
    pool = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        helper.make_node("MaxPool", ["x"], ["most", "places"], **pool),
    ]
    most, places = ReferenceEvaluator(onnx_model(nodes, {"x": x.shape}, ["most", "places"])).run(
        None, {"x": x}
    )
    node = helper.make_node("MaxUnpool", ["x", "i"], ["y"], name="op", **pool)
    model = onnx_model([node], {"x": most.shape}, ["y"])
    info = helper.make_tensor_value_info("i", onnx.TensorProto.INT64, places.shape)
    model.graph.input.append(info)
    assert_same_as_onnx_runtime(model, {"x": most, "i": places})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((2, 3, 7, 8), {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]}),
        ((1, 2, 9, 6), {"kernel_shape": [2, 3], "dilations": [2, 1], "storage_order": 1}),
        ((1, 2, 9, 7), {"kernel_shape": [2, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
        ((2, 1, 9), {"kernel_shape": [4], "strides": [2], "ceil_mode": 1}),
        ((1, 2, 4, 5, 6), {"kernel_shape": [2, 2, 2]}),
    ],
)
def test_places_of_maxima(shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
    node = helper.make_node("MaxPool", ["x"], ["y", "places"], name="op", **attributes)
    model = onnx_model([node], {"x": shape}, ["y"])
    model.graph.output.append(helper.make_tensor_value_info("places", TensorProto.INT64, None))
    # Few different numbers: the first one of those that are equal counts.
    x = np.random.default_rng(0).integers(-3, 3, shape).astype("float32")
    assert_same_as_onnx_runtime(model, {"x": x})


def test_places_without_sizes_are_refused() -> None:
    nodes = [
        helper.make_node("NonZero", ["v"], ["found"]),
        helper.make_node("Cast", ["found"], ["row"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["row", "axis"], ["x"]),
        helper.make_node("MaxPool", ["x"], ["y", "places"], name="op", kernel_shape=[2]),
    ]
    model = onnx_model(nodes, {"v": (6,)}, ["y"], {"axis": int64(0)})
    model.graph.output.append(helper.make_tensor_value_info("places", TensorProto.INT64, None))
    with pytest.raises(UnsupportedOperatorError, match="'places' needs the shape of 'x'"):
        import_onnx(model)


def test_unpooling_to_another_size_is_refused() -> None:
    node = helper.make_node("MaxUnpool", ["x", "i", "s"], ["y"], name="op", kernel_shape=[2, 2])
    constants = {"i": np.zeros((1, 1, 2, 2), np.int64), "s": int64(1, 1, 5, 5)}
    model = onnx_model([node], {"x": (1, 1, 2, 2)}, ["y"], constants)
    with pytest.raises(UnsupportedOperatorError, match=r"its output_shape is \[1, 1, 5, 5\]"):
        import_onnx(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "given"), in_turns([2, 1], [[], ["bias"], ["bias", "mask"]], every=2)
)
def test_deformed_windows(groups: int, given: list[str]) -> None:
    taps, rows, columns = 2 * 3, 4, 4
    shapes = {
        "x": (2, 4, 7, 6),
        "weight": (6, 4 // groups, 2, 3),
        "offset": (2, 2 * 2 * taps, rows, columns),
        "bias": (6,),
        "mask": (2, 2 * taps, rows, columns),
    }
    names = ["x", "weight", "offset", *given]
    node = helper.make_node(
        "DeformConv",
        names,
        ["y"],
        name="op",
        offset_group=2,
        group=groups,
        kernel_shape=[2, 3],
        strides=[2, 2],
        pads=[1, 1, 1, 2],
        dilations=[1, 1],
    )
    model = onnx_model([node], {name: shapes[name] for name in names}, ["y"], opset=19)
    feeds = {name: normal(*shapes[name], seed=i) for i, name in enumerate(names)}
    feeds["offset"] *= 3  # some lie far outside
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    found = tvm_fusion.compile(model, threads=1)(feeds)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
