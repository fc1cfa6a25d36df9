# SPDX-License-Identifier: Apache-2.0
"""Products of two quantised tensors by pass ``MultiplyBytes``: forms, epilogues, what stays."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.target import Target

from relay_passes import MultiplyBytes
from relay_passes.op import byte_matmul, round_clip
from relay_passes.op.byte_matmul import changed
from schedules.cost.decisions import recorded
from schedules.errors import OpError

AVX2 = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver3", "num-cores": 2})
HEADS = (1, 64, 4, 32)
SQUARES = (((64, 64), "uint8"), ((64, 64), "uint8"))


def number(value: float) -> relax.Expr:
    return relax.const(value, "float32")


def module(build, *inputs: tuple[tuple[int, ...], str]) -> tvm.IRModule:
    """A function whose bindings ``build`` makes by the function that it gets first."""
    builder = relax.BlockBuilder()
    given = [relax.Var(f"x{n}", relax.TensorType(*each)) for n, each in enumerate(inputs)]
    with builder.function("main", given):
        with builder.dataflow():
            result = builder.emit_output(build(builder.emit, *given))
        builder.emit_func_output(result)
    return relax.transform.CanonicalizeBindings()(builder.get())


def numbers_of(emit, data: relax.Expr, low: float, scale: float) -> relax.Expr:
    moved = emit(relax.op.add(emit(relax.op.astype(data, "float32")), number(low)))
    return emit(relax.op.multiply(moved, number(scale)))


def scores(emit, query, key, mask):
    """Rounded queries by keys, which are bytes, with a scale and a mask."""
    rounded = emit(round_clip(emit(relax.op.divide(query, number(0.25))), -128, 127))
    left = emit(relax.op.permute_dims(emit(relax.op.multiply(rounded, number(0.25))), [0, 2, 1, 3]))
    right = emit(relax.op.permute_dims(numbers_of(emit, key, -3, 0.5), [0, 2, 3, 1]))
    quotient = emit(relax.op.divide(emit(relax.op.matmul(left, right)), number(2)))
    rounded = relax.op.multiply(emit(round_clip(quotient, -100, 155)), number(0.75))
    return rounded if mask is None else relax.op.add(emit(rounded), mask)


def test_scores_of_an_attention():
    """Bytes, their transposition, scale, rounding and mask are one call."""
    inputs = (HEADS, "float32"), (HEADS, "uint8"), ((1, 1, 1, 64), "float32")
    before = module(scores, *inputs)
    with recorded() as found:
        after = MultiplyBytes(AVX2)(before)
    assert [(each.decision, each.chosen) for each in found] == [("product", "bytes")]

    def expected(emit, query, key, mask):
        rounded = round_clip(emit(relax.op.divide(query, number(0.25))), -128, 127, "uint8")
        axes = {"left_axes": [0, 2, 1, 3], "right_axes": [0, 2, 3, 1]}
        call = byte_matmul(emit(rounded), key, **axes, offsets=(-128, -3), scale=0.0625)
        more = {"low": -100.0, "high": 155.0, "rescale": 0.75, "is_added_to": True}
        return relax.Call(call.op, [*call.args, mask], dict(call.attrs.items()) | more)

    tvm.ir.assert_structural_equal(after, module(expected, *inputs))
    tvm.ir.assert_structural_equal(MultiplyBytes(AVX2)(after), after)


def test_scores_without_a_mask():
    """Rounded scores are multiplied by their scale in the product, too."""
    inputs = (HEADS, "float32"), (HEADS, "uint8")

    def given(emit, query, key):
        return scores(emit, query, key, None)

    def expected(emit, query, key):
        rounded = round_clip(emit(relax.op.divide(query, number(0.25))), -128, 127, "uint8")
        axes = {"left_axes": [0, 2, 1, 3], "right_axes": [0, 2, 3, 1]}
        call = byte_matmul(emit(rounded), key, **axes, offsets=(-128, -3), scale=0.0625)
        more = {"low": -100.0, "high": 155.0, "rescale": 0.75}
        return relax.Call(call.op, call.args, dict(call.attrs.items()) | more)

    after = MultiplyBytes(AVX2)(module(given, *inputs))
    tvm.ir.assert_structural_equal(after, module(expected, *inputs))


def weighted(emit, weights, values, left_zero, right_zero, factor):
    """Bytes whose zero points and factor are known at run time, as heads beside each other."""
    zeros = [emit(relax.op.astype(zero, "float32")) for zero in (left_zero, right_zero)]
    floats = [emit(relax.op.astype(each, "float32")) for each in (weights, values)]
    operands = [
        emit(relax.op.subtract(each, zero)) for each, zero in zip(floats, zeros, strict=True)
    ]
    product = emit(relax.op.matmul(*operands))
    return relax.op.permute_dims(emit(relax.op.multiply(product, factor)), [0, 2, 1, 3])


WEIGHTED = (
    ((1, 4, 64, 64), "uint8"),
    ((1, 4, 64, 32), "int8"),
    ((), "uint8"),
    ((), "int8"),
    ((), "float32"),
)


def test_zero_points_of_run_time():
    def expected(emit, weights, values, left_zero, right_zero, factor):
        whole = [0, 1, 2, 3]
        zeros = left_zero, right_zero
        call = byte_matmul(
            weights, values, left_axes=whole, right_axes=whole, zeros=zeros, factor=factor
        )
        return relax.Call(call.op, call.args, dict(call.attrs.items()) | {"axes": [0, 2, 1, 3]})

    after = MultiplyBytes(AVX2)(module(weighted, *WEIGHTED))
    tvm.ir.assert_structural_equal(after, module(expected, *WEIGHTED))


def test_sums_in_float64_are_scaled_behind_the_product():
    """Sums are integers; a scale that is 1 needs no multiplication."""

    def wide(value: float) -> relax.Expr:
        return relax.const(value, "float64")

    def scaled_by(value: float):
        def build(emit, left, right):
            factors = [emit(relax.op.astype(each, "float64")) for each in (left, right)]
            if value != 1:
                factors[0] = emit(relax.op.multiply(factors[0], wide(value)))
            return relax.op.matmul(*factors)

        return build

    def expected(value: float):
        def build(emit, left, right):
            call = byte_matmul(left, right, left_axes=[0, 1], right_axes=[0, 1])
            sums = relax.Call(call.op, call.args, dict(call.attrs.items()) | {"out_dtype": "int32"})
            floats = relax.op.astype(emit(sums), "float64")
            return floats if value == 1 else relax.op.multiply(emit(floats), wide(value))

        return build

    for value in (1.0, 0.5, 1e-30):
        after = MultiplyBytes(AVX2)(module(scaled_by(value), *SQUARES))
        tvm.ir.assert_structural_equal(after, module(expected(value), *SQUARES))


@pytest.mark.parametrize(
    "change",
    [
        {2: ((), "int32")},  # a zero point that no byte holds
        {1: ((1, 4, 64, 32), "uint8")},  # a zero point of another type than its bytes
    ],
)
def test_what_stays_in_floats(change):
    inputs = [change.get(place, each) for place, each in enumerate(WEIGHTED)]
    before = module(weighted, *inputs)
    tvm.ir.assert_structural_equal(MultiplyBytes(AVX2)(before), before)


def test_one_row_does_not_pay_for_packing_all_columns():
    inputs = ((1, 1, 4, 32), "float32"), (HEADS, "uint8"), ((1, 1, 1, 64), "float32")
    before = module(scores, *inputs)
    with recorded() as found:
        tvm.ir.assert_structural_equal(MultiplyBytes(AVX2)(before), before)
    assert [(each.decision, each.chosen) for each in found] == [("product", "float32")]


def test_readers_of_floats_keep_the_product_apart():
    """A product that something else reads ends in floats; only one reader ends it otherwise."""

    def twice(emit, left, right):
        operands = [numbers_of(emit, each, -128, 0.5) for each in (left, right)]
        product = emit(relax.op.matmul(*operands))
        return relax.op.add(emit(round_clip(product, 0, 255)), product)

    text = str(MultiplyBytes(AVX2)(module(twice, *SQUARES)))
    assert "byte_matmul" in text and "round_clip" in text


def test_types_and_shapes_are_checked():
    left, right = (
        relax.Var(name, relax.TensorType(shape, "uint8"))
        for name, shape in (("left", (4, 8)), ("right", (6, 8)))
    )
    axes = {"left_axes": [0, 1], "right_axes": [1, 0]}
    assert [*map(int, byte_matmul(left, right, **axes).args[0].ty.shape)] == [4, 8]
    with pytest.raises(OpError, match="8 columns by 6 rows"):
        byte_matmul(left, right, left_axes=[0, 1], right_axes=[0, 1])
    with pytest.raises(OpError, match=r"right_axes are \[0, 2\]"):
        byte_matmul(left, right, left_axes=[0, 1], right_axes=[0, 2])
    with pytest.raises(OpError, match="expected uint8 or int8 of known shape"):
        byte_matmul(left, relax.Var("f", relax.TensorType((8, 8), "float32")), **axes)
    zero = relax.Var("zero", relax.TensorType((), "int8"))
    with pytest.raises(OpError, match="other operands are"):
        byte_matmul(left, right, **axes, zeros=(zero, None))


@pytest.mark.parametrize(
    ("attrs", "reason"),
    [
        ({"out_dtype": "int32", "scale": 0.5}, "sums in int32 are scaled or rounded"),
        ({"out_dtype": "uint8"}, "uint8 without bounds"),
        ({"out_dtype": "int8", "low": 0.0, "high": 9.0, "rescale": 2.0}, "int8, rescaled"),
    ],
)
def test_ends_that_no_kernel_has(attrs, reason):
    left, right = (relax.Var(name, relax.TensorType((4, 4), "uint8")) for name in ("x", "y"))
    call = byte_matmul(left, right, left_axes=[0, 1], right_axes=[0, 1])
    with pytest.raises(OpError, match=reason):
        relax.BlockBuilder().normalize(changed(call, **attrs))


@pytest.mark.parametrize("shape", [(1, 64, 64), (4, 64, 64), (1, 1, 64)])
def test_a_tensor_of_more_dimensions_is_added_outside(shape):
    def rounded(emit, x, y, mask):
        product = emit(relax.op.matmul(numbers_of(emit, x, 0, 0.5), numbers_of(emit, y, 0, 0.5)))
        scaled = relax.op.multiply(emit(round_clip(product, 0, 255)), number(0.75))
        return relax.op.add(emit(scaled), mask)

    after = MultiplyBytes(AVX2)(module(rounded, *SQUARES, (shape, "float32")))
    assert "byte_matmul" in after.script() and "R.add" in after.script()


def test_a_scale_of_more_dimensions_behind_a_transposition():
    def build(emit, x, y):
        turned = emit(relax.op.permute_dims(emit(relax.op.astype(x, "float32"))))
        three = relax.const(np.full((1, 1, 1), 0.5), "float32")
        left = emit(relax.op.multiply(turned, three))
        return relax.op.matmul(left, emit(relax.op.astype(y, "float32")))

    MultiplyBytes(AVX2)(module(build, *SQUARES))


@pytest.mark.parametrize("offset, is_taken", [(-32000, True), (-40000, False)])
def test_offsets_of_pairs_fit_16_bits(offset, is_taken):
    def build(emit, x, y):
        return relax.op.matmul(numbers_of(emit, x, offset, 1), numbers_of(emit, y, 0, 1))

    after = MultiplyBytes(AVX2)(module(build, *SQUARES))
    assert ("byte_matmul" in after.script()) == is_taken


HUGE = "1e25 1e25", "1e-25 1e-25", "1e39 1"


@pytest.mark.parametrize("scales", HUGE)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scales_whose_product_no_float_holds_stay_outside(scales, dtype):
    """Without a word of numpy: zero times what float32 holds is zero, times infinity it is not."""

    def build(emit, x, y):
        factors = []
        for data, scale in zip((x, y), scales.split(), strict=True):
            value = emit(relax.op.astype(data, dtype))
            for part in (float(scale) ** 0.5,) * 2:
                value = emit(relax.op.multiply(value, relax.const(part, dtype)))
            factors.append(value)
        return relax.op.matmul(*factors)

    before = module(build, *SQUARES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after = MultiplyBytes(AVX2)(before)
    is_held = dtype == "float64" and scales != HUGE[2]
    assert ("byte_matmul" in after.script()) == is_held


@pytest.mark.parametrize("scale", [0.0, 1e-30, np.inf, np.nan])
def test_divisors_that_a_scale_does_not_take_stay_outside(scale):
    def build(emit, x, y):
        product = emit(relax.op.matmul(numbers_of(emit, x, 0, 1e20), numbers_of(emit, y, 0, 1)))
        return relax.op.divide(product, number(scale))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after = MultiplyBytes(AVX2)(module(build, *SQUARES))
    assert "byte_matmul" in after.script() and "R.divide" in after.script()


def test_a_tensor_is_added_outside_to_a_product_in_another_order():
    """Another product, in order, adds their sum. What is added lies as the product does."""
    shape = (1, 64, 64, 64)

    def build(emit, x, y, mask):
        first = emit(changed(plain_product(emit, x, y), axes=[0, 2, 1, 3]))
        masked = emit(relax.op.add(first, mask))
        second = emit(relax.op.matmul(numbers_of(emit, x, 0, 0.5), numbers_of(emit, y, 0, 0.5)))
        return relax.op.add(second, masked)

    inputs = (shape, "uint8"), (shape, "uint8"), ((1, 64, 1, 64), "float32")
    text = MultiplyBytes(AVX2)(module(build, *inputs)).script()
    assert text.count("byte_matmul") == 2 and text.count("R.add") == 1
    assert text.count("is_added_to=True") == 1


def plain_product(_, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    return byte_matmul(x, y, left_axes=range(x.ty.ndim), right_axes=range(y.ty.ndim))


@pytest.mark.parametrize(
    "left, right, message",
    [
        ((2, 4, 8), (3, 8, 4), "batches of"),
        ((4, 70000), (70000, 4), "sums reach"),
    ],
)
def test_products_that_no_kernel_computes(left, right, message):
    with pytest.raises(OpError, match=message):
        module(plain_product, (left, "uint8"), (right, "uint8"))


def test_a_cpu_without_products_of_bytes():
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "nehalem"})
    mod = module(plain_product, *SQUARES)
    with target, pytest.raises(OpError, match="nehalem multiplies no bytes"):
        relax.transform.LegalizeOps()(mod)
