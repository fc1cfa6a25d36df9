# SPDX-License-Identifier: Apache-2.0
"""Rule ``fold_constant``: its table against TVM's kernels, and TVM's pass for the rest."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from simplify_checks import calls, check, check_unchanged, const, dyadic, simplify
from tvm import relax, topi
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes.op.elementwise import checked_indices
from relay_passes.op.widen_weight import widen_weight
from relay_passes.simplify.fold_constant import FOLDED
from schedules.errors import InvalidModelError

op = relax.op
A, B = dyadic(2, 3, 4), dyadic(3, 1, seed=1) + 4
PLACES = np.array([[4, -6, 0], [-5, 5, -1]])

CASES = {
    "relax.add": lambda: op.add(const(A), const(B)),
    "relax.subtract": lambda: op.subtract(const(A), const(B)),
    "relax.multiply": lambda: op.multiply(const(A), const(B)),
    "relax.divide": lambda: op.divide(const(A), const(B)),
    "relax.maximum": lambda: op.maximum(const(A), const(B - 4)),
    "relax.minimum": lambda: op.minimum(const(A), const(B - 4)),
    "relax.negative": lambda: op.negative(const(A)),
    "relax.sqrt": lambda: op.sqrt(const(B)),
    "relax.rsqrt": lambda: op.rsqrt(const(B)),
    "relax.isnan": lambda: op.isnan(const(np.where(A > 0, np.nan, A))),
    "relax.where": lambda: op.where(const(A > 0, "bool"), const(A), const(B)),
    "relax.dequantize": lambda: op.dequantize(
        const(PLACES, "int8"), const(B[:, 0]), const([1, -2, 3], "int8"), axis=1
    ),
    "relax.quantize": lambda: op.quantize(
        const(A * 300), const(B[:2, 0]), const([5, 130], "uint8"), axis=0, out_dtype="uint8"
    ),
    "relax.astype": lambda: op.astype(const(A), "int32"),
    "relax.reshape": lambda: op.reshape(const(A), (4, 6)),
    "relax.squeeze": lambda: op.squeeze(const(B), [1]),
    "relax.expand_dims": lambda: op.expand_dims(const(A), [0, 2]),
    "relax.broadcast_to": lambda: op.broadcast_to(const(B), (2, 3, 4)),
    "relax.permute_dims": lambda: op.permute_dims(const(A), (2, 0, 1)),
    "relax.concat": lambda: op.concat((const(A), const(A + 1)), axis=1),
    "relax.less": lambda: op.less(const(A), const(B - 4)),
    "relax.equal": lambda: op.equal(const(A), const(np.round(A))),
    "relax.tvm_fusion.widen_weight": lambda: widen_weight(
        const(PLACES, "int8"), const(B[:1, 0].reshape(1, 1).repeat(3, 1)), block=2
    ),
    "relax.abs": lambda: op.abs(const(A)),
    "relax.ceil": lambda: op.ceil(const(A)),
    "relax.cos": lambda: op.cos(const(A)),
    "relax.exp": lambda: op.exp(const(A)),
    "relax.flip": lambda: op.flip(const(A), 1),
    "relax.floor": lambda: op.floor(const(A)),
    "relax.greater": lambda: op.greater(const(A), const(B - 4)),
    "relax.greater_equal": lambda: op.greater_equal(const(A), const(np.round(A))),
    "relax.less_equal": lambda: op.less_equal(const(A), const(np.round(A))),
    "relax.log": lambda: op.log(const(B)),
    "relax.logical_and": lambda: op.logical_and(const(A > 0, "bool"), const(B > 4, "bool")),
    "relax.logical_not": lambda: op.logical_not(const(A > 0, "bool")),
    "relax.logical_or": lambda: op.logical_or(const(A > 0, "bool"), const(B > 4, "bool")),
    "relax.max": lambda: op.max(const(A), [0, -1]),
    "relax.mean": lambda: op.mean(const(A), [1], keepdims=True),
    "relax.min": lambda: op.min(const(A)),
    "relax.not_equal": lambda: op.not_equal(const(A), const(np.round(A))),
    "relax.sin": lambda: op.sin(const(A)),
    "relax.stack": lambda: op.stack([const(A), const(A + 1)], axis=1),
    "relax.strided_slice": lambda: op.strided_slice(const(A), [1, -1], [-2, 3], [9, 0], [1, -2]),
    "relax.sum": lambda: op.sum(const(PLACES, "int64"), [0]),
    "relax.take": lambda: op.take(const(A), const(PLACES[1], "int64"), 2, mode="clip"),
    "relax.tanh": lambda: op.tanh(const(A)),
    "relax.tile": lambda: op.tile(const(A), (2, 1, 1, 3)),
    "relax.tril": lambda: op.tril(const(A), -1),
    "relax.triu": lambda: op.triu(const(A), 1),
    "relax.tvm_fusion.checked_indices": lambda: checked_indices(
        const(PLACES, "int64"), [5, 6, 7], "outside"
    ),
}


def constant_function(make):
    """``main(x)`` returning (``make()``, x)."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(make())
            result = builder.emit_output(relax.Tuple([value, x]))
        builder.emit_func_output(result)
    return builder.get()


def folded(mod):
    """The constant that ``main`` returns first."""
    (binding,) = mod["main"].body.blocks[0].bindings
    return binding.value.fields[0].value.numpy()


def test_every_op_of_the_table_has_a_case():
    assert set(CASES) == set(FOLDED)


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_tvm(name):
    mod = constant_function(CASES[name])
    expected = folded(relax.transform.CanonicalizeBindings()(relax.transform.FoldConstant()(mod)))
    actual = folded(simplify(mod))
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: op.tan(const(A)), np.tan(A)),
        (lambda: op.take(const(A[0, 0]), const(5, "int64"), 0, mode="wrap"), A[0, 0, 1]),
        (lambda: op.zeros((2, 3), "float32"), np.zeros((2, 3))),
        (lambda: op.divide(const(7, "int32"), const(2, "int32")), 3),
    ],
)
def test_tvm_computes_the_rest(make, expected):
    np.testing.assert_allclose(folded(simplify(constant_function(make))), expected, rtol=1e-6)


def test_tvm_computes_calls_of_prim_funcs():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit_te(topi.cos, const(A))
            result = builder.emit_output(op.tanh(builder.emit(op.subtract(x, value))))
        builder.emit_func_output(result)
    simplified = simplify(builder.get())
    assert calls(simplified) == ["subtract", "tanh"]
    assert len(simplified.functions) == 1


def test_arithmetic_on_known_shapes_goes():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                lv = R.shape_of(x)
                lv1 = R.shape_to_tensor(lv)
                lv2 = R.multiply(lv1, const([3, 1], "int64"))
                gv = (lv2, x)
                R.output(gv)
            return gv

    assert folded(simplify(Before)).tolist() == [6, 3]


def test_broadcasts_for_elementwise_ops_stay_small():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((64, 1), "float32"), y: R.Tensor((64, 64), "float32")):
            with R.dataflow():
                lv = R.broadcast_to(const(2.0), (64, 64))
                lv1 = R.divide(x, lv)
                lv2 = R.divide(y, lv)
                gv = (lv1, lv2)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((64, 1), "float32"), y: R.Tensor((64, 64), "float32")):
            with R.dataflow():
                lv = R.broadcast_to(const(2.0), (64, 64))
                lv1 = R.divide(x, lv)
                lv2 = R.divide(y, const(2.0))
                gv = (lv1, lv2)
                R.output(gv)
            return gv

    check(Before, Expected)


def test_what_depends_on_inputs_stays():
    builder = relax.BlockBuilder()
    extent = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((extent, 3), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            filled = builder.emit(op.broadcast_to(const(2.0), (extent, 3)))
            result = builder.emit_output(op.concat((x, filled), axis=0))
        builder.emit_func_output(result)
    check_unchanged(builder.get())


def checked(places, extent, message):
    """The constant that checked indices become."""
    places = const(np.array(places), "int64")
    return folded(
        simplify(constant_function(lambda: checked_indices(places, [extent], message)))
    ).tolist()


@pytest.mark.parametrize("place", [7, -8])
def test_constant_indices_out_of_bounds(place):
    assert checked([3, place], 8, "outside") == [3, place % 8]
    with pytest.raises(InvalidModelError, match="an index of 'rows' is outside"):
        checked([3, place], 7, "an index of 'rows' is outside")


def test_constant_indices_that_no_error_is_for_become_the_nearest():
    assert checked([9, -9], 4, "") == [3, 0]


def test_shapes_are_constants(monkeypatch):
    """TVM's importer asks for the shape of a tensor of known sizes before each scatter."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            shape = builder.emit(op.shape_to_tensor(builder.emit(op.shape_of(x))))
            size = builder.emit(op.strided_slice(shape, [0], [1], [2]))
            places = builder.emit(op.where(const([True], "bool"), size, const([7], "int64")))
            result = builder.emit_output(relax.Tuple([places, x]))
        builder.emit_func_output(result)
    monkeypatch.setattr(relax.transform, "FoldConstant", None)  # not even asked
    np.testing.assert_array_equal(folded(simplify(builder.get())), [3])


def test_open_shapes_stay():
    builder = relax.BlockBuilder()
    rows = tvm.tirx.Var("rows", "int64")
    x = relax.Var("x", relax.TensorType((rows, 3), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(
                op.shape_to_tensor(builder.emit(op.shape_of(builder.emit(op.nn.relu(x)))))
            )
        builder.emit_func_output(result)
    check_unchanged(builder.get())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_16_bits_are_rounded_once(dtype):
    """4096 + 1 is 4096 in either type."""
    values = np.array([4096.0] + [1.0] * 64)
    mod = constant_function(lambda: op.sum(const(values, dtype)))
    np.testing.assert_array_equal(folded(simplify(mod)).astype("float64"), 4160)
