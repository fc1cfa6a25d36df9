# SPDX-License-Identifier: Apache-2.0
"""Passes ``MultiplyNarrow`` and ``NarrowWeights``: kernels, what stays, and errors of rounding."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.target import Target

from relay_passes import MultiplyNarrow, NarrowWeights, SimplifyInference
from relay_passes.core.expressions import op_name
from relay_passes.op.widen_weight import take_widened, widen_weight, widened
from schedules.errors import OpError

AVX2 = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
PLAIN = Target({"kind": "llvm", "mcpu": "x86-64", "num-cores": 2})
generator = np.random.default_rng(0)


def widening(
    depth: int = 64, columns: int = 64, block: int = 32, axis: int = 0, zero: bool = False, **attrs
) -> relax.Call:
    integers = generator.integers(-8, 8, (depth, columns)).astype("int8")
    groups = list(integers.shape)
    groups[axis] = -(-groups[axis] // block)
    scales = generator.uniform(0.1, 0.2, groups).astype("float32")
    zeros = [generator.integers(-8, 8, groups).astype("int8")] if zero else []
    constants = (relax.const(array) for array in (integers, scales, *zeros))
    return widen_weight(*constants, block=block, axis=axis, **{"bits": 4, **attrs})


def product(weight: relax.Expr, depth: int = 64, dtype: str = "float32", turn: bool = False):
    """A module with the product of some rows and a weight."""
    x = relax.Var("x", relax.TensorType((2, 3, depth), dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            matrix = builder.emit(weight) if isinstance(weight, relax.Call) else weight
            if turn:
                matrix = builder.emit(relax.op.permute_dims(matrix))
            result = builder.emit_output(relax.op.matmul(x, matrix))
        builder.emit_func_output(result)
    return builder.get()


def kernels(mod: tvm.IRModule, target: Target = AVX2) -> set[str]:
    """Names of the kernels after the pass."""
    found = MultiplyNarrow(target)(mod)
    return {var.name_hint for var in found.get_global_vars()} - {"main"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("zero", [False, True])
def test_products_become_kernels(zero: bool) -> None:
    assert kernels(product(widening(zero=zero))) == {"narrow_matmul"}
    assert kernels(product(widening(bits=8, block=64, zero=zero))) == {"narrow_matmul"}
    assert kernels(product(widening(axis=1, zero=zero), turn=True)) == {"narrow_matmul"}
    assert kernels(product(widening(70, zero=zero), 70)) == {"narrow_matmul"}  # padded
    assert kernels(product(widening(out_dtype="float16"), dtype="float16")) == {"narrow_matmul"}


def test_rows_in_bytes_are_shared() -> None:
    mod = product(widening(by_bytes=True))
    assert kernels(mod) == {"byte_rows", "narrow_dot"}
    assert kernels(mod, PLAIN) == {"narrow_matmul"}  # multiplies no bytes
    x = relax.Var("x", relax.TensorType((1, 64), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            sides = [
                builder.emit(relax.op.matmul(x, builder.emit(widening(by_bytes=True))))
                for _ in range(2)
            ]
            result = builder.emit_output(relax.op.add(*sides))
        builder.emit_func_output(result)
    text = MultiplyNarrow(AVX2)(builder.get())["main"].script()
    assert text.count("byte_rows") == 1 and text.count("narrow_dot") == 2


@pytest.mark.parametrize(
    "mod",
    [
        product(widening(axis=1)),  # blocks lie along the columns
        product(widening(16, 64), 16),  # small
        product(widening(block=4)),
        product(widening(1024, 4), 1024),  # narrower than a vector
        product(widening(), turn=True),
    ],
)
def test_other_matrices_become_floats(mod: tvm.IRModule) -> None:
    left = MultiplyNarrow(AVX2)(mod)
    tvm.ir.assert_structural_equal(left, mod)
    with AVX2:
        folded = SimplifyInference()(left)
    assert "widen_weight" not in folded.script()
    assert "relax.matmul" in str(folded) or "R.matmul" in folded.script()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("mode", ["wrap", "clip"])
def test_rows_that_are_chosen_are_widened_alone(bits: int, mode: str) -> None:
    matrix = widening(64, 65, zero=True, bits=bits)
    rows = relax.Var("rows", relax.TensorType((2, 6), "int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [rows]):
        with builder.dataflow():
            table = builder.emit(matrix)
            result = builder.emit_output(relax.op.take(table, rows, axis=0, mode=mode))
        builder.emit_func_output(result)
    found = MultiplyNarrow(AVX2)(builder.get())
    text = found.script()
    assert "take_widened" in text and "widen_weight" not in text.replace("take_widened", "")
    machine = relax.VirtualMachine(tvm.compile(found, "llvm"), tvm.cpu())
    numbers = np.array([[0, 1, 63, 64, 200, -1], [-64, -65, 5, 5, 31, 32]])
    taken = machine["main"](tvm.runtime.tensor(numbers)).numpy()
    integers, scales, zeros = (argument.value.numpy() for argument in matrix.args)
    inside = numbers % 64 if mode == "wrap" else numbers.clip(0, 63)
    np.testing.assert_array_equal(taken, widened(integers, scales, zeros, 32, 0)[inside])


def lookup_and_product(
    matrix: relax.Expr, mode: str = "wrap", factor: bool = False
) -> tvm.IRModule:
    """Rows of a table, times something else if asked, and the product with its transposed."""
    count, columns = map(int, matrix.ty.shape)
    rows = relax.Var("rows", relax.TensorType((2, 3), "int64"))
    x = relax.Var("x", relax.TensorType((1, columns), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [rows, x]):
        with builder.dataflow():
            table = builder.emit(matrix) if isinstance(matrix, relax.Call) else matrix
            taken = builder.emit(relax.op.take(table, rows, axis=0, mode=mode))
            if factor:
                moved = builder.emit(relax.op.expand_dims(taken, [0]))
                taken = builder.emit(relax.op.multiply(moved, x))
            turned = table
            if isinstance(matrix, relax.Call):
                turned = builder.emit(relax.op.permute_dims(table))
            else:
                turned = relax.const(np.ascontiguousarray(matrix.value.numpy().T))
            result = builder.emit(relax.op.matmul(x, turned))
            both = builder.emit_output(relax.Tuple([taken, result]))
        builder.emit_func_output(both)
    return builder.get()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("mode", ["wrap", "clip"])
@pytest.mark.parametrize("columns", [70, 32], ids=["short block", "one block"])
def test_lookups_read_the_matrix_of_a_product(
    bits: int, zero: bool, mode: str, columns: int
) -> None:
    """The last tile overlaps the one before, and the last block of a row is short."""
    matrix = widening(131, columns, axis=1, bits=bits, zero=zero, by_bytes=bits == 4)
    found = MultiplyNarrow(AVX2)(lookup_and_product(relax.BlockBuilder().normalize(matrix), mode))
    text = found.script()
    assert "take_packed" in text and "take_widened" not in text and "widen_weight" not in text
    numbers = np.array([[0, 130, 127], [128, -1, 131]])
    x = generator.standard_normal((1, columns)).astype("float32")
    machine = relax.VirtualMachine(tvm.compile(found, AVX2), tvm.cpu())
    taken, result = machine["main"](tvm.runtime.tensor(numbers), tvm.runtime.tensor(x))
    arrays = [argument.value.numpy() for argument in matrix.args]
    wide = widened(*arrays, *[None] * (3 - len(arrays)), 32, 1)
    inside = numbers % 131 if mode == "wrap" else numbers.clip(0, 130)
    np.testing.assert_array_equal(taken.numpy(), wide[inside])
    wanted = x.astype("float64") @ wide.T.astype("float64")
    np.testing.assert_allclose(result.numpy(), wanted, atol=2e-2 * np.abs(wanted).max())


def test_other_tables_than_the_matrix_of_a_product_stay_apart() -> None:
    """One number, or one scale, that differs is another matrix."""
    for place in (0, 1):
        matrix = widening(64, 64, axis=1)
        arrays = [argument.value.numpy().copy() for argument in matrix.args]
        arrays[place][3, 1] += 1
        given = {"block": 32, "axis": 1, "bits": 4}
        other = widen_weight(*map(relax.const, arrays), **given)
        rows = relax.Var("rows", relax.TensorType((2,), "int64"))
        x = relax.Var("x", relax.TensorType((1, 64), "float32"))
        builder = relax.BlockBuilder()
        with builder.function("main", [rows, x]):
            with builder.dataflow():
                taken = builder.emit(relax.op.take(builder.emit(matrix), rows, 0, "wrap"))
                turned = builder.emit(relax.op.permute_dims(builder.emit(other)))
                product = builder.emit(relax.op.matmul(x, turned))
                both = builder.emit_output(relax.Tuple([taken, product]))
            builder.emit_func_output(both)
        text = MultiplyNarrow(AVX2)(builder.get()).script()
        assert "take_widened" in text and "narrow_matmul" in text and "take_packed" not in text


def test_chosen_rows_must_fit() -> None:
    rows, scales = relax.const(np.zeros(3, "int64")), relax.const(np.ones((64, 1), "float32"))
    given = {"columns": 9, "block": 9, "axis": 1}
    for stored, kind, mode, message in (
        (9, "float32", "clip", "expected int8 or uint8, float32"),
        (4, "uint8", "clip", "rows of 4 elements for 9 columns"),
        (9, "int8", "fast", "mode 'fast'; expected .* clip or wrap"),
    ):
        integers = relax.const(np.zeros((64, stored), kind))
        with pytest.raises(OpError, match=message):
            relax.BlockBuilder().normalize(take_widened(rows, integers, scales, mode=mode, **given))


def test_quantised_rows_are_left() -> None:
    """But for one row, where bytes are multiplied in 16 bits, and would be stored so."""
    vnni = Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 2})
    for rows, target, wanted in ((4, AVX2, set()), (1, vnni, set()), (1, AVX2, {"narrow_matmul"})):
        x = relax.Var("x", relax.TensorType((rows, 64), "uint8"))
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                scale, zero = relax.const(np.float32(0.1)), relax.const(np.uint8(3))
                floats = builder.emit(relax.op.dequantize(x, scale, zero))
                result = builder.emit_output(relax.op.matmul(floats, builder.emit(widening())))
            builder.emit_func_output(result)
        assert kernels(builder.get(), target) == wanted


def test_operands_must_fit() -> None:
    builder = relax.BlockBuilder()
    integers, scales = relax.const(np.zeros((64, 8), "int8")), np.zeros((2, 8), "float32")
    for given, message in (
        (widen_weight(integers, relax.const(scales), block=16), "expected \\[4, 8\\]"),
        (widen_weight(integers, integers, block=1), "expected int8, float32"),
    ):
        with pytest.raises(OpError, match=message):
            builder.normalize(given)


def narrowed(mod: tvm.IRModule) -> list[relax.Call]:
    """The calls of ``widen_weight``, in order."""
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    return [value for value in values if op_name(value) == "relax.tvm_fusion.widen_weight"]


@pytest.mark.parametrize(("bits", "most"), [(8, 1 / 254), (4, 1 / 8)])
@pytest.mark.parametrize("depth", [50, 64, 300])
def test_rounding(bits: int, most: float, depth: int) -> None:
    """A number differs by a share of the largest of its block, and zeros stay zeros."""
    matrix = generator.standard_normal((depth, 128)).astype("float32")
    matrix[:, 3] = 0
    found = NarrowWeights(bits)(product(relax.const(matrix), depth))
    (call,) = narrowed(found)
    integers, scales = (argument.value.numpy() for argument in call.args)
    block = int(call.attrs["block"])
    wide = widened(integers, scales, None, block, 0)
    groups = np.arange(depth) // block
    largest = np.stack([np.abs(matrix[groups == group]).max(0) for group in groups])
    assert (np.abs(wide - matrix) <= (1 + 1e-4) * most * largest).all()
    assert not wide[:, 3].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_tables_are_rounded_as_their_product(bits: int) -> None:
    """Rows of a table have the scales of the columns of its transposed."""
    table = relax.const(generator.standard_normal((300, 70)).astype("float32"))
    found = NarrowWeights(bits)(lookup_and_product(table))
    calls = narrowed(found)
    assert [int(call.attrs["axis"]) for call in calls] == [1, 0]
    for one, other in zip(*(call.args for call in calls), strict=True):
        np.testing.assert_array_equal(one.value.numpy(), other.value.numpy().T)
    text = MultiplyNarrow(AVX2)(found).script()
    assert "take_packed" in text and "widen_weight" not in text


def test_rows_that_are_factors_stay_floats() -> None:
    """Sines of positions are such rows; rows that a norm divides and tables of bfloat16 are not."""
    table = relax.const(generator.standard_normal((300, 70)).astype("float32"))
    (product_alone,) = narrowed(NarrowWeights(4)(lookup_and_product(table, factor=True)))
    assert int(product_alone.attrs["axis"]) == 0
    assert "R.take(metadata" in NarrowWeights(16)(lookup_and_product(table)).script()
    rows = relax.Var("rows", relax.TensorType((2, 3), "int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [rows]):
        with builder.dataflow():
            taken = builder.emit(relax.op.take(table, rows, 0, "wrap"))
            square = builder.emit(relax.op.multiply(taken, taken))
            root = builder.emit(relax.op.sqrt(builder.emit(relax.op.mean(square, -1, True))))
            normed = builder.emit(relax.op.multiply(taken, root))
            result = builder.emit_output(relax.op.multiply(normed, relax.const(np.float32(3))))
        builder.emit_func_output(result)
    assert len(narrowed(NarrowWeights(4)(builder.get()))) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_stay(value: float) -> None:
    matrix = np.ones((64, 64), "float32")
    matrix[3, 4] = value
    for given in (matrix, np.ones((8, 8), "float32")):
        mod = product(relax.const(given), len(given))
        tvm.ir.assert_structural_equal(NarrowWeights(4)(mod), mod)
