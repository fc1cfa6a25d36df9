# SPDX-License-Identifier: Apache-2.0
"""Pass ``WidenSums``: before and after."""

from __future__ import annotations

import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes import WidenSums


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((4, 8), "float16"), w: R.Tensor((8, 6), "float16")) -> R.Tensor(
        (4, 6), "float16"
    ):
        with R.dataflow():
            product = R.matmul(x, w)
            y = R.nn.relu(product)
            R.output(y)
        return y


@I.ir_module
class After:
    @R.function
    def main(x: R.Tensor((4, 8), "float16"), w: R.Tensor((8, 6), "float16")) -> R.Tensor(
        (4, 6), "float16"
    ):
        with R.dataflow():
            wide_x = R.astype(x, "float32")
            wide_w = R.astype(w, "float32")
            wide = R.matmul(wide_x, wide_w)
            product = R.astype(wide, "float16")
            y = R.nn.relu(product)
            R.output(y)
        return y


@I.ir_module
class Left:
    """Sums of a named type, and operands of 32 bits."""

    @R.function
    def main(
        x: R.Tensor((4, 8), "float16"),
        w: R.Tensor((8, 6), "float16"),
        v: R.Tensor((6, 2), "float32"),
    ) -> R.Tensor((4, 2), "float32"):
        with R.dataflow():
            product = R.matmul(x, w, out_dtype="float32")
            y = R.matmul(product, v)
            R.output(y)
        return y


def test_before_and_after() -> None:
    once = WidenSums()(Before)
    tvm.ir.assert_structural_equal(once, After)
    tvm.ir.assert_structural_equal(WidenSums()(once), After)


def test_what_stays() -> None:
    tvm.ir.assert_structural_equal(WidenSums()(Left), Left)
