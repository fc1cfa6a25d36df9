# SPDX-License-Identifier: Apache-2.0
"""Rule ``fold_scale``: factors behind a convolution, in every shape and place, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from simplify_checks import check, check_unchanged, const, dyadic, per_channel
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

WEIGHT = dyadic(4, 2, 3, 3)
SCALE = np.array([2, -4, 0.5, 1], "float32")
BIAS = dyadic(4, seed=1)
PLANE = dyadic(1, 1, 3, 3, seed=2)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "factor", [SCALE.reshape(1, 4, 1, 1), SCALE.reshape(4, 1, 1), np.float32(2), np.full((1,), 2.0)]
)
@pytest.mark.parametrize("is_left", [False, True])
def test_factor_enters_the_weight(factor, is_left):
    def times(data):
        return relax.op.multiply(*((const(factor), data) if is_left else (data, const(factor))))

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT), groups=2, dilation=(2, 2))
                gv = times(lv)
                R.output(gv)
            return gv

    scales = np.broadcast_to(np.float32(factor).reshape(-1, 1, 1, 1), (4, 1, 1, 1))

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                gv = R.nn.conv2d(x, const(WEIGHT * scales), groups=2, dilation=(2, 2))
                R.output(gv)
            return gv

    check(Before, Expected)


def test_factor_passes_the_bias():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 2, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT))
                lv1 = R.subtract(lv, const(BIAS.reshape(4, 1, 1)))
                lv2 = R.divide(lv1, const(SCALE.reshape(4, 1, 1)))
                gv = R.multiply(lv2, const(2.0))
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 2, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT * 2 / SCALE.reshape(4, 1, 1, 1)))
                gv = R.add(lv, per_channel(-BIAS * 2 / SCALE))
                R.output(gv)
            return gv

    check(Before, Expected)


def test_two_affine_steps_without_a_convolution_become_one():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                lv = R.multiply(x, per_channel(SCALE))
                lv1 = R.add(lv, per_channel(BIAS))
                lv2 = R.multiply(lv1, const(4.0))
                gv = R.add(lv2, const(1.0))
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                lv = R.multiply(x, per_channel(SCALE * 4))
                gv = R.add(lv, per_channel(BIAS * 4 + 1))
                R.output(gv)
            return gv

    check(Before, Expected)


def test_what_no_weight_can_hold_stays():
    @I.ir_module
    class Varied:
        @R.function
        def main(x: R.Tensor((1, 2, 5, 5), "float32"), w: R.Tensor((4, 2, 3, 3), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT))
                lv1 = R.multiply(lv, const(PLANE))  # varies in space
                lv2 = R.nn.conv2d(x, w)
                lv3 = R.multiply(lv2, const(2.0))  # the weight is no constant
                lv4 = R.nn.conv2d(x, const(WEIGHT))
                lv5 = R.multiply(lv4, const(2.0))  # the convolution has another reader
                gv = R.concat((lv1, lv3, lv4, lv5), axis=1)
                R.output(gv)
            return gv

    check_unchanged(Varied)


def test_other_layouts_and_types_stay():
    @I.ir_module
    class Others:
        @R.function
        def main(x: R.Tensor((1, 5, 5, 2), "float32"), y: R.Tensor((1, 2, 5, 5), "int32")):
            with R.dataflow():
                lv = R.nn.conv2d(
                    x, const(dyadic(3, 3, 2, 4)), data_layout="NHWC", kernel_layout="HWIO"
                )
                lv1 = R.multiply(lv, const(2.0))
                lv2 = R.nn.conv2d(y, const(np.ones((4, 2, 3, 3)), "int32"))
                lv3 = R.multiply(lv2, const(2, "int32"))
                gv = (lv1, lv3)
                R.output(gv)
            return gv

    check_unchanged(Others)


def test_overflowing_and_oversized_products_stay():
    @I.ir_module
    class Large:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32"), y: R.Tensor((1, 4, 3, 3), "float32")):
            with R.dataflow():
                lv = R.multiply(x, const(3e38))
                lv1 = R.multiply(lv, const(4.0))
                lv2 = R.multiply(y, per_channel(SCALE))
                lv3 = R.multiply(lv2, const(PLANE))
                gv = (lv1, lv3)
                R.output(gv)
            return gv

    check_unchanged(Large)
