# SPDX-License-Identifier: Apache-2.0
"""Rule ``canonicalize_activation``: the spellings of hardswish, SiLU and GELU, and near misses."""

from __future__ import annotations

import pytest
import tvm
from simplify_checks import check_unchanged, const, dyadic, simplify
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes.op import hardswish


def activation(build, dtype="float32"):
    """A function ``main(x)`` returning ``build(emit, x)``."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3, 4), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(build(builder.emit, x))
        builder.emit_func_output(result)
    return relax.transform.CanonicalizeBindings()(builder.get())


def gate(emit, x, offset=3.0, high=6, dtype="float32"):
    return emit(relax.op.clip(emit(relax.op.add(x, const(offset, dtype))), 0, high))


def sigmoid_gate(emit, x, slope=1 / 6):
    line = emit(relax.op.add(emit(relax.op.multiply(const(slope), x)), const(0.5)))
    return emit(relax.op.clip(line, 0, 1))


def times(emit, x, y):
    return emit(relax.op.multiply(x, y))


def over(emit, x, number=6.0):
    return emit(relax.op.divide(x, const(number)))


HARDSWISHES = {
    "importer": lambda emit, x: times(emit, x, over(emit, gate(emit, x))),
    "gate first": lambda emit, x: times(emit, over(emit, gate(emit, x)), x),
    "divided last": lambda emit, x: over(emit, times(emit, x, gate(emit, x))),
    "input divided": lambda emit, x: times(emit, over(emit, x), gate(emit, x)),
    "multiplied": lambda emit, x: times(emit, times(emit, gate(emit, x), const(1 / 6)), x),
    "hard sigmoid": lambda emit, x: times(emit, x, sigmoid_gate(emit, x)),
    "hard sigmoid first": lambda emit, x: times(emit, sigmoid_gate(emit, x), x),
    "minimum of relu": lambda emit, x: times(
        emit,
        x,
        over(
            emit,
            emit(
                relax.op.minimum(
                    emit(relax.op.nn.relu(emit(relax.op.add(x, const(3.0))))), const(6.0)
                )
            ),
        ),
    ),
}


@pytest.mark.parametrize("build", HARDSWISHES.values(), ids=HARDSWISHES)
def test_hardswish(build):
    expected = activation(lambda _, x: hardswish(x))
    tvm.ir.assert_structural_equal(simplify(activation(build)), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_hardswish_in_16_bits(dtype):
    def build(emit, x):
        divided = emit(relax.op.divide(gate(emit, x, dtype=dtype), const(6.0, dtype)))
        return relax.op.multiply(x, divided)

    expected = activation(lambda _, x: hardswish(x), dtype)
    tvm.ir.assert_structural_equal(simplify(activation(build, dtype)), expected)


def erf_gate(emit, x, slope=0.5**0.5, offset=1.0):
    erf = emit(relax.op.erf(emit(relax.op.multiply(x, const(slope)))))
    return emit(relax.op.add(erf, const(offset)))


def divided_gate(emit, x):
    erf = emit(relax.op.erf(emit(relax.op.divide(x, const(2**0.5)))))
    return emit(relax.op.add(const(1.0), erf))


GELUS = {
    "exporter": lambda emit, x: times(emit, times(emit, x, divided_gate(emit, x)), const(0.5)),
    "half first": lambda emit, x: times(emit, times(emit, const(0.5), x), erf_gate(emit, x)),
    "halved gate": lambda emit, x: times(emit, over(emit, erf_gate(emit, x), 2.0), x),
}


@pytest.mark.parametrize("build", GELUS.values(), ids=GELUS)
def test_gelu(build):
    expected = activation(lambda _, x: relax.op.nn.gelu(x))
    tvm.ir.assert_structural_equal(simplify(activation(build)), expected)


@pytest.mark.parametrize("is_first", [False, True])
def test_silu(is_first):
    def build(emit, x):
        factors = (emit(relax.op.sigmoid(x)), x)
        return relax.op.multiply(*(factors if is_first else factors[::-1]))

    expected = activation(lambda _, x: relax.op.nn.silu(x))
    tvm.ir.assert_structural_equal(simplify(activation(build)), expected)


@pytest.mark.parametrize(
    "build",
    [
        lambda emit, x: times(emit, x, over(emit, gate(emit, x, offset=2.0))),
        lambda emit, x: times(emit, x, over(emit, gate(emit, x, high=5))),
        lambda emit, x: times(emit, x, over(emit, gate(emit, x), 5.0)),
        lambda emit, x: times(emit, x, gate(emit, x)),
        lambda emit, x: times(emit, x, sigmoid_gate(emit, x, 0.2)),
        lambda emit, x: times(emit, x, sigmoid_gate(emit, x, 0.16667)),
        lambda emit, x: times(emit, emit(relax.op.tanh(x)), over(emit, gate(emit, x))),
        lambda emit, x: times(emit, emit(relax.op.tanh(x)), emit(relax.op.sigmoid(x))),
        lambda emit, x: times(emit, times(emit, x, const(2.0)), emit(relax.op.sigmoid(x))),
        lambda emit, x: times(emit, x, x),
        lambda emit, x: times(emit, x, erf_gate(emit, x)),
        lambda emit, x: over(emit, times(emit, x, erf_gate(emit, x, slope=0.7)), 2.0),
        lambda emit, x: over(emit, times(emit, x, erf_gate(emit, x, offset=2.0)), 2.0),
        lambda emit, x: over(emit, times(emit, x, erf_gate(emit, emit(relax.op.tanh(x)))), 2.0),
    ],
)
def test_other_products_stay(build):
    check_unchanged(activation(build))


def test_gate_with_another_reader_stays():
    @I.ir_module
    class Shared:
        @R.function
        def main(x: R.Tensor((2, 4), "float32")):
            with R.dataflow():
                lv = R.sigmoid(x)
                lv1 = R.multiply(x, lv)
                gv = R.add(lv, lv1)
                R.output(gv)
            return gv

    check_unchanged(Shared)


def test_behind_a_convolution_with_its_bias():
    weight, bias = dyadic(4, 3, 1, 1), dyadic(4, 1, 1)

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 3, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(weight))
                lv1 = R.add(lv, const(bias))
                lv2 = R.add(lv1, const(3.0))
                lv3 = R.clip(lv2, 0, 6)
                lv4 = R.multiply(lv1, lv3)
                gv = R.divide(lv4, const(6.0))
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 3, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(weight))
                lv1 = R.add(lv, const(bias.reshape(1, 4, 1, 1)))
                gv = R.tvm_fusion.hardswish(lv1)
                R.output(gv)
            return gv

    tvm.ir.assert_structural_equal(simplify(Before), Expected)
