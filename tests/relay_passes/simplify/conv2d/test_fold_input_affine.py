# SPDX-License-Identifier: Apache-2.0
"""Rule ``fold_input_affine``: factors and offsets in front of a convolution."""

from __future__ import annotations

import numpy as np
from simplify_checks import check, check_unchanged, const, dyadic, per_channel
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

WEIGHT = dyadic(6, 2, 3, 3)
SCALE = np.array([2, -4, 0.5, 1], "float32")
SHIFT = dyadic(4, seed=1)


def grouped(values):
    """One number an input channel, repeated for the outputs of both groups."""
    return np.repeat(values.reshape(2, 2), 3, axis=0).reshape(6, 2, 1, 1)


def test_batch_norm_in_front_of_an_unpadded_convolution():
    def norm(data):
        values = (SCALE, SHIFT, np.zeros(4), np.zeros(4))
        parameters = [const(value) for value in values]
        return relax.op.nn.batch_norm(data, *parameters, axis=1, epsilon=1.0, training=False)

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                lv = norm(x)
                lv1 = lv[0]
                lv2 = R.nn.conv2d(lv1, const(WEIGHT), groups=2)
                gv = R.nn.relu(lv2)
                R.output(gv)
            return gv

    bias = (WEIGHT * grouped(SHIFT)).sum(axis=(1, 2, 3))

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT * grouped(SCALE)), groups=2)
                lv1 = R.add(lv, per_channel(bias))
                gv = R.nn.relu(lv1)
                R.output(gv)
            return gv

    check(Before, Expected)


def test_factor_passes_padding():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                lv = R.divide(x, per_channel(1 / SCALE))
                gv = R.nn.conv2d(lv, const(WEIGHT), groups=2, padding=(0, 1, 0, 0))
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                gv = R.nn.conv2d(x, const(WEIGHT * grouped(SCALE)), groups=2, padding=(0, 1, 0, 0))
                R.output(gv)
            return gv

    check(Before, Expected)


def test_offset_in_front_of_padding_stays():
    @I.ir_module
    class Padded:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                lv = R.multiply(x, per_channel(SCALE))
                lv1 = R.add(lv, per_channel(SHIFT))
                gv = R.nn.conv2d(lv1, const(WEIGHT), groups=2, padding=(0, 0, 0, 1))
                R.output(gv)
            return gv

    check_unchanged(Padded)


def test_shared_varied_and_unknown_operands_stay():
    @I.ir_module
    class Others:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32"), w: R.Tensor((6, 2, 3, 3), "float32")):
            with R.dataflow():
                lv = R.multiply(x, const(2.0))
                lv1 = R.nn.conv2d(lv, const(WEIGHT), groups=2)
                lv2 = R.nn.conv2d(lv, const(WEIGHT), groups=2, padding=(1, 1, 1, 1))
                lv3 = R.multiply(x, const(dyadic(1, 1, 5, 5)))
                lv4 = R.nn.conv2d(lv3, const(WEIGHT), groups=2)
                lv5 = R.add(x, per_channel(SHIFT))
                lv6 = R.nn.conv2d(lv5, w, groups=2)
                gv = (lv1, lv2, lv4, lv6)
                R.output(gv)
            return gv

    check_unchanged(Others)


def test_factor_that_enlarges_the_data_stays():
    @I.ir_module
    class Enlarged:
        @R.function
        def main(x: R.Tensor((1, 1, 5, 5), "float32")):
            with R.dataflow():
                lv = R.multiply(x, per_channel(SCALE))
                gv = R.nn.conv2d(lv, const(WEIGHT), groups=2)
                R.output(gv)
            return gv

    check_unchanged(Enlarged)
