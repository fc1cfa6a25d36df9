# SPDX-License-Identifier: Apache-2.0
"""Products with matrices of 8 and 4 bits: numbers, and machine code for CPUs not at hand."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  gives numpy the dtype "bfloat16"
import numpy as np
import pytest
import tvm
import tvm_ffi
from cpu.conv_cases import TARGET, compile_function
from cpu.machine_cases import AARCH64, CPUS, info_of, loops_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.matmul.narrow_dot import byte_rows, narrow_dot
from schedules.cpu.loops.matmul.narrow_matmul import narrow_matmul
from schedules.cpu.loops.matmul.narrow_matrix import (
    OFFSET,
    NarrowMatrix,
    pack_matrix,
    pack_scales,
    tile_columns,
)
from schedules.errors import OpError

CPU = CPUInfo.from_target(TARGET)
Arrays = list[np.ndarray]


def matrix_of(
    depth: int,
    columns: int,
    bits: int,
    block: int,
    zeros: str = "",
    in_bytes: bool = False,
    cpu: CPUInfo = CPU,
) -> NarrowMatrix:
    tile = tile_columns(columns, cpu)
    return NarrowMatrix(depth, columns, f"int{bits}", block, tile, bool(zeros), in_bytes)


def numbers(matrix: NarrowMatrix, zeros: str, seed: int) -> tuple[Arrays, np.ndarray]:
    """Constants of the kernel, and the matrix in float64."""
    random = np.random.default_rng(seed)
    limit = 1 << (matrix.bits - 1)
    integers = random.integers(-limit, limit, (matrix.depth, matrix.columns)).astype("int8")
    scales = random.uniform(-0.02, 0.02, (matrix.groups, matrix.columns)).astype("float32")
    points = random.integers(-limit, limit, scales.shape).astype(zeros or "int8")
    wide = integers.astype("float64")
    constants = [pack_matrix(matrix, integers), pack_scales(matrix, scales)]
    if zeros:
        wide -= np.repeat(points, matrix.block, 0)
        constants.append(pack_scales(matrix, points))
    return constants, wide * np.repeat(scales.astype("float64"), matrix.block, 0)


def compiled(func: tirx.PrimFunc) -> tvm.runtime.Executable:
    return compile_function(func.with_attr("global_symbol", "main"))


def call(func: tirx.PrimFunc, given: Arrays, *results: tuple[tuple[int, ...], str]) -> Arrays:
    """Call a kernel with poisoned results."""
    poisoned = [
        np.full(shape, np.nan if kind == "float32" else 99, kind) for shape, kind in results
    ]
    tensors = [tvm.runtime.tensor(array) for array in (*given, *poisoned)]
    compiled(func)["main"](*tensors)
    return [tensor.numpy() for tensor in tensors[len(given) :]]


@settings(deadline=None, max_examples=8)
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    groups=st.integers(1, 5),
    block=st.sampled_from([8, 16, 24, 32, 128]),
    columns=st.integers(CPU.lanes("float32"), 80),
    bits=st.sampled_from([4, 8]),
    zeros=st.sampled_from(["", "int8", "float32"]),
    seed=st.integers(0, 1000),
)
def test_numbers(
    rows: list[int], groups: int, block: int, columns: int, bits: int, zeros: str, seed: int
) -> None:
    matrix = matrix_of(groups * block, columns, bits, block, zeros)
    constants, wide = numbers(matrix, zeros, seed)
    x = np.random.default_rng(seed).standard_normal((*rows, matrix.depth)).astype("float32")
    func = narrow_matmul(rows, matrix, zeros, CPU)
    (found,) = call(func, [x, *constants], ((*rows, columns), "float32"))
    bound = np.abs(x).astype("float64") @ np.abs(wide) + 1e-30
    assert (np.abs(found - x @ wide) <= 2e-5 * bound).all()


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_open_rows_and_values_that_are_not_finite(bits: int) -> None:
    matrix = matrix_of(64, 40, bits, 32, "int8")
    constants, wide = numbers(matrix, "int8", 3)
    library = compiled(narrow_matmul([tirx.Var("n", "int64")], matrix, "int8", CPU))
    for rows in (1, 2, 3, 6, 11, 13):
        x = np.random.default_rng(rows).standard_normal((rows, 64)).astype("float32")
        x[0, 5], x[-1, 7] = np.inf, np.nan
        result = tvm.runtime.tensor(np.zeros((rows, 40), "float32"))
        library["main"](*map(tvm.runtime.tensor, (x, *constants)), result)
        with np.errstate(invalid="ignore"):
            wanted = x.astype("float64") @ wide
        np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 33), (2, 64), (7, 40)])
def test_floats_of_16_bits(dtype: str, rows: int, columns: int) -> None:
    matrix = NarrowMatrix(96, columns, dtype, 96, tile_columns(columns, CPU), False)
    random = np.random.default_rng(columns)
    weight = random.standard_normal((96, columns)).astype(np.dtype(dtype))
    weight[3, 5], weight[4, 6] = np.inf, 0
    x = random.standard_normal((rows, 96)).astype("float32")
    func = narrow_matmul([rows], matrix, "", CPU)
    given = [x, pack_matrix(matrix, weight.view(np.uint16))]
    (found,) = call(func, given, ((rows, columns), "float32"))
    wanted = x.astype("float64") @ weight.astype("float64")
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("columns", "tasks"), [(64, 2), (72, 2), (48, 1), (32, 1)])
def test_tiles_that_overlap_belong_to_one_task(columns: int, tasks: int) -> None:
    """The sums of a part of the depth lie in the result; no other task may write there."""
    matrix = NarrowMatrix(256, columns, "int4", 32, 32, False, False)
    func = narrow_matmul([14], matrix, "int8", CPU)
    loops: list[tirx.For] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, loops.append))
    extents = [int(loop.extent) for loop in loops if loop.kind == tirx.ForKind.PARALLEL]
    assert extents == [tasks]


def test_tile_must_fit() -> None:
    for depth, block in ((36, 12), (40, 32)):
        with pytest.raises(
            OpError, match="expected a type of int4, .* blocks of a multiple of 8 rows"
        ):
            NarrowMatrix(depth, 16, "int4", block, 16, False)


needs_dots = pytest.mark.skipif(not CPU.byte_dots, reason="this CPU multiplies no bytes")


def in_bytes(x: np.ndarray, matrix: NarrowMatrix) -> Arrays:
    """Integers, scales and sums of the rows by the kernel."""
    *rows, _ = x.shape
    blocks = (*rows, matrix.depth // matrix.byte_block)
    results = ((x.shape, "int8"), (blocks, "float32"), (blocks, "float32"))
    return call(byte_rows(rows, matrix), [x], *results)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rows", [1, 20])
def test_rows_become_bytes(rows: int) -> None:
    matrix = matrix_of(96, 64, 4, 32, in_bytes=True)
    x = np.random.default_rng(0).standard_normal((rows, 96)).astype("float32")
    x[0, :32], x[-1, 32:64] = 0, 2e-36
    x[0, 32] = 3e38
    integers, scales, totals = in_bytes(x, matrix)
    blocks = x.reshape(rows, 3, 32).astype("float64")
    np.testing.assert_allclose(scales, np.abs(blocks).max(2) / 127, rtol=1e-6)
    parts = integers.reshape(rows, 3, 32).astype("float64")
    np.testing.assert_array_equal(totals, parts.sum(2))
    error = np.abs(parts * scales[..., None] - blocks)
    assert (error <= 0.5001 * scales[..., None] + 1e-30).all()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_blocks_that_are_not_finite_are_nan(value: float) -> None:
    matrix = matrix_of(64, 64, 4, 32, in_bytes=True)
    for place in (0, 7, 31):
        x = np.ones((2, 64), "float32")
        x[1, place] = value
        _, scales, _ = in_bytes(x, matrix)
        assert np.isnan(scales[1, 0]) and not np.isnan(scales[[0, 0, 1], [0, 1, 1]]).any()


@pytest.mark.slow
@needs_dots
@settings(deadline=None, max_examples=8)
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    groups=st.integers(1, 5),
    block=st.sampled_from([8, 16, 24, 32, 64]),
    columns=st.integers(CPU.lanes("float32"), 80),
    zeros=st.sampled_from(["", "int8", "float32"]),
    extreme=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_of_bytes(
    rows: list[int],
    groups: int,
    block: int,
    columns: int,
    zeros: str,
    extreme: bool,
    seed: int,
) -> None:
    """Sums of a block are exact, with the largest integers, too."""
    matrix = matrix_of(groups * block, columns, 4, block, zeros, in_bytes=True)
    constants, wide = numbers(matrix, zeros, seed)
    random = np.random.default_rng(seed)
    size = random.choice([-127, 127], (*rows, matrix.depth)) if extreme else None
    integers = random.integers(-127, 128, (*rows, matrix.depth)) if size is None else size
    integers = integers.astype("int8")
    blocks = (*rows, -1, matrix.byte_block)
    scales = random.uniform(0, 0.1, integers.reshape(blocks).shape[:-1]).astype("float32")
    totals = integers.reshape(blocks).astype("float32").sum(-1)
    func = narrow_dot(rows, matrix, zeros, CPU)
    given = [integers, scales, totals, *constants]
    (found,) = call(func, given, ((*rows, columns), "float32"))
    x = integers * np.repeat(scales.astype("float64"), matrix.byte_block, -1)
    bound = np.abs(x) @ (np.abs(wide) + OFFSET * 0.02) + 1e-30
    assert (np.abs(found - x @ wide) <= 2e-6 * bound).all()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", CPUS)
def test_machine_code(cpu: str) -> None:
    """One row: sums stay in registers, and bytes are multiplied by the CPU's instruction."""
    info = info_of(cpu)
    words = {"vpdpbusd": "vpdpbusd", "maddubs": "vpmaddubsw", "sdot": "sdot", "usdot": "usdot"}
    kernels = {
        "floats": narrow_matmul([1], matrix_of(256, 256, 4, 32, cpu=info), "int8", info),
        "bytes": narrow_dot([1], matrix_of(256, 256, 4, 32, "", True, info), "int8", info),
        "eights": narrow_matmul([1], matrix_of(256, 256, 8, 128, cpu=info), "int8", info),
    }
    assert info.byte_dots
    for name, loops in loops_of(kernels, cpu).items():
        instruction = words[info.byte_dots] if name == "bytes" else "fm"
        texts = [[str(each.text) for each in loop.instructions] for loop in loops if loop.innermost]
        hot = [text for text in texts if sum(instruction in line for line in text) >= 8]
        assert hot, f"{name} for {cpu} has no loop of {instruction}"
        stack = "sp" if cpu in AARCH64 else "(%rsp"
        for text in hot:
            assert 10 * sum(stack in line for line in text) <= len(text), f"{name} for {cpu}"
