# SPDX-License-Identifier: Apache-2.0
"""Shapes that are computed from symbolic sizes: one model for all of them, none is a tensor."""

from __future__ import annotations

import numpy as np
import onnx
from onnx_reference import run_onnx

import tvm_fusion

MODEL = """<ir_version: 8, opset_import: ["": 17]>
g (float[b, s, 12] x) => (float[n, 4] y, float[m, 12] z)
<int64[1] flat = {-1}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] four = {4},
 int64[1] twelve = {12}, int64 first = {0}, int64 second = {1}, int64 two = {2},
 int64[2] places = {0, 1}>
{
    shape = Shape(x) b = Gather(shape, first) s = Gather(shape, second)
    twice = Mul(b, two) thrice = Add(twice, b) rows = Mul(thrice, s) column = Reshape(rows, flat)
    target = Concat<axis = 0>(column, four) y = Reshape(x, target)
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
