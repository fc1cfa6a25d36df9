# SPDX-License-Identifier: Apache-2.0
"""Rule ``split_conv_transpose``: transposed convolutions become convolutions of their phases."""

from __future__ import annotations

import numpy as np
import pytest
from reduction_checks import run
from simplify_checks import calls, check, check_unchanged, const, dyadic, simplify
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

W = dyadic(4, 3, 2, 2)


def test_enlargement_by_two():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 4, 5, 6), "float32")):
            with R.dataflow():
                gv = R.nn.conv2d_transpose(x, const(W), strides=[2, 2])
                R.output(gv)
            return gv

    weight = W.transpose(1, 2, 3, 0).reshape(12, 4, 1, 1)

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 4, 5, 6), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(weight))
                lv1 = R.reshape(lv, R.shape([2, 3, 2, 2, 5, 6]))
                lv2 = R.permute_dims(lv1, [0, 1, 4, 2, 5, 3])
                gv = R.reshape(lv2, R.shape([2, 3, 10, 12]))
                R.output(gv)
            return gv

    check(Before, After)


def transposed(weight: np.ndarray, channels: int, size: tuple[int, ...], **attrs: object):
    op = relax.op.nn.conv2d_transpose if len(size) == 2 else relax.op.nn.conv1d_transpose
    x = relax.Var("x", relax.TensorType((2, channels, *size), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(op(x, const(weight), **attrs))
        builder.emit_func_output(output)
    return builder.get()


CASES = {
    "3x3 by 2": ((3, 3), (5, 6), {"strides": 2, "padding": 1, "output_padding": 1}),
    "4x4 by 2": ((4, 4), (5, 4), {"strides": 2, "padding": 1}),
    "5x4 by 3x2": ((5, 4), (4, 5), {"strides": (3, 2), "padding": (2, 0, 1, 1)}),
    "cut": ((3, 3), (6, 6), {"strides": 2, "padding": 3}),
    "by 1": ((3, 2), (6, 5), {"strides": 1, "padding": (1, 0)}),
    "groups": ((3, 3), (5, 5), {"strides": 2, "padding": 1, "groups": 2}),
    "sequence": ((5,), (9,), {"strides": 3, "padding": 1, "output_padding": 2}),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("kernel", "size", "attrs"), CASES.values(), ids=CASES)
def test_numbers(kernel: tuple[int, ...], size: tuple[int, ...], attrs: dict):
    before = transposed(dyadic(4, 3, *kernel), 4, size, **attrs)
    after = simplify(before)
    names = calls(after)
    assert not any("transpose" in name for name in names)
    x = dyadic(2, 4, *size, seed=5)
    x[1, 2, 3] = np.inf  # reaches no output that does not read it
    np.testing.assert_array_equal(run(after, x), run(before, x))


@pytest.mark.parametrize(
    ("kernel", "attrs"),
    [((3, 3), {"dilation": 2}), ((1, 3), {"strides": 2}), ((3, 3), {"data_layout": "NHWC"})],
    ids=["dilation", "outputs of nothing", "layout"],
)
def test_left_alone(kernel: tuple[int, int], attrs: dict):
    size = (4, 5) if "data_layout" not in attrs else (5, 4)
    check_unchanged(transposed(dyadic(4, 3, *kernel), 4, size, **attrs))
