# SPDX-License-Identifier: Apache-2.0
"""Operators whose results have sizes that depend on data have the results of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_reference import run_onnx

import tvm_fusion
from tests.selection import in_turns
from tvm_fusion.errors import TargetError, UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx

CHOSEN = """float half = {0.5} int64[1] zero = {0} int64 first = {0} int64[1] three = {3}
    int64[1] flat = {-1} int64[1] hundred = {100} int64[1] largest = {9223372036854775807}
    float[1] overlap = {0.3}"""
CHOOSE = """above = Greater(x, half) both = NonZero(above) places = Squeeze(both, zero)
    chosen = Gather(x, places)"""


def parse(inputs: str, outputs: str, nodes: str, constants: str = CHOSEN) -> onnx.ModelProto:
    text = f"g ({inputs}) => ({outputs}) <{', '.join(split(constants))}> {{ {nodes} }}"
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')


def split(constants: str) -> list[str]:
    """Declarations of constants, which the parser wants separated."""
    return [f"{part}}}" for part in " ".join(constants.split()).split("}")[:-1]]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, 7]).random(shape, dtype=np.float32)


def assert_same(model: onnx.ModelProto, *feeds: dict[str, np.ndarray]) -> Any:
    """Check the outputs for each of some inputs, one compiled model for all of them."""
    compiled = tvm_fusion.compile(model, threads=1)
    for feed in feeds:
        found = compiled(feed)
        found = found if isinstance(found, tuple) else (found,)
        for one, other in zip(found, run_onnx(model, feed), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    return compiled


def test_places_of_what_is_not_zero_and_of_nothing(tmp_path: Path) -> None:
    model = parse("float[3, 4] x", "int64[2, n] y", "y = NonZero(x)")
    x = np.where(random(3, 4) > 0.5, random(3, 4), 0).astype("float32")
    compiled = assert_same(model, {"x": x}, {"x": 0 * x}, {"x": x + 1})
    assert compiled.outputs[0].shape == (2, "selected")
    compiled.save(tmp_path / "model.so")
    loaded = tvm_fusion.load(tmp_path / "model.so", threads=1)
    np.testing.assert_array_equal(loaded(x), compiled(x))


def test_results_of_two_calls_do_not_share_memory() -> None:
    compiled = tvm_fusion.compile(parse("float[8] x", "int64[1, n] y", "y = NonZero(x)"), threads=1)
    first = compiled(np.ones(8, "float32"))
    compiled(np.array([0] * 7 + [1], "float32"))
    np.testing.assert_array_equal(first, [np.arange(8)])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_compress(axis: int | None) -> None:
    attribute = "" if axis is None else f"<axis = {axis}>"
    shape = {None: "n", 0: "n, 4", -1: "3, n"}[axis]
    model = parse(
        "float[3, 4] x, bool[3] c", f"float[{shape}] y", f"y = Compress {attribute} (x, c)"
    )
    x = random(3, 4)
    chosen = [np.array(bits) for bits in ([True, False, True], [False] * 3)]
    assert_same(model, *({"x": x, "c": c} for c in chosen))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("outputs", "nodes"),
    [
        ("float[n] y", "y = Mul(chosen, half)"),
        ("float[n] y", "y = Concat<axis = 0>(chosen, x)"),
        ("float[n] y", "y = Slice(chosen, zero, three, zero)"),
        ("float y", "y = ReduceSum<keepdims = 0>(chosen, zero)"),
        ("int64[n] y", "y = Cast<to = 7>(chosen)"),
        (
            "float[n] y, float[n] z",
            """shape = Shape(chosen) size = Gather(shape, first) sizes = Unsqueeze(size, zero)
            bounds = Concat<axis = 0>(three, sizes) least = ReduceMin<keepdims = 0>(bounds)
            k = Reshape(least, flat) y, order = TopK(chosen, k) z = Gather(chosen, order)""",
        ),
        (
            "float[n] y, int64[n] order",
            """shape = Shape(chosen) size = Gather(shape, first) k = Reshape(size, flat)
            y, order = TopK(chosen, k)""",
        ),
        (
            "int64[n, 3] y",
            """boxes = Gather(corners, places) image = Unsqueeze(boxes, zero)
            one = Unsqueeze(chosen, zero) scores = Unsqueeze(one, zero)
            y = NonMaxSuppression(image, scores, hundred, overlap)""",
        ),
        (  # boxes and scores are as many by different formulas
            "int64[n, 3] y",
            """boxes = Gather(corners, places) shift = Slice(boxes, zero, largest, zero)
            moved = Add(boxes, shift) image = Unsqueeze(moved, zero)
            one = Unsqueeze(chosen, zero) scores = Unsqueeze(one, zero)
            y = NonMaxSuppression(image, scores, hundred, overlap)""",
        ),
    ],
)
def test_what_is_computed_from_a_selection(outputs: str, nodes: str) -> None:
    inputs = "float[20] x" + (", float[20, 4] corners" if "corners" in nodes else "")
    model = parse(inputs, outputs, f"{CHOOSE} {nodes}")
    feeds = [{"x": random(20, seed=seed)} for seed in range(2)]
    feeds.append({"x": np.where(np.arange(20) == 3, random(20) + 0.5, 0).astype("float32")})
    for feed in feeds:
        feed |= {"corners": random(20, 4)} if "corners" in nodes else {}
    assert_same(model, *feeds)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("attribute", "inputs"),
    in_turns(
        ["", "<center_point_box = 1>"],
        ["", ", most", ", most, overlap", ", most, overlap, score"],
    ),
)
def test_suppressed_boxes(attribute: str, inputs: str) -> None:
    constants = "int64[1] most = {4} float[1] overlap = {0.3} float[1] score = {0.2}"
    model = parse(
        "float[2, 30, 4] boxes, float[2, 3, 30] scores",
        "int64[n, 3] y",
        f"y = NonMaxSuppression {attribute} (boxes, scores{inputs})",
        constants,
    )
    feeds = [
        {"boxes": random(2, 30, 4, seed=seed), "scores": random(2, 3, 30, seed=seed + 1)}
        for seed in range(2)
    ]
    feeds[1]["scores"] = np.round(feeds[1]["scores"], 1)  # equal ones
    feeds[1]["boxes"][:, ::3] = feeds[1]["boxes"][:, :1]
    assert_same(model, *feeds)


@pytest.mark.slow
def test_detector_that_returns_early_without_boxes() -> None:
    model = parse(
        "float[20] x, float[20, 4] corners",
        "int64[n] y",
        f"""{CHOOSE} boxes = Gather(corners, places) shape = Shape(boxes)
        count = ReduceProd<keepdims = 0>(shape) none = Equal(count, first)
        y = If (none) <
            then_branch = empty () => (int64[0] e) {{ e = Constant<value = int64[0] {{}}>() }},
            else_branch = some () => (int64[n] s) {{
                image = Unsqueeze(boxes, zero) one = Unsqueeze(chosen, zero)
                scores = Unsqueeze(one, zero)
                found = NonMaxSuppression(image, scores, hundred, overlap)
                last = Constant<value_int = 2>()
                s = Gather<axis = 1>(found, last)
            }}>""",
    )
    corners = random(20, 4)
    assert_same(model, *({"x": x, "corners": corners} for x in (random(20), 0 * random(20))))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("mode", "ratio", "pool"), in_turns(["half_pixel", "output_half_pixel"], [0, 2], ["avg", "max"])
)
def test_bins_of_regions(mode: str, ratio: int, pool: str) -> None:
    attributes = f"""output_height = 4, output_width = 5, spatial_scale = 0.5, mode = "{pool}",
        sampling_ratio = {ratio}, coordinate_transformation_mode = "{mode}" """
    model = parse(
        "float[2, 3, 12, 12] x, float[5, 4] regions, int64[5] images",
        "float[5, 3, 4, 5] y",
        f"y = RoiAlign <{attributes}> (x, regions, images)",
    )
    regions = 8 * random(5, 4)
    regions[:, 2:] += regions[:, :2]
    regions[0] = [-9, 3, 40, 30]
    regions[1, 2:] = regions[1, :2]  # A region without an extent.
    feed = {"x": random(2, 3, 12, 12), "regions": regions}
    assert_same(model, feed | {"images": np.array([0, 1, 1, 0, 1])})


@pytest.mark.slow
def test_bins_of_other_types() -> None:
    """Places of samples are as exact as the data."""
    attributes = 'output_height = 4, output_width = 3, sampling_ratio = 3, mode = "max"'
    x, regions = 100 * random(1, 2, 9, 9).astype("float64"), np.array([[0.3, 1.1, 7.7, 6.9]])
    model = parse(
        "double[1, 2, 9, 9] x, double[1, 4] regions, int64[1] images",
        "double[1, 2, 4, 3] y",
        f"y = RoiAlign <{attributes}> (x, regions, images)",
    )
    feed = {"x": x, "regions": regions, "images": np.array([0])}
    found = tvm_fusion.compile(model, threads=1)(**feed)
    wanted = ReferenceEvaluator(model).run(None, feed)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_an_image_out_of_range_is_the_nearest() -> None:
    model = parse(
        "float[2, 1, 4, 4] x, float[1, 4] regions, int64[1] images",
        "float[1, 1, 2, 2] y",
        "y = RoiAlign<output_height = 2, output_width = 2>(x, regions, images)",
    )
    compiled = tvm_fusion.compile(model, threads=1)
    x, region = random(2, 1, 4, 4), np.array([[0, 0, 3, 3]], "float32")
    for image, nearest in ((-7, 0), (99, 1)):
        found = compiled(x, region, np.array([image]))
        np.testing.assert_array_equal(found, compiled(x, region, np.array([nearest])))


def test_the_place_of_a_number() -> None:
    """ONNX infers a shape that ONNX Runtime does not return."""
    model = parse("float x", "int64[1, n] y", "y = NonZero(x)")
    compiled = tvm_fusion.compile(model, threads=1)
    assert compiled(np.float32(0)).shape == (1, 0)
    np.testing.assert_array_equal(compiled(np.float32(2)), [[0]])


@pytest.mark.slow
@pytest.mark.parametrize(("is_sorted", "dtype"), in_turns([1, 0], ["float32", "int64"]))
def test_different_elements(dtype: str, is_sorted: int) -> None:
    """First place of each element, its number among the different ones, and how often it occurs."""
    x = np.array([[3, 1, 3, 7], [1, -2, 7, 3], [-0.0, 0, 5, 3]]).astype(dtype)
    kind = "float" if dtype == "float32" else "int64"
    model = parse(
        f"{kind}[3, 4] x",
        f"{kind}[a] y, int64[b] place, int64[12] which, int64[c] count",
        f"y, place, which, count = Unique<sorted = {is_sorted}>(x)",
    )
    wanted = run_onnx(model, {"x": x})
    for found, expected in zip(tvm_fusion.compile(model)(x), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "is_sorted", "dtype"), in_turns([0, 1, -1], [1, 0, 1], ["float32", "int64", "int8"])
)
def test_different_slices_of_an_axis(axis: int, is_sorted: int, dtype: str) -> None:
    generator = np.random.default_rng([axis + 1, is_sorted])
    x = generator.integers(-1, 2, (7, 5, 2))
    x = np.moveaxis(x[generator.integers(0, 4, 7)][:, :, :1], 0, axis).astype(dtype)
    kind = {"float32": "float"}.get(dtype, dtype)
    sizes = ", ".join(map(str, x.shape))
    model = parse(
        f"{kind}[{sizes}] x",
        f"{kind}[a, b, c] y, int64[d] place, int64[7] which, int64[e] count",
        f"y, place, which, count = Unique<axis = {axis}, sorted = {is_sorted}>(x)",
    )
    compiled = tvm_fusion.compile(model, threads=1)
    for feed in (x, 0 * x, np.sort(x, axis)):
        for found, expected in zip(compiled(feed), run_onnx(model, {"x": feed}), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_too_many_pairs_of_slices() -> None:
    model = parse("float[300, 200] x", "float[a, 200] y", "y = Unique<axis = 0>(x)")
    with pytest.raises(UnsupportedOperatorError, match="18000000 pairs .* expected 1 to 16777216"):
        import_onnx(model)


@pytest.mark.slow
@pytest.mark.parametrize(("bins", "scale"), [((2, 3), 1.0), ((7, 7), 0.37), ((1, 1), 0.0625)])
def test_maxima_of_regions(bins: tuple[int, int], scale: float) -> None:
    """Regions outside of the image, without an extent, and with corners between pixels."""
    model = parse(
        "float[2, 3, 11, 13] x, float[n, 5] regions",
        f"float[n, 3, {bins[0]}, {bins[1]}] y",
        f"y = MaxRoiPool<pooled_shape = {[*bins]}, spatial_scale = {scale}>(x, regions)",
    )
    compiled = tvm_fusion.compile(model, shapes={"n": "n"}, threads=1)
    corners = (random(40, 4) * 21 - 5) / scale
    corners[:3] = [[100, 100, 120, 120], [0.5, 1.5, 2.5, 3.5], [5, 5, 1, 1]]
    regions = np.concatenate([np.arange(40)[:, None] % 2, corners], 1).astype("float32")
    x = random(2, 3, 11, 13) - 0.5
    (wanted,) = run_onnx(model, {"x": x, "regions": regions})
    np.testing.assert_array_equal(compiled(x, regions), wanted)
    regions[:, 0] = np.where(regions[:, 0], 99, -7)
    np.testing.assert_array_equal(compiled(x, regions), wanted)


@pytest.mark.slow
def test_numbers_that_are_none_are_one_element() -> None:
    x = np.array([np.nan, 2, np.nan, np.inf], np.float32)
    model = parse("float[4] x", "float[a] y, int64[b] place", "y, place = Unique(x)")
    found, place = tvm_fusion.compile(model)(x)
    np.testing.assert_array_equal(found, [2, np.inf, np.nan])
    np.testing.assert_array_equal(place, [1, 3, 0])


def test_refusals() -> None:
    for nodes, inputs, reason in (
        (
            "y = NonMaxSuppression(b, s, most)",
            "float[1, 9, 4] b, float[1, 1, 9] s, int64[1] most",
            "its input 'most' depends on data",
        ),
        (
            'y = RoiAlign<mode = "sum">(x, r, i)',
            "float[1, 1, 9, 9] x, float[2, 4] r, int64[2] i",
            "its mode is 'sum'; expected 'avg' or 'max'",
        ),
    ):
        output = "int64[n, 3] y" if "Non" in nodes else "float[2, 1, 1, 1] y"
        with pytest.raises(UnsupportedOperatorError, match=reason):
            import_onnx(parse(inputs, output, nodes))


def test_on_a_gpu_they_are_refused() -> None:
    model = parse("float[3, 4] x", "int64[2, n] y", "y = NonZero(x)")
    with pytest.raises(TargetError, match="NonZero is compiled for CPUs only"):
        tvm_fusion.compile(model, target="opencl")
