# SPDX-License-Identifier: Apache-2.0
"""Rule ``fold_quantization``: rounding in the kernels of convolutions, and what stays quantised."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from simplify_checks import calls, check_unchanged, const, dyadic, simplify
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes import ApplyRules, FuseEpilogue
from schedules import cpu
from tests.targets import compile_unchecked

SCALE, OTHER = 0.25, 0.5
WEIGHT, BIAS = dyadic(4, 4, 3, 3), dyadic(1, 4, 1, 1, seed=1)
SHAPE = (1, 4, 6, 5)


def rounded(builder, x, scale=SCALE, zero=3, dtype="uint8"):
    """Quantise ``x``, and make floats of it again."""
    operands = const(np.array(scale)), const(np.array(zero), dtype)
    bits = builder.emit(relax.op.quantize(x, *operands, axis=1, out_dtype=dtype))
    return builder.emit(relax.op.dequantize(bits, *operands, axis=1, out_dtype="float32"))


def module(body, shape=SHAPE) -> tvm.IRModule:
    """``main(x)`` with the results of ``body(builder, x)``."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(body(builder, x))
        builder.emit_func_output(result)
    return relax.transform.CanonicalizeBindings()(builder.get())


def run(mod: tvm.IRModule, x: np.ndarray) -> np.ndarray:
    machine = relax.VirtualMachine(compile_unchecked(mod), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(x)).numpy()


def layer(builder, x):
    value = builder.emit(relax.op.nn.conv2d(x, const(WEIGHT), padding=[1, 1]))
    return builder.emit(relax.op.add(value, const(BIAS)))


def network(builder, x):
    """Two quantised layers, and the sum of the second with what the first gives."""
    first = rounded(builder, layer(builder, rounded(builder, x)), OTHER, 0)
    second = rounded(builder, layer(builder, first), OTHER, 100)
    return rounded(builder, builder.emit(relax.op.add(second, first)), OTHER, 7)


def test_scales_join_the_weights_and_rounding_the_convolution():
    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor(SHAPE, "float32")) -> R.Tensor(SHAPE, "float32"):
            with R.dataflow():
                units = R.divide(x, const(SCALE))
                whole = R.tvm_fusion.round_clip(units, low=-3.0, high=252.0)
                conv = R.nn.conv2d(whole, const(WEIGHT * SCALE / OTHER), padding=[1, 1, 1, 1])
                biased = R.add(conv, const(BIAS / OTHER))
                result = R.tvm_fusion.round_clip(biased, low=0.0, high=255.0)
                gv = R.multiply(result, const(OTHER))
                R.output(gv)
            return gv

    def body(builder, x):
        return rounded(builder, layer(builder, rounded(builder, x)), OTHER, 0)

    tvm.ir.assert_structural_equal(simplify(module(body)), Expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "move",
    [
        lambda x: relax.op.nn.max_pool2d(x, (2, 2), (2, 2)),
        lambda x: relax.op.reshape(x, (1, 4, 30)),
        lambda x: relax.op.permute_dims(relax.op.nn.max_pool2d(x, (2, 2)), [0, 2, 3, 1]),
    ],
)
def test_bytes_that_are_moved_before_they_are_floats(move):
    """Two readers, each with a dequantisation of its own."""

    def body(builder, x):
        scale, zero = const(np.array(SCALE)), const(np.array(3), "uint8")
        bits = builder.emit(relax.op.quantize(x, scale, zero, axis=1, out_dtype="uint8"))
        moved = builder.emit(move(bits))
        floats = [
            builder.emit(relax.op.dequantize(moved, scale, zero, axis=1, out_dtype="float32"))
            for _ in range(2)
        ]
        return builder.emit(relax.op.multiply(floats[0], builder.emit(relax.op.exp(floats[1]))))

    before = module(body)
    after = simplify(before)
    names = calls(after)
    assert not any("quantize" in name for name in names)
    assert names.count("relax.nn.max_pool2d") <= 1 and names.count("relax.reshape") <= 1
    x = np.random.default_rng(2).standard_normal(SHAPE).astype("float32")
    np.testing.assert_array_equal(run(after, x), run(before, x))


def test_what_was_quantised_otherwise_stays_quantised():
    def body(builder, x):
        operands = const(np.array(SCALE)), const(np.array(3), "uint8")
        bits = builder.emit(relax.op.quantize(x, *operands, axis=1, out_dtype="uint8"))
        pooled = builder.emit(relax.op.nn.max_pool2d(bits, (2, 2)))
        others = const(np.array(OTHER)), const(np.array(3), "uint8")
        return builder.emit(relax.op.dequantize(pooled, *others, axis=1, out_dtype="float32"))

    check_unchanged(module(body))


def test_numbers_are_those_of_the_quantised_network():
    before = module(network)
    after = simplify(before)
    assert not any("quantize" in name for name in calls(after))
    assert calls(FuseEpilogue()(after)).count("tvm_fusion.conv2d") == 2
    assert calls(FuseEpilogue()(after)).count("tvm_fusion.round_clip") == 2  # x and the sum
    x = dyadic(*SHAPE, seed=5) * 9
    np.testing.assert_array_equal(run(after, x), run(before, x))


@pytest.mark.parametrize(
    ("move", "args"),
    [(relax.op.nn.max_pool2d, ([2, 2],)), (relax.op.reshape, ((1, 8, 3, 5),))],
    ids=["max_pool2d", "reshape"],
)
def test_what_is_on_the_grid_is_not_rounded_again(move, args):
    def body(builder, x):
        return rounded(builder, builder.emit(move(rounded(builder, x), *args)))

    assert calls(simplify(module(body))).count("tvm_fusion.round_clip") == 1


def test_another_grid_is_rounded_again():
    def body(builder, x):
        return rounded(builder, rounded(builder, x), SCALE, 4)

    assert calls(simplify(module(body))).count("tvm_fusion.round_clip") == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("low", "high", "zero", "stays"),
    [
        (0, None, 0, False),  # a ReLU before the least number of uint8
        (0, None, 3, True),
        (0, 63.75, 0, False),  # 255 steps
        (0, 6.0, 0, True),
        (0.1, None, 0, False),  # rounds to zero
        (0.2, None, 0, True),
    ],
)
def test_bounds_of_the_type_replace_others(low, high, zero, stays):
    def body(builder, x):
        bounds = low, np.inf if high is None else high
        clipped = relax.op.nn.relu(x) if bounds == (0, np.inf) else relax.op.clip(x, *bounds)
        return rounded(builder, builder.emit(clipped), SCALE, zero)

    mod = module(body)
    found = simplify(mod)
    assert any(name in ("nn.relu", "clip") for name in calls(found)) == stays
    x = (np.arange(np.prod(SHAPE), dtype="float32").reshape(SHAPE) - 40) / 16
    np.testing.assert_array_equal(run(found, x), run(mod, x))


def test_what_several_read_keeps_its_clip():
    def body(builder, x):
        relu = builder.emit(relax.op.nn.relu(x))
        return builder.emit(relax.op.add(rounded(builder, relu, SCALE, 0), relu))

    assert "nn.relu" in calls(simplify(module(body)))


def test_scales_of_channels_stay():
    def body(builder, x):
        return rounded(builder, x, np.array([0.25, 0.5, 1, 2]), np.zeros(4))

    check_unchanged(module(body))


def test_other_grids_on_both_sides_stay():
    def body(builder, x):
        zero = const(np.array(0), "uint8")
        bits = relax.op.quantize(x, const(SCALE), zero, axis=1, out_dtype="uint8")
        return relax.op.dequantize(builder.emit(bits), const(OTHER), zero, axis=1)

    check_unchanged(module(body))


def test_chains_of_roundings_stay_short():
    def body(builder, x):
        for step in range(8):
            x = rounded(builder, builder.emit(relax.op.add(x, const(step + 0.5))), SCALE, step)
        return x

    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
    steps = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern()]
    steps += [relax.transform.FuseOps(), relax.transform.FuseTIR(), ApplyRules(*cpu.RULES)]
    with target:
        done = tvm.transform.Sequential(steps)(simplify(module(body)))
    (kernel,) = [func for func in done.functions.values() if isinstance(func, tvm.tirx.PrimFunc)]
    assert 8 <= kernel.script().count("T.round(") <= 40  # not a power of the length
