# SPDX-License-Identifier: Apache-2.0
"""Rule ``canonicalize_shuffle``: channel shuffles, and transposes that are none."""

from __future__ import annotations

import pytest
from simplify_checks import calls, check, check_unchanged, simplify
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

op = relax.op


def shuffle(x, inner=(2, 2, 6, 5, 7), axes=(0, 2, 1, 3, 4), shape=(2, 12, 5, 7), both=False):
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            grouped = builder.emit(op.reshape(x, inner))
            transposed = builder.emit(op.permute_dims(grouped, axes))
            output = builder.emit_output(op.reshape(transposed, shape))
            if both:
                output = relax.Tuple([output, builder.emit_output(op.tanh(transposed))])
        builder.emit_func_output(output)
    return builder.get()


def image():
    return relax.Var("x", relax.TensorType((2, 12, 5, 7), "float32"))


@pytest.mark.parametrize("groups", [2, 3, 12])
def test_shuffle_becomes_one_op(groups):
    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 12, 5, 7), "float32")):
            with R.dataflow():
                gv = R.tvm_fusion.channel_shuffle(x, channels=12, groups=groups)
                R.output(gv)
            return gv

    check(shuffle(image(), (2, groups, 12 // groups, 5, 7)), Expected)


@pytest.mark.parametrize(
    "other",
    [
        {"axes": (0, 2, 1, 4, 3)},  # the image is transposed as well
        {"axes": (1, 2, 0, 3, 4)},
        {"inner": (2, 2, 6, 7, 5)},  # another image than before
        {"inner": (4, 1, 6, 5, 7), "axes": (0, 2, 1, 3, 4)},
        {"shape": (2, 12, 7, 5)},
        {"shape": (2, 6, 10, 7)},
        {"inner": (2, 6, 14, 5), "axes": (0, 2, 1, 3)},
    ],
)
def test_others_stay(other):
    check_unchanged(shuffle(image(), **other))


def test_what_others_read_stays():
    found = calls(simplify(shuffle(image(), both=True)))
    assert "tvm_fusion.channel_shuffle" not in found and "permute_dims" in found
