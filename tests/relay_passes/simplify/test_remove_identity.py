# SPDX-License-Identifier: Apache-2.0
"""Rule ``remove_identity``: what returns its input, and what only nearly does."""

from __future__ import annotations

import numpy as np
import pytest
from simplify_checks import check, check_unchanged, const
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

op = relax.op


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "identity",
    [
        lambda x: op.add(x, const(0.0)),
        lambda x: op.add(const(np.zeros((4, 1))), x),
        lambda x: op.subtract(x, const(0.0)),
        lambda x: op.multiply(const(1.0), x),
        lambda x: op.divide(x, const(np.ones((3, 4, 5)))),
        lambda x: op.reshape(x, (3, 4, 5)),
        lambda x: op.broadcast_to(x, (3, 4, 5)),
        lambda x: op.astype(x, "float32"),
        lambda x: op.permute_dims(x, (0, 1, 2)),
        lambda x: op.concat((x,), axis=1),
        lambda x: op.nn.pad(x, (0, 0, 0, 0, 0, 0)),
    ],
)
def test_identities_go(identity):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((3, 4, 5), "float32")):
            with R.dataflow():
                lv = identity(x)
                gv = R.tanh(lv)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((3, 4, 5), "float32")):
            with R.dataflow():
                gv = R.tanh(x)
                R.output(gv)
            return gv

    check(Before, Expected)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "other",
    [
        lambda x: op.add(x, const(np.zeros((2, 1, 1, 1)))),  # one axis more
        lambda x: op.subtract(const(0.0), x),
        lambda x: op.divide(const(1.0), x),
        lambda x: op.multiply(x, const(2.0)),
        lambda x: op.reshape(x, (3, 4, 4)),
        lambda x: op.broadcast_to(x, (2, 4, 3, 4)),
        lambda x: op.astype(x, "float16"),
        lambda x: op.permute_dims(x, (2, 1, 0)),
        lambda x: op.permute_dims(x),
        lambda x: op.concat((x, x), axis=1),
        lambda x: op.nn.pad(x, (0, 0, 0, 0, 0, 1)),
    ],
)
def test_others_stay(other):
    @I.ir_module
    class Others:
        @R.function
        def main(x: R.Tensor((4, 3, 4), "float32")):
            with R.dataflow():
                gv = other(x)
                R.output(gv)
            return gv

    check_unchanged(Others)


def test_a_shape_that_is_not_known_stays():
    @I.ir_module
    class Reshaped:
        @R.function
        def main(x: R.Tensor((3, 4, 5), "float32"), shape: R.Shape(ndim=3)):
            with R.dataflow():
                gv = R.reshape(x, shape)
                R.output(gv)
            return gv

    check_unchanged(Reshaped)


def test_dropout_goes_and_its_mask_stays():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((3, 4), "float32")):
            with R.dataflow():
                lv = R.nn.dropout(x, rate=0.5)
                lv1 = lv[0]
                lv2 = R.tanh(lv1)
                lv3 = R.nn.dropout(lv2, rate=0.5)
                lv4 = lv3[0]
                lv5 = lv3[1]
                gv = (lv4, lv5)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((3, 4), "float32")):
            with R.dataflow():
                lv2 = R.tanh(x)
                lv3 = R.nn.dropout(lv2, rate=0.5)
                lv5 = lv3[1]
                gv = (lv2, lv5)
                R.output(gv)
            return gv

    check(Before, Expected)


def test_identity_of_a_parameter_may_be_the_result():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((3, 4), "float32")):
            with R.dataflow():
                gv = R.add(x, const(0.0))
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((3, 4), "float32")):
            return x

    check(Before, Expected)
