# SPDX-License-Identifier: Apache-2.0
"""Shapes that are computed from symbolic sizes: one model for all of them, none is a tensor."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_reference import run_onnx
from tvm import tirx

import tvm_fusion
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.onnx.frontend import import_onnx

MODEL = """<ir_version: 8, opset_import: ["": 17]>
g (float[b, s, 12] x) => (float[n, 4] w, float[n, 4] y, float[m, 12] z)
<int64[1] flat = {-1}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] four = {4},
 int64[1] twelve = {12}, int64 first = {0}, int64 second = {1}, int64 two = {2},
 int64[2] places = {0, 1}>
{
    shape = Shape(x) b = Gather(shape, first) s = Gather(shape, second)
    twice = Mul(b, two) thrice = Add(twice, b) rows = Mul(thrice, s) column = Reshape(rows, flat)
    target = Concat<axis = 0>(column, four) y = Reshape(x, target)
    cast = Cast<to = 7>(target) zeros = ConstantOfShape(cast) w = Add(y, zeros)
    both = Gather(shape, places) batch = Slice(both, zero, one) single = Squeeze(batch, zero)
    all = Mul(single, s) double = Mul(all, two) half = Div(double, two) wide = Unsqueeze(half, zero)
    other = Concat<axis = 0>(wide, twelve) z = Reshape(x, other)
}"""


def test_rows_of_any_batch_and_length() -> None:
    model = onnx.parser.parse_model(MODEL)
    compiled = tvm_fusion.compile(model, shapes={"b": "b", "s": "s"}, threads=1)
    for batch, length in ((2, 3), (1, 5)):
        x = np.random.default_rng(0).random((batch, length, 12), dtype=np.float32)
        for found, wanted in zip(compiled(x), run_onnx(model, {"x": x}), strict=True):
            np.testing.assert_array_equal(found, wanted)


NUMBERS = """<ir_version: 8, opset_import: ["": 17]>
g (float[1, s, 4] x) => (int64[1, 1] a, int64[1, 3] b, int64[20] c, bool[20] d, bool[20] e,
    bool[1] f, bool[1] g, int64[k] h, int64[l] i, int64[m] j, float k, float[3] l, int64[20] m,
    int64[20] n, float[1, t, 4] o, int64[1] p, int64 q, int64 r, int64[1] t, int64[1] u)
<int64[1] zero = {0}, int64[1] one = {1}, int64[1] three = {3}, int64[2] axes = {0, 1},
 int64 first = {0}, int64 second = {1}, int64 two = {2}, int64[3] few = {3, 1, 2},
 int64[20] many = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19},
 int64 back = {-2}, int64[1] least = {-1}, float[3] floats = {0.5, 1.5, 2.5}>
{
    shape = Shape(x) size = Gather(shape, second) next = Add(size, two)
    vector = Unsqueeze(next, zero) float = Cast<to = 1>(size)
    a = Unsqueeze(next, axes) sums = Add(next, few) b = Unsqueeze(sums, zero)
    c = Add(next, many) d = Less(many, vector) e = Equal(many, vector)
    f = Equal(vector, three) g = Equal(vector, least)
    h = Range(first, next, second) i = Range(next, first, back) j = Range(two, size, two)
    k = Cos(float) l = Mul(floats, float) m = Where(d, next, many) n = Div(many, next)
    repeats = Concat<axis = 0>(one, vector, one) o = Tile(x, repeats)
    both = Concat<axis = 0>(vector, vector) p, half = Split<axis = 0>(both)
    largest = Max(next, two) q = Neg(largest) r = ReduceSum<keepdims = 0>(sums)
    double = Add(vector, half) t = Neg(vector) u = Min(double, three)
}"""

REPEATED = """<ir_version: 8, opset_import: ["": 17]>
g (float[1, s, 4] x) => (float[3, t, 4] y)
<int64[1] one = {1}, int64[1] three = {3}, int64[1] four = {4}, int64 first = {0},
 int64 second = {1}, int64 two = {2}>
{
    shape = Shape(x) size = Gather(shape, second) next = Add(size, two) last = Sub(next, two)
    places = Range(first, last, second) column = Unsqueeze(places, one)
    factors = Cast<to = 1>(column) scaled = Mul(x, factors) rows = Reshape(size, one)
    target = Concat<axis = 0>(three, rows, four) y = Expand(scaled, target)
}"""


@pytest.mark.slow
@pytest.mark.parametrize("text", [NUMBERS, REPEATED])
def test_sizes_as_numbers_are_those_of_onnx_runtime(text: str) -> None:
    model = onnx.parser.parse_model(text)
    compiled = tvm_fusion.compile(model, shapes={"s": "s"}, threads=1)
    for size in (3, 1, 8):
        x = np.random.default_rng(size).random((1, size, 4), dtype=np.float32)
        found = compiled(x)
        found = found if isinstance(found, tuple) else (found,)
        for one, other in zip(found, run_onnx(model, {"x": x}), strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_gpus_have_kernels_for_sizes_as_numbers() -> None:
    mod = import_onnx(onnx.parser.parse_model(NUMBERS), {"s": "s"}).mod
    mod = pipeline.optimize(mod, resolve("cuda -arch=sm_80"))
    kernels = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    assert kernels and all("threadIdx.x" in func.script() for func in kernels)
