# SPDX-License-Identifier: Apache-2.0
"""Rule ``fold_pad``: padding as an op and as a PrimFunc, and what is no zero padding."""

from __future__ import annotations

import pytest
import tvm
from simplify_checks import calls, check, check_unchanged, const, dyadic, simplify
from tvm import relax, topi
from tvm.script import ir as I
from tvm.script import relax as R

WEIGHT = dyadic(4, 4, 3, 3)


def padded_convolution(make_pad, shape=("n", 4, 5, 5), readers=1):
    """``make_pad(builder, x)``, read by so many convolutions padded by (1, 2, 3, 4)."""
    builder = relax.BlockBuilder()
    batch = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType([batch if e == "n" else e for e in shape], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            pad = builder.emit(make_pad(builder, x))
            outputs = [
                builder.emit(relax.op.nn.conv2d(pad, const(WEIGHT), padding=(1, 2, 3, 4)))
                for _ in range(readers)
            ]
            result = builder.emit_output(relax.Tuple(outputs))
        builder.emit_func_output(result)
    return builder.get()


def by_op(before, after, value=0.0, mode="constant"):
    widths = [width for pair in zip(before, after, strict=True) for width in pair]
    return lambda _, x: relax.op.nn.pad(x, widths, pad_mode=mode, pad_value=value)


def by_topi(before, after, value=0.0):
    return lambda builder, x: builder.call_te(topi.nn.pad, x, list(before), list(after), value)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("by", [by_op, by_topi])
@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize(
    ("before", "after"),
    [((0, 0, 1, 1), (0, 0, 1, 1)), ((0, 0, 0, 2), (0, 0, 3, 0)), ((0, 0, 0, 0), (0, 0, 0, 5))],
)
def test_padding_joins_the_convolutions(by, readers, before, after):
    mod = padded_convolution(by(before, after), readers=readers)
    simplified = simplify(mod)
    assert calls(simplified) == ["nn.conv2d"] * readers
    assert len(simplified.functions) == 1
    padding = [1 + before[2], 2 + before[3], 3 + after[2], 4 + after[3]]
    for binding in simplified["main"].body.blocks[0].bindings[:readers]:
        assert list(binding.value.attrs.padding) == padding
        assert binding.value.args[0].same_as(simplified["main"].params[0])
    old, new = mod["main"].ret_ty, simplified["main"].ret_ty
    tvm.ir.assert_structural_equal(old, new, map_free_vars=True)


@pytest.mark.parametrize("by", [by_op, by_topi])
@pytest.mark.parametrize(
    ("before", "after", "value"),
    [
        ((0, 0, 1, 1), (0, 0, 1, 1), 1.0),
        ((1, 0, 1, 1), (0, 0, 1, 1), 0.0),
        ((0, 1, 1, 1), (0, 1, 1, 1), 0.0),
    ],
)
def test_other_values_and_axes_stay(by, before, after, value):
    channels = 4 - before[1] - after[1]
    check_unchanged(padded_convolution(by(before, after, value), ("n", channels, 5, 5)))


def test_other_modes_stay():
    check_unchanged(padded_convolution(by_op((0, 0, 1, 1), (0, 0, 1, 1), mode="reflect")))
    check_unchanged(
        padded_convolution(
            lambda builder, x: builder.call_te(
                topi.nn.mirror_pad, x, [0, 0, 1, 1], [0, 0, 1, 1], "REFLECT"
            ),
            (1, 4, 5, 5),
        )
    )


def test_cropping_stays():
    def crop(builder, x):
        return builder.call_te(topi.nn.pad, x, [0, 0, 1, -1], [0, 0, 1, 1], 0.0)

    check_unchanged(padded_convolution(crop, (1, 4, 5, 5)))


def test_padding_with_another_reader_stays():
    @I.ir_module
    class Shared:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.pad(x, (0, 0, 0, 0, 1, 1, 1, 1))
                lv1 = R.nn.conv2d(lv, const(WEIGHT))
                lv2 = R.nn.max_pool2d(lv, (3, 3))
                gv = R.concat((lv1, lv2), axis=1)
                R.output(gv)
            return gv

    check_unchanged(Shared)


def test_padding_by_nothing_goes():
    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 5), "float32")):
            with R.dataflow():
                gv = R.nn.relu(x)
                R.output(gv)
            return gv

    for by in (by_op, by_topi):
        make_pad = by((0,) * 4, (0,) * 4)
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((1, 4, 5, 5), "float32"))
        with builder.function("main", [x]):
            with builder.dataflow():
                pad = builder.emit(make_pad(builder, x))
                result = builder.emit_output(relax.op.nn.relu(pad))
            builder.emit_func_output(result)
        check(builder.get(), Expected)
