# SPDX-License-Identifier: Apache-2.0
"""Operators in types that TVM lacks: they are computed in wider ones."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

import tvm_fusion

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "double": np.float64}
LIMITS = {"float16": 2e-3, "bfloat16": 1.6e-2, "double": 1e-9}

NODES = {
    "LayerNormalization": "y = LayerNormalization <axis = 1> (x, s, b)",
    "without a bias": "y = LayerNormalization <axis = 1> (x, s)",
    "Pow": "y = Pow (x, x)",
    "Pow of a small exponent": "two = Constant <value_float = 2.0> () y = Pow (x, two)",
    "fmod": "y = Mod <fmod = 1> (x, s)",
    "LRN": "y = LRN <size = 3> (x)",
}


def model(node: str, dtype: str, dims: str) -> str:
    return f"""<ir_version: 8, opset_import: ["" : 17]>
    g ({dtype}[{dims}] x, {dtype}[8] s, {dtype}[8] b) => ({dtype}[{dims}] y) {{ {node} }}"""


CASES = [
    (name, dtype)
    for name in NODES
    for dtype in TYPES
    if (name, dtype) != ("LRN", "double")  # ONNX's reference adds up other channels
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_types_of_floats(name: str, dtype: str, capfd: pytest.CaptureFixture[str]) -> None:
    dims = "2,8,3,2" if name == "LRN" else "4,8"
    rng = np.random.default_rng(8)
    shapes = [tuple(map(int, dims.split(","))), (8,), (8,)]
    feed = [(rng.random(shape) + 0.25).astype(TYPES[dtype]) for shape in shapes]
    wide = ReferenceEvaluator(parser.parse_model(model(NODES[name], "double", dims)))
    expected = wide.run(None, {k: v.astype(np.float64) for k, v in zip("xsb", feed, strict=True)})
    compiled = tvm_fusion.compile(parser.parse_model(model(NODES[name], dtype, dims)), threads=1)
    y = compiled(*feed)
    assert y.dtype == TYPES[dtype]
    limit = LIMITS[dtype]
    np.testing.assert_allclose(y.astype(np.float64), expected[0], rtol=limit, atol=limit)
    assert capfd.readouterr() == ("", "")
