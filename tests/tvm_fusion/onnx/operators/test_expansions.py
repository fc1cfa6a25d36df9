# SPDX-License-Identifier: Apache-2.0
"""Operators that become several nodes keep their numbers, in every type that ONNX has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx_cases import assert_same_as_onnx_runtime, int64, normal, onnx_model, run_relax

import tvm_fusion
from tests.selection import in_turns
from tvm_fusion.errors import InvalidModelError, UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx

FLOATS = ("float32", "float16", "float64", "bfloat16")
ELEMENTS = {str(helper.tensor_dtype_to_np_dtype(n)): n for n in range(1, 17) if n not in (8,)}
EDGES = [0.0, -0.0, 1.0, -1.0, 5.5, -5.5, np.inf, -np.inf, np.nan]


def node_model(
    op_type: str,
    feeds: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray] | None = None,
    results: Mapping[str, str] | None = None,
    opset: int = 28,
    **attributes: Any,
) -> onnx.ModelProto:
    """One node that reads ``feeds``, then ``constants``; ``results`` has outputs and types."""
    first = next(iter(feeds.values()))
    results = results or {"y": str(first.dtype)}
    names = [*feeds, *(constants or {})]
    node = helper.make_node(op_type, names, list(results), name="op", **attributes)
    model = onnx_model([node], {}, [], constants, opset)
    for name, value in feeds.items():
        kind = ELEMENTS[str(value.dtype)]
        model.graph.input.append(helper.make_tensor_value_info(name, kind, value.shape))
    for name, dtype in results.items():
        info = helper.make_tensor_value_info(name, ELEMENTS[dtype], None)
        model.graph.output.append(info)
    return model


def outputs(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return run_relax(import_onnx(model), list(feeds.values()))


def typed(values: Any, dtype: str) -> np.ndarray:
    return np.asarray(values).astype(helper.tensor_dtype_to_np_dtype(ELEMENTS[dtype]))


@pytest.mark.parametrize(("dtype", "positive", "negative"), in_turns(FLOATS, [0, 1], [0, 1]))
def test_infinities_of_one_sign(dtype: str, positive: int, negative: int) -> None:
    feeds = {"x": typed(EDGES, dtype)}
    signs = {"detect_positive": positive, "detect_negative": negative}
    model = node_model("IsInf", feeds, results={"y": "bool"}, **signs)
    wanted = [bool(v == np.inf and positive or v == -np.inf and negative) for v in EDGES]
    np.testing.assert_array_equal(outputs(model, feeds)[0], wanted)


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_numbers(dtype: str) -> None:
    feeds = {"x": typed(EDGES, dtype)}
    model = node_model("IsNaN", feeds, results={"y": "bool"})
    np.testing.assert_array_equal(outputs(model, feeds)[0], np.isnan(EDGES))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_remainders_of_floats_have_the_sign_of_the_divisor(dtype: str) -> None:
    pairs = [(x, y) for x in EDGES for y in [*EDGES, 3.0, -3.0]]
    x, y = (typed(values, dtype) for values in zip(*pairs, strict=True))
    feeds = {"x": x, "d": y}
    (found,) = outputs(node_model("Mod", feeds, results={"y": dtype}), feeds)
    with np.errstate(invalid="ignore"):
        wanted = np.mod(x, y)
    np.testing.assert_array_equal(found, wanted)
    is_number = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found[is_number]), np.signbit(wanted[is_number]))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint64"])
def test_shifts_by_any_number_fill_up_with_copies_of_the_sign(dtype: str, direction: str) -> None:
    limits = np.iinfo(dtype)
    bits, least, most = limits.bits, int(limits.min), int(limits.max)
    numbers = [least, least // 3, -1, 0, 1, 5, most] if least else [0, 1, 5, most // 3, most]
    places = [0, 1, bits - 1, bits, bits + 1, most, *([-1, -bits, least] if least else [])]
    pairs = [(x, y) for x in numbers for y in places]

    def shifted(x: int, y: int) -> int:
        if not 0 <= y < bits:
            return -1 if direction == "RIGHT" and x < 0 else 0
        whole = x << y if direction == "LEFT" else x >> y
        return (whole - least) % 2**bits + least

    wanted = np.array([shifted(*pair) for pair in pairs], dtype)
    x, y = (np.array(values, dtype) for values in zip(*pairs, strict=True))
    model = node_model("BitShift", {"x": x, "n": y}, direction=direction)
    np.testing.assert_array_equal(outputs(model, {"x": x, "n": y})[0], wanted)
    known = node_model("BitShift", {"x": x}, {"n": y}, direction=direction)
    np.testing.assert_array_equal(outputs(known, {"x": x})[0], wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("axis", "kind"), in_turns([0, 1, -1], ["int64", "uint8", "int8", "float32"])
)
def test_one_hot(axis: int, kind: str) -> None:
    feeds = {"x": typed([[1, 9, 10], [0, 3, 200 if kind == "uint8" else -10]], kind)}
    constants = {"depth": typed([10.0], "float32"), "values": typed([2, 5], "float16")}
    model = node_model("OneHot", feeds, constants, {"y": "float16"}, axis=axis)
    (found,) = outputs(model, feeds)
    wanted = np.full((2, 3, 10), 2.0, "float16")
    for place, index in np.ndenumerate(feeds["x"].astype(int)):
        if -10 <= index < 10:
            wanted[(*place, index)] = 5
    np.testing.assert_array_equal(found, np.moveaxis(wanted, -1, axis))


def test_one_hot_with_values_from_data() -> None:
    feeds = {"x": int64(1, 0), "values": normal(2)}
    nodes = [helper.make_node("OneHot", ["x", "depth", "values"], ["y"], name="op")]
    model = onnx_model(nodes, {}, ["y"], {"depth": np.array(3, np.int64)})
    model.graph.input.append(helper.make_tensor_value_info("x", TensorProto.INT64, (2,)))
    model.graph.input.append(helper.make_tensor_value_info("values", TensorProto.FLOAT, (2,)))
    assert_same_as_onnx_runtime(model, feeds)


def test_one_hot_of_a_depth_from_data_is_refused() -> None:
    feeds = {"x": int64(1, 0), "depth": np.array(3)}
    model = node_model("OneHot", feeds, {"values": normal(2)}, {"y": "float32"})
    with pytest.raises(UnsupportedOperatorError, match="its input 'depth' depends on data"):
        import_onnx(model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin"])
def test_extremes_of_bools(op_type: str) -> None:
    feeds = {"x": np.random.default_rng(0).random((3, 4, 2)) < 0.5}
    model = node_model(op_type, feeds, {"axes": int64(1)}, keepdims=0)
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_array_equal(tvm_fusion.compile(model, threads=1)(feeds), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("largest", [0, 1])
def test_sorting_of_every_type(largest: int) -> None:
    """NaN counts as the largest, whatever is beside it; both zeros are equal."""
    kinds = (*FLOATS, "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    feeds, nodes = {}, []
    for dtype in kinds:
        values = np.random.default_rng(3).permutation(24).reshape(4, 6)
        data = typed(values if dtype.startswith("u") else values - 11, dtype)
        if dtype in FLOATS:
            data[0, :4], data[1, 1:] = [np.nan, np.inf, -np.nan, -np.inf], [-0.0, 0, -0.0, 0, -0.0]
        else:
            data[0, :2] = np.iinfo(dtype).max, np.iinfo(dtype).min
        feeds[dtype] = data
        results = [f"{dtype}/values", f"{dtype}/places"]
        names = [dtype, "k"]
        nodes.append(helper.make_node("TopK", names, results, dtype, largest=largest, sorted=0))
    model = onnx_model(nodes, {}, [], {"k": int64(4)}, 24)
    for dtype, data in feeds.items():
        info = helper.make_tensor_value_info
        model.graph.input.append(info(dtype, ELEMENTS[dtype], data.shape))
        model.graph.output.append(info(f"{dtype}/values", ELEMENTS[dtype], None))
        model.graph.output.append(info(f"{dtype}/places", TensorProto.INT64, None))
    found = tvm_fusion.compile(model, threads=1)(feeds)
    for data, values, places in zip(feeds.values(), found[::2], found[1::2], strict=True):
        # Signs of NaN do not count; of equal numbers the first comes first.
        keys = data if data.dtype.kind in "iu" else np.abs(data) * np.sign(data)
        wide = keys.astype(object if data.dtype.kind in "iu" else float)
        order = np.argsort(wide, -1, kind="stable")
        if largest:
            order = 5 - np.argsort(wide[:, ::-1], -1, kind="stable")[:, ::-1]
        np.testing.assert_array_equal(places, order[:, :4], str(data.dtype))
        wanted = np.take_along_axis(data, order[:, :4], -1)
        np.testing.assert_array_equal(values.astype(float), wanted.astype(float))


def exponential(x: np.ndarray, alpha: float, gamma: float) -> np.ndarray:
    return gamma * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("op_type", "attributes", "formula"),
    [
        ("Elu", {"alpha": 0.5}, lambda x: exponential(x, 0.5, 1)),
        ("Selu", {}, lambda x: exponential(x, 1.6732632, 1.0507010)),
        ("Celu", {"alpha": 2.0}, lambda x: 2 * exponential(x / 2, 1, 1)),
        ("ThresholdedRelu", {"alpha": 0.5}, lambda x: np.where(x > 0.5, x, 0)),
    ],
)
def test_activations_in_every_type(
    dtype: str, op_type: str, attributes: dict[str, float], formula: Any
) -> None:
    feeds = {"x": typed([*np.linspace(-5, 5, 31), np.inf, -np.inf], dtype)}
    (found,) = outputs(node_model(op_type, feeds, **attributes), feeds)
    assert found.dtype == feeds["x"].dtype
    limit = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    wanted = formula(feeds["x"].astype("float64"))
    limit = max(limit, 1e-6) if op_type != "Elu" else limit  # attributes are of 32 bits
    np.testing.assert_allclose(found.astype("float64"), wanted, rtol=limit, atol=limit)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("opset", "axes", "dtype"),
    in_turns([9, 17, 18, 28], [None, [1], [-1, 0]], ["float32", "float64"], every=3),
)
def test_mean_variance_normalization(opset: int, axes: list[int] | None, dtype: str) -> None:
    """The mean is a hundred deviations away, where squares would cancel."""
    feeds = {"x": (normal(2, 3, 4, 5) + 100).astype(dtype)}
    attributes = {} if axes is None else {"axes": axes}
    model = node_model("MeanVarianceNormalization", feeds, opset=opset, **attributes)
    (found,) = outputs(model, feeds)
    wide, over = feeds["x"].astype("float64"), tuple(axes or (0, 2, 3))
    centred = wide - wide.mean(over, keepdims=True)
    wanted = centred / wide.std(over, keepdims=True)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_mean_variance_normalization_of_integers_is_refused() -> None:
    model = node_model("MeanVarianceNormalization", {"x": np.ones((1, 2, 3, 4), np.int32)})
    with pytest.raises(InvalidModelError, match="node name: op.*has unsupported type"):
        import_onnx(model)


def attention(feeds: Mapping[str, np.ndarray], gaps: int, **attributes: Any) -> onnx.ModelProto:
    """A node that reads query, key and value, then no tensor some times, then the other feeds."""
    names = list(feeds)
    model = node_model("Attention", feeds, opset=24, results={"y": "float32"}, **attributes)
    node = model.graph.node[0]
    del node.input[:]
    node.input.extend([*names[:3], *[""] * gaps, *names[3:]])
    return model


@pytest.mark.slow
@pytest.mark.parametrize("causal", [0, 1])
def test_attention(causal: int) -> None:
    feeds = {name: normal(2, 3, 5, 8, seed=seed) for seed, name in enumerate("qkv")}
    model = attention(feeds, 0, is_causal=causal)
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(outputs(model, feeds)[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_attention_with_a_cache_and_no_mask() -> None:
    feeds = {name: normal(1, 2, 3, 8, seed=seed) for seed, name in enumerate(["q", "k", "v"])}
    feeds |= {name: normal(1, 2, 4, 8, seed=seed) for seed, name in enumerate(["pk", "pv"], 3)}
    model = attention(feeds, 1, is_causal=1)
    model.graph.node[0].output.extend(["key", "value"])
    for name in ("key", "value"):
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        model.graph.output.append(info)
    wanted = ReferenceEvaluator(model).run(None, feeds)
    for found, expected in zip(outputs(model, feeds), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("axis", "opset"), in_turns([1, -1], [17, 20]))
def test_mean_and_deviation_of_a_norm(axis: int, opset: int) -> None:
    shape = (2, 3, 5)[axis:]
    inputs, outputs = ["x", "s", "b"], ["y", "mean", "inverse"]
    node = helper.make_node("LayerNormalization", inputs, outputs, "op", axis=axis, epsilon=1e-3)
    constants = {"s": normal(*shape, seed=2), "b": normal(*shape, seed=3)}
    model = onnx_model([node], {"x": (2, 3, 5)}, outputs, constants, opset)
    assert_same_as_onnx_runtime(model, {"x": 3 + normal(2, 3, 5)})


@pytest.mark.parametrize(("reverse", "exclusive"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_cumulative_products(reverse: int, exclusive: int) -> None:
    feeds, flags = {"x": normal(3, 6)}, {"reverse": reverse, "exclusive": exclusive}
    model = node_model("CumProd", feeds, {"axis": np.array(1)}, opset=26, **flags)
    x = feeds["x"][:, ::-1] if reverse else feeds["x"]
    wanted = np.cumprod(x, axis=1)
    if exclusive:
        wanted = np.concatenate([np.ones((3, 1), "float32"), wanted[:, :-1]], axis=1)
    wanted = wanted[:, ::-1] if reverse else wanted
    np.testing.assert_allclose(outputs(model, feeds)[0], wanted, rtol=1e-5)


def test_bits_as_another_type() -> None:
    feeds = {"x": normal(7)}
    model = node_model("BitCast", feeds, results={"y": "int32"}, opset=26, to=TensorProto.INT32)
    np.testing.assert_array_equal(outputs(model, feeds)[0], feeds["x"].view("int32"))


def test_bits_of_another_size_are_refused() -> None:
    model = node_model("BitCast", {"x": normal(7)}, results={"y": "int64"}, opset=26, to=7)
    with pytest.raises((InvalidModelError, UnsupportedOperatorError), match="8 bytes|not fit"):
        import_onnx(model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("time", "batch"), [(0, 1), (1, 0)])
def test_reversed_sequences(time: int, batch: int) -> None:
    """The first of each row are turned round, as many as its length says."""
    shape = (4, 5, 3) if batch == 0 else (5, 4, 3)
    feeds = {"x": normal(*shape), "n": np.array([1, 5, 3, 2])}
    model = node_model("ReverseSequence", feeds, opset=10, time_axis=time, batch_axis=batch)
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_array_equal(outputs(model, feeds)[0], wanted)


@pytest.mark.parametrize(("time", "batch", "shape"), [(0, 1, (4,)), (1, 1, (4, 4)), (0, 2, (4, 4))])
def test_sequences_along_other_axes_are_refused(
    time: int, batch: int, shape: tuple[int, ...]
) -> None:
    feeds = {"x": normal(*shape), "n": np.array([1, 4, 3, 2])}
    model = node_model("ReverseSequence", feeds, opset=10, time_axis=time, batch_axis=batch)
    with pytest.raises((InvalidModelError, UnsupportedOperatorError), match="axis|rank"):
        import_onnx(model)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "starts"), [("linear", [0, 3]), ("circular", [4, 1])])
def test_caches_with_new_rows(mode: str, starts: list[int]) -> None:
    feeds = {"past": normal(2, 3, 5, 4), "new": normal(2, 3, 2, 4, seed=2), "at": int64(*starts)}
    model = node_model("TensorScatter", feeds, results={"y": "float32"}, opset=24, mode=mode)
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_array_equal(outputs(model, feeds)[0], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["DCR", "CRD", None])
def test_space_to_depth(mode: str | None) -> None:
    """ONNX has a body for the operator of opset 28 only, which has a mode."""
    feeds = {"x": normal(2, 3, 4, 6)}
    given = {"mode": mode} if mode else {}
    model = node_model("SpaceToDepth", feeds, opset=28 if mode else 13, blocksize=2, **given)
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_array_equal(outputs(model, feeds)[0], wanted)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("size", "dtype", "rank"),
    [
        (2**31 - 2, "float32", 3),
        (3, "float32", 5),
        (3, "float32", 2),
        (2, "float32", 3),
        (4, "float32", 4),
        (13, "float32", 4),
        (3, "float64", 3),
    ],
)
def test_local_responses(size: int, dtype: str, rank: int) -> None:
    """An even number of channels has one more behind than before; ONNX Runtime refuses these."""
    x = normal(*(2, 6, 3, 2, 2)[:rank]).astype(dtype)
    given = {"alpha": 0.3, "beta": 0.6, "bias": 1.2}
    model = node_model("LRN", {"x": x}, opset=13, size=size, **given)
    (found,) = outputs(model, {"x": x})
    squares = np.square(x.astype("float64"))
    before, after = min(5, (size - 1) // 2), min(5, size // 2)
    sums = [squares[:, max(0, c - before) : c + after + 1].sum(1) for c in range(6)]
    wanted = x / (1.2 + 0.3 / size * np.stack(sums, 1)) ** 0.6
    assert found.dtype == dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_rows_of_masks() -> None:
    """Only rows of nothing but minus infinity count, not those of the lowest number."""
    low = np.finfo("float32").min
    feeds = {"x": np.array([[-np.inf, -np.inf], [low, low], [-np.inf, low]], "float32")}
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"], axes=[1]),
        helper.make_node("Equal", ["top", "lowest"], ["is_masked"]),
        helper.make_node("Cast", ["is_masked"], ["y"], to=TensorProto.FLOAT),
    ]
    model = onnx_model(nodes, {"x": (3, 2)}, ["y"], {"lowest": np.array(-np.inf, np.float32)})
    found = tvm_fusion.compile(model, threads=1)(feeds)
    np.testing.assert_array_equal(found, [[1], [0], [0]])


@pytest.mark.parametrize("diagonal", [-(1 << 62), 1 << 62])
def test_diagonals_far_outside(diagonal: int) -> None:
    feeds = {"x": typed(range(1, 7), "float32").reshape(2, 3)}
    model = node_model("Trilu", feeds, {"k": np.array(diagonal)}, opset=17, upper=1)
    np.testing.assert_array_equal(outputs(model, feeds)[0], feeds["x"] * (diagonal < 0))


def test_unique_elements_of_a_constant(capfd: pytest.CaptureFixture[str]) -> None:
    node = helper.make_node("Unique", ["x"], ["y"])
    model = onnx_model([node], {}, [], {"x": np.array([3, 1, 3, 2], np.float32)}, 17)
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [None]))
    np.testing.assert_array_equal(tvm_fusion.compile(model, threads=1)(), [1, 2, 3])
    assert capfd.readouterr() == ("", "")
