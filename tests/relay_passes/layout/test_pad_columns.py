# SPDX-License-Identifier: Apache-2.0
"""Pass ``PadColumns``: matrices of whole vectors, the same numbers, and what stays."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.target import Target

from relay_passes import PadColumns
from relay_passes.layout.pad_columns import padded_columns
from tvm_fusion.compiler import pipeline

AVX2 = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
generator = np.random.default_rng(0)
W = generator.standard_normal((256, 1001)).astype("float32")


def padded(mod: tvm.IRModule) -> tvm.IRModule:
    return PadColumns(AVX2)(mod)


def product(
    rows: int = 24, depth: int = 256, columns: int = 1001, dtype: str = "float32"
) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType((rows, depth), dtype))
    matrix = relax.const(np.ones((depth, columns), dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.matmul(x, matrix))
        builder.emit_func_output(result)
    return builder.get()


def test_columns_of_zeros_are_added_and_cut_off():
    wide = np.pad(W, [(0, 0), (0, 7)])

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 24, 256), "float32")):
            with R.dataflow():
                gv = R.matmul(x, relax.const(W))
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 24, 256), "float32")):
            with R.dataflow():
                lv = R.matmul(x, relax.const(wide))
                gv = R.strided_slice(lv, [2], [0], [1001])
                R.output(gv)
            return gv

    after = padded(Before)
    tvm.ir.assert_structural_equal(after, Expected)
    tvm.ir.assert_structural_equal(padded(after), after)


def test_numbers():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((29, 256), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(relax.op.matmul(x, relax.const(W)))
            result = builder.emit_output(relax.op.add(value, relax.const(W[0])))
        builder.emit_func_output(result)
    with AVX2:
        lowered = pipeline.run_phases(
            builder.get(), AVX2, pipeline.phases(AVX2, pipeline.Options())
        )
    machine = relax.VirtualMachine(pipeline.build(lowered, AVX2), tvm.cpu())
    values = generator.standard_normal((29, 256)).astype("float32")
    found = machine["main"](tvm.runtime.tensor(values)).numpy()
    exact = values.astype("float64") @ W + W[0]
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "mod",
    [product(rows=23), product(depth=255), product(columns=1008), product(columns=65)],
    ids=["few rows", "short sums", "whole vectors", "too narrow"],
)
def test_what_stays(mod: tvm.IRModule):
    tvm.ir.assert_structural_equal(padded(mod), mod)


@pytest.mark.parametrize("other", ["few rows", "not a product"])
def test_a_matrix_with_another_reader_stays(other: str):
    """It would be kept twice."""
    matrix = relax.const(W)
    x, row = (relax.Var(n, relax.TensorType((m, 256), "float32")) for n, m in (("x", 24), ("r", 1)))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, row]):
        with builder.dataflow():
            first = builder.emit(relax.op.matmul(x, matrix))
            reader = relax.op.matmul(row, matrix) if other == "few rows" else relax.op.abs(matrix)
            result = builder.emit_output(relax.Tuple([first, builder.emit(reader)]))
        builder.emit_func_output(result)
    tvm.ir.assert_structural_equal(padded(builder.get()), builder.get())


def test_products_of_open_sizes_stay():
    n, k = tirx.Var("n", "int64"), tirx.Var("k", "int64")
    x, y = (relax.Var(name, relax.TensorType((n, k), "float32")) for name in "xy")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        with builder.dataflow():
            turned = builder.emit(relax.op.permute_dims(y))
            result = builder.emit_output(relax.op.matmul(x, turned))
        builder.emit_func_output(result)
    tvm.ir.assert_structural_equal(padded(builder.get()), builder.get())
    z = relax.Var("z", relax.TensorType((k, 30), "float32"))
    w = relax.Var("w", relax.TensorType((32, k), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [w, z]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.matmul(w, z))
        builder.emit_func_output(result)
    tvm.ir.assert_structural_equal(padded(builder.get()), builder.get())


def test_functions_of_other_backends_stay():
    mod = product()
    [(var, func)] = mod.functions_items()
    mod.update_func(var, func.with_attr("Codegen", "other"))
    tvm.ir.assert_structural_equal(padded(mod), mod)


def test_integers_stay():
    mod = product(dtype="int32")
    tvm.ir.assert_structural_equal(padded(mod), mod)


@pytest.mark.parametrize(
    ("columns", "lanes", "size"),
    [(50257, 8, 50304), (50257, 16, 50304), (1001, 8, 1008), (1000, 8, 1000), (9, 8, 9)],
)
def test_sizes(columns: int, lanes: int, size: int):
    assert padded_columns(columns, lanes) == size
