# SPDX-License-Identifier: Apache-2.0
"""The OpenCL harness: numbers, repeated and concurrent calls, refusals, and TVM's text."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from opencl import compile_opencl, new_queue
from tvm import tirx
from tvm.script import tirx as T

from schedules.errors import InvalidInputError, OpError
from tvm_fusion.codegen.host_code import Launch

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"]


@T.prim_func(s_tir=True)
def reversed_through_scratch(a: T.handle, b: T.handle):
    n = T.int64()
    A = T.match_buffer(a, (n,), "float32")
    B = T.match_buffer(b, (n,), "float32")
    S = T.alloc_buffer((n,), "float32")
    for bx in T.thread_binding((n + 63) // 64, thread="blockIdx.x"):
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("double"):
                i = T.axis.spatial(n, bx * 64 + tx)
                T.where(bx * 64 + tx < n)
                S[i] = A[i] * T.float32(2)
    for bx in T.thread_binding((n + 31) // 32, thread="blockIdx.x"):
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("reverse"):
                i = T.axis.spatial(n, bx * 32 + tx)
                T.where(bx * 32 + tx < n)
                B[i] = S[n - 1 - i] + T.float32(1)


def row_sums(dtype: str, accumulator: str, rows: int, columns: int) -> tirx.PrimFunc:
    """One block a row, one thread a column; reduced across the threads by TVM."""
    zero = tirx.const(0, accumulator)

    @T.prim_func(s_tir=True)
    def func(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (rows, columns), dtype)
        B = T.match_buffer(b, (rows,), accumulator)
        for bx in T.thread_binding(rows, thread="blockIdx.x"):
            for tx in T.thread_binding(columns, thread="threadIdx.x"):
                with T.sblock("sum"):
                    i, r = T.axis.remap("SR", [bx, tx])
                    with T.init():
                        B[i] = zero
                    B[i] = B[i] + T.Cast(accumulator, A[i, r])

    return func


def map_elements(source: str, result: str, op, lanes: int = 1, blocks: int = 3) -> tirx.PrimFunc:
    """``B[i] = op(A[i])`` by blocks of 32 threads with ``lanes`` elements each."""
    tile = 32 * lanes
    size = blocks * tile

    @T.prim_func(s_tir=True)
    def func(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (size,), source)
        B = T.match_buffer(b, (size,), result)
        for bx in T.thread_binding(blocks, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                for v in T.vectorized(lanes):
                    with T.sblock("map"):
                        i = T.axis.spatial(size, bx * tile + tx * lanes + v)
                        B[i] = op(A[i])

    return func


def sum_with_last_block(blocks: int) -> tirx.PrimFunc:
    """Sum in one kernel: the block that draws the last ticket adds the others' partial sums."""

    @T.prim_func(s_tir=True)
    def func(a: T.handle, ticket: T.handle, b: T.handle):
        A = T.match_buffer(a, (blocks, 64), "int32")
        N = T.match_buffer(ticket, (1,), "int32")
        B = T.match_buffer(b, (1,), "int32")
        P = T.alloc_buffer((blocks,), "int32")
        for bx in T.thread_binding(blocks, thread="blockIdx.x"):
            for tx in T.thread_binding(64, thread="threadIdx.x"):
                with T.sblock("sum"):
                    i, j = T.axis.remap("SS", [bx, tx])
                    T.reads(A[i, j], N[0], P[0:blocks])
                    T.writes(B[0], N[0], P[0:blocks])
                    S = T.sblock_alloc_buffer((64,), "int32", scope="shared")
                    last = T.sblock_alloc_buffer((1,), "int32", scope="shared")
                    drawn = T.sblock_alloc_buffer((1,), "int32", scope="local")
                    S[j] = A[i, j]
                    T.evaluate(T.tvm_storage_sync("shared"))
                    if j == 0:
                        P[i] = 0
                        for k in range(64):
                            P[i] = P[i] + S[k]
                        T.evaluate(T.call_extern("void", "mem_fence", 2))  # global memory
                        last[0] = T.call_extern("int32", "atomic_inc", T.address_of(N[0]))
                    T.evaluate(T.tvm_storage_sync("shared"))
                    drawn[0] = last[0]  # TVM's ThreadSync fails on shared memory in a condition
                    if drawn[0] == blocks - 1 and j == 0:
                        B[0] = 0
                        for k in range(blocks):
                            B[0] = B[0] + T.call_extern(
                                "int32", "*(volatile __global int*)", T.address_of(P[k])
                            )
                        N[0] = 0

    return func


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("size", [1, 33, 64, 1001])
def test_kernels_scratch_and_symbolic_sizes(size: int, rng: np.random.Generator) -> None:
    kernels = compile_opencl(reversed_through_scratch)
    data = rng.standard_normal(size).astype("float32")
    result = np.full_like(data, np.nan)
    kernels.run(data, result)
    np.testing.assert_array_equal(result, data[::-1] * 2 + 1)
    grids = [(-(-size // 64), 1, 1), (-(-size // 32), 1, 1)]
    first, second = kernels.launches(data, result)
    assert (first.grid, second.grid) == tuple(grids)
    assert (first.block, second.block) == ((64, 1, 1), (32, 1, 1))
    assert first != second and isinstance(first, Launch)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str, rng: np.random.Generator) -> None:
    data = rng.integers(0, 2 if dtype == "bool" else 100, 96).astype(dtype)
    result = np.full(96, 1 if dtype == "bool" else 77).astype(dtype)

    def op(x):
        if dtype == "bool":
            return tirx.Not(x)
        return tirx.Cast(dtype, tirx.Cast("float32", x) + T.float32(1))

    compile_opencl(map_elements(dtype, dtype, op)).run(data, result)
    expected = ~data if dtype == "bool" else (data.astype("float32") + 1).astype(dtype)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
def test_every_float16_passes(lanes: int) -> None:
    blocks = 65536 // (32 * lanes)
    data = np.arange(65536, dtype="uint16").view("float16")
    wide = np.empty(65536, "float32")
    compile_opencl(
        map_elements("float16", "float32", lambda x: tirx.Cast("float32", x), lanes, blocks)
    ).run(data, wide)
    np.testing.assert_array_equal(wide, data.astype("float32"))
    narrow = np.empty(65536, "float16")
    compile_opencl(
        map_elements("float32", "float16", lambda x: tirx.Cast("float16", x), lanes, blocks)
    ).run(wide, narrow)
    np.testing.assert_array_equal(narrow, data)


def test_float32_is_rounded_to_float16(rng: np.random.Generator) -> None:
    data = (rng.standard_normal(96) * 10.0 ** rng.integers(-8, 5, 96)).astype("float32")
    result = np.empty(96, "float16")
    kernels = compile_opencl(map_elements("float32", "float16", lambda x: tirx.Cast("float16", x)))
    kernels.run(data, result)
    np.testing.assert_array_equal(result, data.astype("float16"))


@pytest.mark.slow
def test_arithmetic_in_half_precision_is_refused() -> None:
    half = tirx.const(0.5, "float16")
    for op, found in (
        (lambda x: x + half, r"\+ T"),
        (lambda x: tirx.max(x, half), "T.max"),
        (lambda x: tirx.Select(x < half, half, x), "<"),
        (lambda x: tirx.exp(x), "T.exp"),
    ):
        for lanes in (1, 4):
            with pytest.raises(OpError, match=f"{found}.* computes in float16: cast its operands"):
                compile_opencl(map_elements("float16", "float16", op, lanes))


def test_choices_between_half_values_are_no_arithmetic(rng: np.random.Generator) -> None:
    def op(x):
        return tirx.if_then_else(tirx.Cast("float32", x) < T.float32(0), T.float16(0.5), x)

    data = rng.standard_normal(96).astype("float16")
    result = np.empty_like(data)
    compile_opencl(map_elements("float16", "float16", op)).run(data, result)
    np.testing.assert_array_equal(result, np.where(data < 0, np.float16(0.5), data))


def test_calls_on_the_same_buffers() -> None:
    @T.prim_func(s_tir=True)
    def accumulate(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (64,), "int64")
        B = T.match_buffer(b, (64,), "int64")
        for bx in T.thread_binding(2, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("add"):
                    i = T.axis.spatial(64, bx * 32 + tx)
                    B[i] = B[i] + A[i]

    data, total = np.arange(64), np.zeros(64, "int64")
    session = compile_opencl(accumulate).session(data, total)
    for _ in range(5):
        session.launch()
    np.testing.assert_array_equal(session.read()[1], 5 * data)
    session.launch()
    np.testing.assert_array_equal(session.read()[1], 6 * data)
    np.testing.assert_array_equal(total, 0)


def test_last_block_by_ticket(rng: np.random.Generator) -> None:
    blocks = 500
    data = rng.integers(-1000, 1000, (blocks, 64)).astype("int32")
    session = compile_opencl(sum_with_last_block(blocks)).session(
        data, np.zeros(1, "int32"), np.full(1, 77, "int32")
    )
    for _ in range(20):
        session.launch()
        _, ticket, result = session.read()
        assert (ticket[0], result[0]) == (0, data.sum())


def test_two_queues_at_once(rng: np.random.Generator) -> None:
    kernels = compile_opencl(sum_with_last_block(200))
    data = [rng.integers(-1000, 1000, (200, 64)).astype("int32") for _ in range(2)]
    sessions = [kernels.session(d, np.zeros(1, "int32"), np.zeros(1, "int32")) for d in data]
    queues = [new_queue(), new_queue()]
    for _ in range(10):
        for session, queue in zip(sessions, queues, strict=True):
            session.launch(queue)
    for session, values in zip(sessions, data, strict=True):
        _, ticket, result = session.read()
        assert (ticket[0], result[0]) == (0, values.sum())


def test_scalar_arguments() -> None:
    @T.prim_func(s_tir=True)
    def fill(a: T.handle, value: T.float32, n: T.int32):
        A = T.match_buffer(a, (n,), "float32")
        for bx in T.thread_binding(n, thread="blockIdx.x"):
            with T.sblock("fill"):
                i = T.axis.spatial(n, bx)
                A[i] = value

    result = np.zeros(5, "float32")
    compile_opencl(fill).run(result, 2.5, 5)
    np.testing.assert_array_equal(result, 2.5)


def test_loops_and_branches_of_the_host() -> None:
    @T.prim_func(s_tir=True)
    def steps(a: T.handle):
        n = T.int32()
        A = T.match_buffer(a, (n,), "int32")
        for step in range(n):
            if step % 2 == 0:
                for bx in T.thread_binding(n, thread="blockIdx.x"):
                    with T.sblock("add"):
                        i = T.axis.spatial(n, bx)
                        j = T.axis.opaque(n, step)
                        A[i] = A[i] + j

    result = np.zeros(6, "int32")
    compile_opencl(steps).run(result)
    np.testing.assert_array_equal(result, 0 + 2 + 4)


def test_helper_functions() -> None:
    helpers = "float thrice(float x) { return 3.0f * x; }\n"
    func = map_elements("float32", "float32", lambda x: T.call_extern("float32", "thrice", x))
    data, result = np.arange(96, dtype="float32"), np.zeros(96, "float32")
    compile_opencl(func, helpers=helpers).run(data, result)
    np.testing.assert_array_equal(result, 3 * data)


def test_scratch_is_poisoned() -> None:
    @T.prim_func(s_tir=True)
    def careless(b: T.handle):
        B = T.match_buffer(b, (32,), "float32")
        S = T.alloc_buffer((32,), "float32")
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("read"):
                i = T.axis.spatial(32, tx)
                if i > 0:
                    S[i] = T.float32(1)
                B[i] = S[i]

    result = np.zeros(32, "float32")
    compile_opencl(careless).run(result)
    assert np.isnan(result[0]) and (result[1:] == 1).all()


def test_writes_behind_a_buffer_are_found() -> None:
    @T.prim_func(s_tir=True)
    def careless(b: T.handle, n: T.int32):
        B = T.match_buffer(b, (16,), "float32")
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("write"):
                i = T.axis.spatial(32, tx)
                if i < n:
                    B[i] = T.float32(1)

    kernels = compile_opencl(careless)
    result = np.zeros(16, "float32")
    kernels.run(result, 16)
    with pytest.raises(OpError, match="wrote behind the end of a buffer of 64 bytes"):
        kernels.run(result, 17)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([np.zeros(4, "float32")], "1 arguments for the parameters A, B"),
        ([np.zeros(4, "int32"), np.zeros(4, "float32")], "A is an array of float32, not int32"),
        ([np.zeros(4, "float32"), 4], "B is an array of float32, not int"),
        ([np.zeros((4, 1), "float32"), np.zeros(4, "float32")], "contiguous array of 1 axes"),
        ([np.zeros(8, "float32")[::2], np.zeros(4, "float32")], "contiguous array of 1 axes"),
        ([np.zeros(4, "float32"), np.zeros(5, "float32")], "B has an axis of .*4.*, not 5"),
    ],
)
def test_arguments_that_do_not_fit(arguments: list, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        compile_opencl(reversed_through_scratch).run(*arguments)


def test_refusals() -> None:
    empty = np.zeros(0, "float32")
    with pytest.raises(OpError, match="has an empty grid"):
        compile_opencl(reversed_through_scratch).run(empty, empty)
    func = map_elements("float32", "float32", lambda x: x)
    with pytest.raises(OpError, match="one function can be compiled at a time, not 2"):
        compile_opencl(tvm.IRModule({"f": func, "g": func}))

    @T.prim_func(s_tir=True)
    def nothing(b: T.handle):
        B = T.match_buffer(b, (16,), "float32")
        T.evaluate(B.data)

    with pytest.raises(OpError, match="launches no kernel"):
        compile_opencl(nothing)


def test_host_code_beyond_launches() -> None:
    @T.prim_func(s_tir=True)
    def prints(b: T.handle):
        B = T.match_buffer(b, (32,), "int32")
        T.evaluate(T.call_extern("int32", "putchar", 65))
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("write"):
                i = T.axis.spatial(32, tx)
                B[i] = i

    with pytest.raises(OpError, match="more than launching kernels: .*putchar"):
        compile_opencl(prints).run(np.zeros(32, "int32"))


def test_dynamic_shared_memory_is_refused() -> None:
    # TVM's OpenCL text would make it private to each thread, without a word.
    @T.prim_func(s_tir=True)
    def reverse(b: T.handle):
        B = T.match_buffer(b, (32,), "int32")
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("reverse"):
                i = T.axis.spatial(32, tx)
                S = T.sblock_alloc_buffer((32,), "int32", scope="shared.dyn")
                S[i] = i
                B[i] = S[31 - i]

    with pytest.raises(OpError, match="needs the launch parameter .*dyn_shared_memory"):
        compile_opencl(reverse).run(np.zeros(32, "int32"))


def test_atomics_of_64_bits(rng: np.random.Generator) -> None:
    @T.prim_func(s_tir=True)
    def total(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (6400,), "int64")
        B = T.match_buffer(b, (1,), "int64")
        for bx in T.thread_binding(100, thread="blockIdx.x"):
            for tx in T.thread_binding(64, thread="threadIdx.x"):
                with T.sblock("add"):
                    i = T.axis.spatial(6400, bx * 64 + tx)
                    T.reads(A[i])
                    T.writes(B[0])
                    T.evaluate(T.call_extern("int64", "atom_add", T.address_of(B[0]), A[i]))

    data, result = rng.integers(-(2**40), 2**40, 6400), np.zeros(1, "int64")
    compile_opencl(total).run(data, result)
    assert result[0] == data.sum()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("dtype", "lanes", "load"),
    [("float32", 4, "vload4(0, A_ptr"), ("int32", 4, "vload4(0, A_ptr"), ("int8", 16, "vload16(0")],
)
def test_text_of_wide_loads(dtype: str, lanes: int, load: str, rng: np.random.Generator) -> None:
    kernels = compile_opencl(map_elements(dtype, dtype, lambda x: x + x + x, lanes))
    assert load in kernels.source and f"vstore{lanes}(" in kernels.source
    data = rng.integers(-20, 20, 96 * lanes).astype(dtype)
    result = np.full_like(data, 77)
    kernels.run(data, result)
    np.testing.assert_array_equal(result, 3 * data)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("dtype", "accumulator"),
    [("float32", "float32"), ("float64", "float64"), ("float16", "float32"), ("int8", "int32")],
)
def test_text_of_the_cross_thread_reduction(
    dtype: str, accumulator: str, rng: np.random.Generator
) -> None:
    kernels = compile_opencl(row_sums(dtype, accumulator, 5, 128))
    assert "__local" in kernels.source and "barrier(CLK_LOCAL_MEM_FENCE)" in kernels.source
    assert "sub_group" not in kernels.source  # TVM has no subgroup shuffles for OpenCL
    data = rng.integers(-9, 9, (5, 128)).astype(dtype)
    result = np.full(5, 77, accumulator)
    kernels.run(data, result)
    np.testing.assert_array_equal(result, data.astype("int64").sum(1))


def test_text_of_bfloat16() -> None:
    source = compile_opencl(
        map_elements("bfloat16", "float32", lambda x: tirx.Cast("float32", x))
    ).source
    assert "__global ushort* restrict A_ptr" in source and "<< (uint)16" in source


def test_text_of_extern_calls() -> None:
    source = compile_opencl(sum_with_last_block(3)).source
    assert "mem_fence(2);" in source
    assert "atomic_inc(((__global int *)N_ptr + 0))" in source
    assert "*(volatile __global int*)(((__global int *)P_ptr + " in source


def test_no_device_wide_barrier() -> None:
    @T.prim_func(s_tir=True)
    def waits(b: T.handle):
        B = T.match_buffer(b, (64,), "int32")
        for bx in T.thread_binding(2, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("wait"):
                    i = T.axis.spatial(64, bx * 32 + tx)
                    B[i] = 1
                    T.evaluate(T.tvm_storage_sync("global"))
                    B[i] = 2

    with pytest.raises(tvm.error.InternalError, match="not supported"):
        compile_opencl(waits)


def test_no_cuda_intrinsics() -> None:
    @T.prim_func(s_tir=True)
    def adds(b: T.handle):
        B = T.match_buffer(b, (1,), "int32")
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("add"):
                i = T.axis.spatial(32, tx)
                T.reads()
                T.writes(B[0])
                T.evaluate(T.cuda.atomic_add(T.address_of(B[0]), i))

    with pytest.raises(tvm.error.InternalError, match="Unresolved call .*cuda.atomic_add"):
        compile_opencl(adds)
