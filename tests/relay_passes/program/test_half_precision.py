# SPDX-License-Identifier: Apache-2.0
"""Pass ``HalfPrecision``: before and after."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes import HalfPrecision


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 6), "float32")) -> R.Tensor(
        (4, 6), "float32"
    ):
        with R.dataflow():
            product = R.matmul(x, w)
            bounded = R.clip(product, 0, 6)
            y = R.nn.softmax(bounded)
            R.output(y)
        return y


@I.ir_module
class After:
    @R.function
    def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 6), "float32")) -> R.Tensor(
        (4, 6), "float32"
    ):
        with R.dataflow():
            half_x = R.astype(x, "float16")
            half_w = R.astype(w, "float16")
            product = R.matmul(half_x, half_w, out_dtype="float32")
            half = R.astype(product, "float16")
            low = R.astype(R.const(0, "float32"), "float16")
            positive = R.maximum(half, low)
            high = R.astype(R.const(6, "float32"), "float16")
            bounded = R.minimum(positive, high)
            single = R.astype(bounded, "float32")
            y = R.nn.softmax(single)
            R.output(y)
        return y


def test_before_and_after() -> None:
    tvm.ir.assert_structural_equal(HalfPrecision()(Before), After)


def test_equal_casts_are_one() -> None:
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    weight = relax.const(np.ones((8, 8), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            parts = [builder.emit(relax.op.matmul(x, weight)) for _ in range(2)]
            result = builder.emit_output(relax.op.add(*parts))
        builder.emit_func_output(result)
    text = HalfPrecision()(builder.get()).script()
    assert text.count('R.astype(x, dtype="float16")') == 1
