# SPDX-License-Identifier: Apache-2.0
"""Operators at the edges of their types have the numbers that both references agree on."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from edge_values import probes, run

import tvm_fusion

QUICK = (
    "ArgMax|Clip|DynamicQuantizeLinear|Elu|MaxPool|Mish|Relu|ReduceL2|ReduceLogSumExp|"
    "ReduceMean|ScatterElements|Shrink|Sign|TopK"
)
"""Operators of the quick sample: those that had faults."""

NAN, INF = math.nan, math.inf


def wrong(pattern: str, per_operator: int = 1) -> str:
    report = run(probes(pattern, per_operator))
    assert report.counts["right"] > 50
    kinds = ("wrong", "crash")  # undecided: one of the references has the same numbers
    return "\n".join(text for kind in kinds for text in report.texts[kind])


def test_operators_that_compare_and_round() -> None:
    assert wrong(QUICK) == ""


@pytest.mark.slow
@pytest.mark.parametrize("letter", "ABCDEFGHILMNOPQRSTUWX")
def test_operators(letter: str) -> None:
    assert wrong(f"{letter}.*", per_operator=2) == ""


def compiled(text: str, *feeds: np.ndarray) -> np.ndarray:
    return tvm_fusion.compile(onnx.parser.parse_model(text), threads=1)(*feeds)


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
