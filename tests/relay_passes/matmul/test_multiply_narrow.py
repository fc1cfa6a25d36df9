# SPDX-License-Identifier: Apache-2.0
"""Passes ``MultiplyNarrow`` and ``NarrowWeights``: kernels, what stays, and errors of rounding."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.target import Target

from relay_passes import MultiplyNarrow, NarrowWeights, SimplifyInference
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


@pytest.mark.parametrize(("bits", "most"), [(8, 1 / 254), (4, 1 / 8)])
@pytest.mark.parametrize("depth", [50, 64, 300])
def test_rounding(bits: int, most: float, depth: int) -> None:
    """A number differs by a share of the largest of its block, and zeros stay zeros."""
    matrix = generator.standard_normal((depth, 128)).astype("float32")
    matrix[:, 3] = 0
    found = NarrowWeights(bits)(product(relax.const(matrix), depth))
    seen: list[relax.Call] = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and expr.op.name == "relax.tvm_fusion.widen_weight":
            seen.append(expr)

    relax.analysis.post_order_visit(found["main"], visit)
    (call,) = seen
    integers, scales = (argument.value.numpy() for argument in call.args)
    block = int(call.attrs["block"])
    wide = widened(integers, scales, None, block, 0)
    groups = np.arange(depth) // block
    largest = np.stack([np.abs(matrix[groups == group]).max(0) for group in groups])
    assert (np.abs(wide - matrix) <= (1 + 1e-6) * most * largest).all()
    assert not wide[:, 3].any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_stay(value: float) -> None:
    matrix = np.ones((64, 64), "float32")
    matrix[3, 4] = value
    for given in (matrix, np.ones((8, 8), "float32")):
        mod = product(relax.const(given), len(given))
        tvm.ir.assert_structural_equal(NarrowWeights(4)(mod), mod)
