# SPDX-License-Identifier: Apache-2.0
"""Pass ``MultiplyBytes``: what becomes products of bytes, what does not, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from simplify_checks import calls
from tvm import relax
from tvm.target import Target

from relay_passes import MultiplyBytes
from relay_passes.conv2d.quantized import multiply_bytes
from relay_passes.op import quantized_conv2d, round_clip
from schedules.workload.conv2d import ByteRounding

RNG = np.random.default_rng(5)
VNNI, AVX2 = (
    Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu})
    for cpu in ("znver4", "znver3")
)
INTEGERS = RNG.integers(-127, 128, (8, 4, 3, 3))
INTEGERS[:, 0, 0, 0] = 127
SCALES = 2.0 ** -np.arange(1, 9)
WEIGHT = (INTEGERS * SCALES[:, None, None, None]).astype("float32")
WIDE = np.repeat(WEIGHT, 2, axis=1)
BIAS = RNG.standard_normal((1, 8, 1, 1)).astype("float32")

DEPTHWISE = (RNG.integers(-127, 128, (8, 1, 3, 3)) / 4).astype("float32")

SQUARE = (RNG.integers(-127, 128, (4, 4, 3, 3)) / 256).astype("float32")
SQUARE[:, 0, 0, 0] = 127 / 256

Step = Callable[[relax.Expr], relax.Expr]


def module(*steps: Step, shape=(1, 4, 6, 6)) -> tvm.IRModule:
    """A module of steps, each from an expression to an expression."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value: relax.Expr = x
            for step in steps:
                value = builder.emit(step(value))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return relax.transform.CanonicalizeBindings()(builder.get())


def rounded(low=0, high=255) -> Step:
    return lambda x: round_clip(x, low, high)


def convolved(weight=WEIGHT, **attrs) -> Step:
    return lambda x: relax.op.nn.conv2d(x, relax.const(weight), **attrs)


def multiplied(x: relax.Expr) -> relax.Expr:
    return relax.op.matmul(x, relax.const(np.full((4, 8), 3, "float32")))


def plus(array) -> Step:
    return lambda x: relax.op.add(x, relax.const(np.asarray(array, "float32")))


def times(number) -> Step:
    return lambda x: relax.op.multiply(x, relax.const(number, "float32"))


def after(*steps: Step, **options) -> tvm.IRModule:
    return MultiplyBytes(VNNI)(module(*steps, **options))


def check_numbers(run_module, *steps: Step, shape=(1, 4, 6, 6), spread=300.0) -> None:
    """The same numbers, but for those that rounding in another order may move by one."""
    before = module(*steps, shape=shape)
    x = ((RNG.random(shape) - 0.25) * spread).astype("float32")
    wanted, found = run_module(before, x), run_module(MultiplyBytes(VNNI)(before), x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_gpus_with_tensor_cores_multiply_bytes():
    steps = [rounded(), convolved(padding=1)]
    before = module(*steps)
    mixed = module(*steps, rounded(), convolved(DEPTHWISE, groups=8))
    sm_75, sm_80 = (Target({"kind": "cuda", "arch": arch}) for arch in ("sm_75", "sm_80"))
    tvm.ir.assert_structural_equal(MultiplyBytes(sm_75)(before), before)
    assert "R.tvm_fusion.quantized_conv2d(" in MultiplyBytes(sm_80)(before).script()
    text = MultiplyBytes(sm_80)(mixed).script()
    assert "R.tvm_fusion.quantized_conv2d(" in text and "R.tvm_fusion.conv2d(" in text
    assert "R.nn.conv2d(" not in text
    product = module(rounded(), multiplied, shape=(3, 4))
    tvm.ir.assert_structural_equal(MultiplyBytes(sm_80)(product), product)
    assert "quantized_conv2d" in MultiplyBytes(VNNI)(product).script()


def test_a_convolution_with_its_epilogue():
    found = after(rounded(), convolved(padding=1), plus(BIAS), lambda x: round_clip(x, -3, 252))
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 4, 6, 6), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            product = builder.emit(
                quantized_conv2d(
                    x,
                    relax.const(INTEGERS.astype("int8")),
                    relax.const(BIAS.reshape(8)),
                    relax.const(SCALES.astype("float32")),
                    padding=[1, 1, 1, 1],
                    activation="round_clip",
                    low=-3,
                    high=252,
                    rounding=ByteRounding(1.0, 0.0, 255.0),
                )
            )
            result = builder.emit_output(product)
        builder.emit_func_output(result)
    tvm.ir.assert_structural_equal(
        found, relax.transform.CanonicalizeBindings()(builder.get()), map_free_vars=True
    )


@pytest.mark.parametrize(("units", "dtype"), [(700, "int32"), (0.3, "float32"), (2**31, "float32")])
def test_a_bias_of_whole_multiples_of_the_scale_joins_the_sums(units, dtype):
    """Where they hold it."""
    bias = (units * SCALES).reshape(1, 8, 1, 1)
    found = after(rounded(), convolved(padding=1), plus(bias), rounded())
    (call,) = (
        each.value
        for each in found["main"].body.blocks[0].bindings
        if "quantized_conv2d" in str(each.value.op)
    )
    assert str(call.args[2].ty.dtype) == dtype


def test_results_that_are_read_as_bytes_are_stored_as_bytes():
    found = after(rounded(), convolved(padding=1), plus(BIAS), rounded(0, 200), convolved(WIDE))
    assert calls(found) == ["tvm_fusion.quantized_conv2d"] * 2
    assert str(found).count('out_dtype="uint8"') == 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("low", [0, -3])
@pytest.mark.parametrize("padding", [0, 1])
def test_numbers_that_bytes_are_short_of(run_module, low, padding):
    steps = rounded(low, 200), convolved(WIDE, padding=padding), plus(BIAS)
    assert ("nn.pad" in calls(after(*steps, shape=(1, 8, 6, 6)))) == bool(low and padding)
    check_numbers(run_module, *steps, shape=(1, 8, 6, 6))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("low", [0, -3])
@pytest.mark.parametrize("scale", [1.0, 0.75])
def test_the_first_convolution_rounds_its_image(run_module, low, scale):
    divided = [lambda x: relax.op.divide(x, relax.const(scale, "float32"))] * (scale != 1)
    steps = *divided, rounded(low, 200), convolved(padding=1), plus(BIAS)
    assert calls(after(*steps)) == ["tvm_fusion.quantized_conv2d"]
    assert f"rounding=[{scale}, {float(low)}, 200.0]" in str(after(*steps))
    check_numbers(run_module, *steps)


def test_images_that_are_rounded_apart():
    """For other readers, from zeros that no byte stands for, or for many channels."""

    def twice(x):
        return relax.op.add(*(relax.op.nn.conv2d(x, relax.const(w)) for w in (WEIGHT, WEIGHT + 0)))

    for steps, shape in (
        ((rounded(), twice), (1, 4, 6, 6)),
        ((rounded(2, 200), convolved()), (1, 4, 6, 6)),
        ((rounded(), convolved(WIDE)), (1, 8, 6, 6)),
        ((rounded(), convolved(WEIGHT[:, :, :1, :1])), (1, 4, 6, 6)),
    ):
        assert "tvm_fusion.round_clip" in calls(after(*steps, shape=shape))


def test_maxima_of_scaled_numbers(run_module):
    pool = lambda x: relax.op.nn.max_pool2d(x, (2, 2), (2, 2))  # noqa: E731
    steps = rounded(-5, 250), times(0.25), pool, convolved()
    assert calls(after(*steps)) == [
        *("tvm_fusion.round_clip", "nn.max_pool2d", "tvm_fusion.quantized_conv2d")
    ]
    check_numbers(run_module, *steps)


def test_other_readers_get_floats(run_module):
    def both(x):
        branch = relax.op.nn.conv2d(x, relax.const(WEIGHT[:4]), padding=1)
        return relax.op.add(branch, relax.op.multiply(x, relax.const(0.5)))

    steps = rounded(-3, 252), both
    assert {"astype", "tvm_fusion.quantized_conv2d"} <= set(calls(after(*steps)))
    check_numbers(run_module, *steps)


def summed(first: bool, low: float, divide: bool = True) -> Step:
    """A rounded product and the rounded input, each with its scale, added up and rounded."""

    def block(x):
        product = round_clip(relax.op.nn.conv2d(x, relax.const(SQUARE), padding=1), low, low + 255)
        own, other = times(0.1)(product), times(0.3)(x)
        total = relax.op.add(own, other) if first else relax.op.add(other, own)
        total = relax.op.divide(total, relax.const(0.7)) if divide else total
        return round_clip(total, -9, 246)

    return block


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("low", [0, -128])
@pytest.mark.parametrize("divide", [True, False])
def test_sums_with_other_bytes_join_the_product(run_module, monkeypatch, first, low, divide):
    steps = rounded(0, 255), summed(first, low, divide), convolved(SQUARE)
    found = after(*steps)
    assert calls(found) == ["tvm_fusion.round_clip", *["tvm_fusion.quantized_conv2d"] * 2]
    x = ((RNG.random((1, 4, 6, 6)) - 0.25) * 300).astype("float32")
    fused = run_module(found, x)
    monkeypatch.setattr(multiply_bytes, "fold_byte_residual", lambda graph, call: None)
    apart = after(*steps)
    assert "add" in calls(apart)
    np.testing.assert_array_equal(fused, run_module(apart, x))


def both_read(x: relax.Expr) -> relax.Expr:
    product = times(0.1)(round_clip(relax.op.nn.conv2d(x, relax.const(SQUARE), padding=1), 0, 255))
    total = round_clip(relax.op.add(product, times(0.3)(x)), 0, 255)
    return relax.op.add(total, product)


def of_floats(x: relax.Expr) -> relax.Expr:
    product = round_clip(relax.op.nn.conv2d(x, relax.const(SQUARE), padding=1), 0, 255)
    return round_clip(relax.op.add(times(0.1)(product), relax.op.exp(x)), 0, 255)


def one_channel(x: relax.Expr) -> relax.Expr:
    other = round_clip(relax.op.nn.conv2d(x, relax.const(SQUARE[:1]), padding=1), 0, 255)
    product = round_clip(relax.op.nn.conv2d(x, relax.const(SQUARE), padding=1), 0, 255)
    return round_clip(relax.op.add(product, other), 0, 255)


@pytest.mark.slow
@pytest.mark.parametrize("block", [both_read, of_floats, one_channel])
def test_sums_that_stay_apart(run_module, block):
    assert "add" in calls(after(rounded(), block))
    check_numbers(run_module, rounded(), block)


def test_depthwise_layers_read_bytes(run_module):
    weight = RNG.standard_normal((4, 1, 3, 3)).astype("float32")
    steps = rounded(-3, 200), convolved(weight, groups=4, padding=1), rounded(-20, 30)
    found = after(*steps)
    assert calls(found) == ["tvm_fusion.round_clip", "nn.pad", "tvm_fusion.conv2d"]
    check_numbers(run_module, *steps)


def grouped(own: int, largest: int = 127, outputs: int = 2) -> Step:
    """Two groups of ``own`` channels."""
    integers = RNG.integers(-largest, largest + 1, (outputs * own, own, 3, 3))
    integers[:, 0, 0, 0] = largest
    return convolved((integers / 64).astype("float32"), groups=2, padding=1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("target", "own", "largest", "in_bytes"),
    [(VNNI, 4, 127, True), (VNNI, 12, 127, True), (VNNI, 6, 127, False), (AVX2, 8, 127, True),
     (AVX2, 4, 127, False), (AVX2, 4, 63, True)],
)  # fmt: skip
def test_groups_are_read_in_words(run_module, target, own, largest, in_bytes):
    """Of four channels; in 16 bits only where two products of them fit."""
    shape, steps = (1, 2 * own, 6, 6), (rounded(-3, 200), grouped(own, largest), rounded(-9, 99))
    before = module(*steps, shape=shape)
    found = MultiplyBytes(target)(before)
    assert ("tvm_fusion.quantized_conv2d" in calls(found)) == in_bytes
    x = ((RNG.random(shape) - 0.25) * 300).astype("float32")
    np.testing.assert_array_equal(run_module(found, x), run_module(before, x))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 48)])
def test_products_with_matrices(run_module, shape):
    matrix = (RNG.integers(-127, 128, (48, 32)) / 512).astype("float32")
    steps = (
        rounded(-7, 248),
        lambda x: relax.op.matmul(x, relax.const(matrix)),
        plus(RNG.standard_normal(32)),
        lambda x: relax.op.nn.relu(x),
    )
    found = after(*steps, shape=shape)
    assert calls(found)[1:] == ["reshape", "tvm_fusion.quantized_conv2d", "reshape"]
    assert 'activation="relu"' in str(found)
    check_numbers(run_module, *steps, shape=shape)


def test_scales_and_zeros_of_run_time(run_module):
    matrix = RNG.integers(-127, 128, (48, 32)).astype("float32")

    def product(x):
        builder = relax.BlockBuilder.current()
        zero = builder.emit(relax.op.max(relax.op.round(x)))
        scale = builder.emit(relax.op.mean(x))
        data = builder.emit(round_clip(x, 0, 255, "uint8"))
        short = builder.emit(relax.op.subtract(relax.op.astype(data, "float32"), zero))
        return relax.op.multiply(relax.op.matmul(short, relax.const(matrix)), scale)

    found = after(product, plus(RNG.standard_normal(32)), shape=(5, 48))
    assert calls(found)[-2:] == ["tvm_fusion.quantized_conv2d", "reshape"]
    check_numbers(run_module, product, plus(RNG.standard_normal(32)), shape=(5, 48))


REST = {
    "a wide range": (rounded(0, 256), convolved()),
    "numbers that are not whole": (lambda x: relax.op.nn.relu(x), convolved()),
    "weights of no scale": (
        rounded(),
        convolved(RNG.standard_normal((8, 4, 3, 3)).astype("float32")),
    ),
    "groups of two channels": (rounded(), convolved(WEIGHT[:, :2], groups=2)),
    "zeros with an offset of fractions": (rounded(), plus(0.5), convolved()),
}


@pytest.mark.parametrize("steps", REST.values(), ids=REST)
def test_left_alone(steps):
    before = module(*steps)
    tvm.ir.assert_structural_equal(MultiplyBytes(VNNI)(before), before)


@pytest.mark.parametrize("cpu", ["x86-64", "skylake-avx512"])
def test_cpus_that_do_not_multiply_bytes(cpu):
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu})
    before = module(rounded(), convolved())
    tvm.ir.assert_structural_equal(MultiplyBytes(target)(before), before)


def test_sums_that_32_bits_may_not_hold():
    weight = np.full((1, 7400, 3, 3), 127, "float32")
    steps = rounded(), convolved(weight)
    assert "tvm_fusion.quantized_conv2d" not in calls(after(*steps, shape=(1, 7400, 3, 3)))


def test_twice_equals_once():
    once = after(rounded(-3, 200), convolved(padding=1), plus(BIAS), rounded())
    tvm.ir.assert_structural_equal(MultiplyBytes(VNNI)(once), once)
