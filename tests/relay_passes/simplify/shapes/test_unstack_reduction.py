# SPDX-License-Identifier: Apache-2.0
"""Rules ``unstack_reduction`` and ``remove_broadcast``: Sum, Max and Min as imported."""

from __future__ import annotations

import pytest
from simplify_checks import check, check_unchanged, const
from tvm.script import ir as I
from tvm.script import relax as R


def test_sum_of_three():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((2, 4), "float32"),
            y: R.Tensor((2, 4), "float32"),
            z: R.Tensor((4,), "float32"),
        ):
            with R.dataflow():
                lv = R.broadcast_to(x, (2, 4))
                lv1 = R.broadcast_to(z, (2, 4))
                lv2 = R.stack((lv, y, lv1), axis=0)
                gv = R.sum(lv2, axis=[0], keepdims=False)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor((2, 4), "float32"),
            y: R.Tensor((2, 4), "float32"),
            z: R.Tensor((4,), "float32"),
        ):
            with R.dataflow():
                lv = R.add(x, y)
                gv = R.add(lv, z)
                R.output(gv)
            return gv

    check(Before, Expected)


def test_max_then_min_with_numbers_is_a_clip():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 4), "float32")):
            with R.dataflow():
                lv = R.broadcast_to(const(0.0), (2, 4))
                lv1 = R.stack((lv, x), axis=0)
                lv2 = R.max(lv1, axis=[0], keepdims=False)
                lv3 = R.broadcast_to(const(6.0), (2, 4))
                lv4 = R.stack((lv2, lv3), axis=0)
                gv = R.min(lv4, axis=[0], keepdims=False)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 4), "float32")):
            with R.dataflow():
                gv = R.clip(x, 0, 6)
                R.output(gv)
            return gv

    check(Before, Expected)


@pytest.mark.parametrize(("axis", "keepdims"), [(1, False), (0, True)])
def test_other_axes_stay(axis, keepdims):
    @I.ir_module
    class Others:
        @R.function
        def main(x: R.Tensor((2, 4), "float32"), y: R.Tensor((2, 4), "float32")):
            with R.dataflow():
                lv = R.stack((x, y), axis=0)
                gv = R.sum(lv, axis=[axis], keepdims=keepdims)
                R.output(gv)
            return gv

    check_unchanged(Others)


def test_shared_stacks_and_needed_broadcasts_stay():
    @I.ir_module
    class Others:
        @R.function
        def main(x: R.Tensor((2, 4), "float32"), y: R.Tensor((4,), "float32")):
            with R.dataflow():
                lv = R.stack((x, x), axis=0)
                lv1 = R.sum(lv, axis=[0], keepdims=False)
                lv2 = R.max(lv, axis=[0], keepdims=False)
                lv3 = R.broadcast_to(y, (2, 4))
                lv4 = R.add(lv3, y)
                gv = (lv1, lv2, lv4)
                R.output(gv)
            return gv

    check_unchanged(Others)
