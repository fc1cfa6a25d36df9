# SPDX-License-Identifier: Apache-2.0
"""Operators at the edges of their types have the numbers that both references agree on."""

from __future__ import annotations

import math
import re

import numpy as np
import onnx
import pytest
from edge_values import probes, run
from onnx.reference import ReferenceEvaluator

import tvm_fusion

FAULTY = "DynamicQuantizeLinear|MaxPool|NonZero|QuantizeLinear|Reduce(L2|Mean)"
"""Operators that had faults, beside those of the quick sample."""

NAN, INF = math.nan, math.inf


def wrong(pattern: str, per_operator: int = 1) -> str:
    report = run(probes(pattern, per_operator))
    assert report.counts["right"] > 50
    kinds = ("wrong", "crash")  # undecided: one of the references has the same numbers
    return "\n".join(text for kind in kinds for text in report.texts[kind])


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", ["Clip|PRelu|Sign|TopK", pytest.param(FAULTY, marks=pytest.mark.slow)]
)
def test_operators_that_compare_and_round(pattern: str) -> None:
    assert wrong(pattern) == ""


@pytest.mark.slow
@pytest.mark.parametrize("letter", "ABCDEFGHILMNOPQRSTUWX")
def test_operators(letter: str) -> None:
    assert wrong(f"{letter}.*", per_operator=2) == ""


def compiled(text: str, *feeds: np.ndarray) -> np.ndarray:
    return tvm_fusion.compile(onnx.parser.parse_model(text), threads=1)(*feeds)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("axes", ["", ", axes"])
def test_reductions_of_no_axes(axes: str) -> None:
    names = ("L1", "L2", "SumSquare", "LogSum", "LogSumExp", "Sum", "Max", "Min", "Mean", "Prod")
    nodes = [f"y{n} = Reduce{n}<noop_with_empty_axes = 1>(x{axes})" for n in names]
    results = ", ".join(f"float[2, 3] y{n}" for n in names)
    text = f"""<ir_version: 8, opset_import: ["": 18]> g (float[2, 3] x) => ({results})
        <int64[0] axes = {{}}> {{ {" ".join(nodes)} }}"""
    x = np.array([[1.5, 2, 3], [0.25, 7, 1]], "float32")
    wanted = [x, x, x * x, np.log(x), *[x] * 6]
    for found, expected in zip(compiled(text, x), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("layout", ["NCHW", "packed"])
def test_maxima_of_windows_with_nan_and_infinities(layout: str) -> None:
    """NaN stays, as in numpy and PyTorch, and so do windows of minus infinity."""
    x = np.random.default_rng(0).standard_normal((1, 8, 9, 9), dtype=np.float32)
    x[0, 0, ::4, ::4], x[0, 1], x[0, 2, 3:6, 3:6] = NAN, -INF, INF
    first = "c = Conv(x, w)" if layout == "packed" else "c = Identity(x)"
    weights = " ".join(map(str, np.eye(8).ravel().tolist())).replace(" ", ", ")
    text = f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 8, 9, 9] x) => (float[1, 8, 5, 5] y)
        <float[8, 8, 1, 1] w = {{{weights}}}> {{
        {first} y = MaxPool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(c) }}"""
    if layout == "packed":
        x = np.nan_to_num(x, posinf=3, neginf=-3)
        x[0, 0, ::4, ::4] = NAN
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-INF)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]
    wanted = windows.max((-1, -2))
    if layout == "packed":  # the product with the identity spreads NaN over the channels
        wanted = np.where(np.isnan(wanted[:, :1]), NAN, wanted)
    np.testing.assert_allclose(compiled(text, x), wanted, rtol=1e-5, atol=1e-6)


def test_error_function_far_out() -> None:
    text = """<ir_version: 8, opset_import: ["": 20]> g (float[6] x) => (float[6] e, float[6] y)
        { e = Erf(x) y = Gelu(x) }"""
    x = np.array([-65000, -1000, -8, 10, 100, 3e38], "float32")
    found, gelu = compiled(text, x)
    np.testing.assert_array_equal(found, np.sign(x))
    np.testing.assert_array_equal(gelu, np.maximum(x, 0))


NUMBERS = {
    "sum_less_term": "a = Add(x, y) r = Sub(a, x)",
    "term_less_sum": "a = Add(x, y) r = Sub(x, a)",
    "difference_and_term": "a = Sub(x, y) r = Add(a, y)",
    "less_itself": "r = Sub(x, x)",
    "rounded_by_size": "a = Add(x, big) r = Sub(a, big)",
    "times_zero": "r = Mul(x, zero)",
    "zero_times": "r = Mul(zero, x)",
    "zero_by": "r = Div(zero, x)",
    "by_zero": "r = Div(x, zero)",
    "gated": "c = Less(x, y) f = Cast<to = 1>(c) r = Mul(f, x)",
}
TRUTHS = {
    "is_itself": "r = Equal(x, x)",
    "is_not_itself": "e = Equal(x, x) r = Not(e)",
    "not_less": "e = Less(x, y) r = Not(e)",
    "not_greater_or_equal": "e = GreaterOrEqual(x, y) r = Not(e)",
    "ordered": "e = Less(x, y) f = GreaterOrEqual(x, y) r = Or(e, f)",
    "unordered": "e = Less(x, y) f = GreaterOrEqual(x, y) g = Or(e, f) r = Not(g)",
    "one_or_other": "e = Less(x, y) f = GreaterOrEqual(x, y) r = Xor(e, f)",
    "never": "e = Less(x, y) f = Not(e) r = And(e, f)",
    "as_bool": "r = Cast<to = 9>(x)",
}
"""Nodes that compute ``r``, a float or a bool."""


def test_algebra_of_nan_and_infinities() -> None:
    """TVM's simplifier takes floats for real numbers; every pair of edges meets here."""
    edges = np.array([NAN, INF, -INF, 0, -0.0, 1, -2.5, 1e8, 3e38, 1e-40], "float32")
    x, y = (np.ascontiguousarray(part).ravel() for part in np.meshgrid(edges, edges))
    nodes = ""
    for name, body in (NUMBERS | TRUTHS).items():
        nodes += re.sub(r"\b([a-gr])\b(?=[ ,)])(?! *<)", rf"{name}_\1", body) + " "
    outputs = [f"float[100] {n}_r" for n in NUMBERS] + [f"bool[100] {n}_r" for n in TRUTHS]
    text = f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[100] x, float[100] y) => ({", ".join(outputs)})
        <float zero = {{0}}, float big = {{12582912}}> {{ {nodes} }}"""
    with np.errstate(all="ignore"):
        wanted = ReferenceEvaluator(onnx.parser.parse_model(text)).run(None, {"x": x, "y": y})
    for name, found, right in zip(NUMBERS | TRUTHS, compiled(text, x, y), wanted, strict=True):
        np.testing.assert_array_equal(found, right, err_msg=name)


def test_casts_to_whole_numbers_of_nan_and_beyond() -> None:
    """NaN becomes the lowest number, and others end at the limits, as in ONNX Runtime."""
    x = np.array([NAN, INF, -INF, 1, 400, -400], "float32")
    text = """<ir_version: 8, opset_import: ["": 17]>
        g (float[6] x) => (uint8[6] u, int8[6] i) <float s = {0.5}, uint8 z = {3}, int8 w = {-3}>
        { u = QuantizeLinear(x, s, z) i = QuantizeLinear(x, s, w) }"""
    unsigned, signed = compiled(text, x)
    np.testing.assert_array_equal(unsigned, [0, 255, 0, 5, 255, 0])
    np.testing.assert_array_equal(signed, [-128, 127, -128, -1, 127, -128])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["uint8", "int8", "int32"])
def test_cubic_weights_stay_in_the_range_of_integers(kind: str) -> None:
    limits = np.iinfo(kind)
    line = np.repeat(np.array([limits.min, limits.max], kind), 4)
    x = np.tile(line, (1, 1, 4, 1))
    text = f"""<ir_version: 8, opset_import: ["": 17]> g ({kind}[1, 1, 4, 8] x) => (y)
        <float[4] s = {{1, 1, 2, 2}}> {{ y = Resize<mode = "cubic">(x, , s) }}"""
    found = compiled(text, x).astype("float64")
    assert (np.diff(found, axis=-1) >= -1e-6 * limits.max).all()


def test_numbers_from_data_around_a_tensor() -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[2, 3] x, float v) => (y, z)
        <int64[4] p = {1, 0, -1, 2}, int64[2] q = {2, 1}, int64[1] a = {1}>
        { y = Pad(x, p, v) z = Pad(x, q, v, a) }"""
    x, value = np.arange(6, dtype="float32").reshape(2, 3), np.array(NAN, "float32")
    y, z = compiled(text, x, value)
    np.testing.assert_array_equal(y, [[NAN] * 5, [0, 1, 2, NAN, NAN]])
    np.testing.assert_array_equal(z, np.pad(x, ((0, 0), (2, 1)), constant_values=NAN))


@pytest.mark.slow
def test_losses_with_constant_labels() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[3, 4] x) => (float y)
        <int64[3] labels = {1, -1, 3}>
        { y = SoftmaxCrossEntropyLoss<ignore_index = -1>(x, labels) }"""
    x = np.random.default_rng(3).standard_normal((3, 4), dtype="float32")
    logs = x - np.log(np.exp(x).sum(1, keepdims=True))
    np.testing.assert_allclose(compiled(text, x), -(logs[0, 1] + logs[2, 3]) / 2, rtol=1e-5)


def test_constants_of_64_bits() -> None:
    """Tables beyond the size up to which constants stay in the graph keep their type."""
    numbers = np.arange(300) + 2**33
    table = onnx.numpy_helper.from_array(numbers, "t")
    text = """<ir_version: 8, opset_import: ["": 17]> g (int64[3] i) => (int64[3] y)
        { y = Gather(t, i) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(table)
    places = np.array([0, 5, 299])
    np.testing.assert_array_equal(tvm_fusion.compile(model, threads=1)(places), numbers[places])
