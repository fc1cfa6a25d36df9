# SPDX-License-Identifier: Apache-2.0
"""Rule ``canonicalize_bias``: one constant of one shape, in front of the residual."""

from __future__ import annotations

import numpy as np
import pytest
from simplify_checks import check, check_unchanged, const, dyadic, per_channel
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

WEIGHT = dyadic(4, 4, 3, 3)
BIAS, MORE = dyadic(4, seed=1), dyadic(4, seed=2)


def left(data, values):
    return relax.op.add(const(values), data)


def right(data, values):
    return relax.op.add(data, const(values))


def minus(data, values):
    return relax.op.subtract(data, const(-np.asarray(values)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plus", [left, right, minus])
@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (4, 1, 1), (), (1,), (1, 1, 1, 1)])
def test_every_broadcastable_shape_becomes_one(plus, shape):
    values = BIAS if 4 in shape else BIAS[1:2]

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT))
                gv = plus(lv, values.reshape(shape))
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT))
                gv = R.add(lv, per_channel(np.broadcast_to(values, 4)))
                R.output(gv)
            return gv

    check(Before, Expected)


def test_successive_constants_merge():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32"), w: R.Tensor((4, 4, 1, 1), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, w)
                lv1 = left(lv, BIAS.reshape(4, 1, 1))
                lv2 = minus(lv1, MORE.reshape(4, 1, 1))
                gv = right(lv2, 1.0)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32"), w: R.Tensor((4, 4, 1, 1), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, w)
                gv = R.add(lv, per_channel(BIAS + MORE + 1))
                R.output(gv)
            return gv

    check(Before, Expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("is_left", [False, True])
def test_bias_goes_in_front_of_the_residual(is_left):
    def residual_add(chain, other):
        return relax.op.add(*((other, chain) if is_left else (chain, other)))

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 4, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT), padding=(1, 1, 1, 1))
                lv1 = right(lv, BIAS.reshape(4, 1, 1))
                lv2 = residual_add(lv1, x)
                lv3 = right(lv2, MORE.reshape(4, 1, 1))
                gv = R.nn.relu(lv3)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor(("n", 4, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT), padding=(1, 1, 1, 1))
                lv1 = R.add(lv, per_channel(BIAS + MORE))
                lv2 = R.add(lv1, x)
                gv = R.nn.relu(lv2)
                R.output(gv)
            return gv

    check(Before, Expected)


def test_two_chains_keep_their_order():
    @I.ir_module
    class Projection:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT))
                lv1 = R.nn.conv2d(x, const(WEIGHT))
                lv2 = R.add(lv1, per_channel(BIAS))
                gv = R.add(lv, lv2)
                R.output(gv)
            return gv

    check_unchanged(Projection)


def test_shared_spatial_and_broadcasting_additions_stay():
    @I.ir_module
    class Others:
        @R.function
        def main(
            x: R.Tensor((1, 4, 5, 5), "float32"),
            y: R.Tensor((1, 4, 1, 1), "float32"),
            k: R.Tensor((1, 4, 5, 5), "int32"),
        ):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT))
                lv1 = left(lv, 1.0)  # the convolution has another reader
                lv2 = R.add(y, lv)  # the other operand broadcasts
                lv3 = left(x, 1.0)  # no convolution
                lv4 = R.nn.conv2d(x, const(WEIGHT))
                lv5 = left(lv4, dyadic(1, 1, 3, 3))  # varies in space
                lv6 = R.add(k, const(1, "int32"))
                lv7 = R.add(lv6, const(1, "int32"))
                gv = (lv1, lv2, lv3, lv5, lv7)
                R.output(gv)
            return gv

    check_unchanged(Others)
