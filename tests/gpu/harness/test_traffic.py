# SPDX-License-Identifier: Apache-2.0
"""The count of loads and stores, on kernels whose traffic is known."""

from __future__ import annotations

import numpy as np
import pytest
from reduce_cases import CUDA
from traffic import Traffic
from tvm import tirx
from tvm.script import tirx as T

from schedules.errors import OpError


def count(func: tirx.PrimFunc, *sizes: int) -> Traffic:
    return Traffic(func, CUDA, [np.empty(size, "float32") for size in sizes])


def test_tails_vectors_and_rows_read_twice() -> None:
    @T.prim_func(s_tir=True)
    def shifted(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (200,), "float32")
        B = T.match_buffer(b, (196,), "float32")
        for bx in T.thread_binding(2, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                for v in T.vectorized(4):
                    with T.sblock("add"):
                        i = T.axis.spatial(196, bx * 128 + tx * 4 + v)
                        T.where(bx * 128 + tx * 4 + v < 196)
                        B[i] = A[i] + A[i + 4]

    traffic = count(shifted, 200, 196)
    reads, writes = traffic.reads[0], traffic.writes[1]
    assert traffic.kernels == 1 and set(writes) == {1}
    assert set(reads[:4]) == set(reads[196:]) == {1} and set(reads[4:196]) == {2}
    assert not traffic.reads[1].any() and not traffic.writes[0].any()


def test_a_warp_asks_once_for_an_element() -> None:
    @T.prim_func(s_tir=True)
    def spread(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (8,), "float32")
        B = T.match_buffer(b, (256,), "float32")
        for bx in T.thread_binding(2, thread="blockIdx.x"):
            for tx in T.thread_binding(128, thread="threadIdx.x"):
                with T.sblock("copy"):
                    i = T.axis.spatial(256, bx * 128 + tx)
                    B[i] = A[i // 32]

    traffic = count(spread, 8, 256)
    assert set(traffic.reads[0]) == {1} and set(traffic.writes[1]) == {1}


def test_loops_whose_length_is_the_thread_s_own() -> None:
    @T.prim_func(s_tir=True)
    def triangle(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (40,), "float32")
        B = T.match_buffer(b, (40,), "float32")
        for bx in T.thread_binding(40, thread="blockIdx.x"):
            with T.sblock("prefix"):
                i = T.axis.spatial(40, bx)
                T.reads(A[0:40])
                T.writes(B[i])
                B[i] = T.float32(0)
                for k in range(i + 1):
                    B[i] = B[i] + A[k]

    traffic = count(triangle, 40, 40)
    np.testing.assert_array_equal(traffic.reads[0], np.arange(40, 0, -1))
    np.testing.assert_array_equal(traffic.writes[1], np.arange(2, 42))


def test_several_kernels_and_symbolic_sizes() -> None:
    @T.prim_func(s_tir=True)
    def twice(a: T.handle, b: T.handle):
        n = T.int64()
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (n,), "float32")
        for bx in T.thread_binding((n + 31) // 32, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("first"):
                    i = T.axis.spatial(n, bx * 32 + tx)
                    T.where(bx * 32 + tx < n)
                    B[i] = A[i]
        for bx in T.thread_binding((n + 31) // 32, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("second"):
                    i = T.axis.spatial(n, bx * 32 + tx)
                    T.where(bx * 32 + tx < n)
                    B[i] = T.if_then_else(i < 10, A[i], T.float32(0))

    traffic = count(twice, 77, 77)
    assert traffic.kernels == 2 and set(traffic.writes[1]) == {2}
    assert set(traffic.reads[0][:10]) == {2} and set(traffic.reads[0][10:]) == {1}


def test_an_index_from_memory_is_refused() -> None:
    @T.prim_func(s_tir=True)
    def gather(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (32,), "float32")
        B = T.match_buffer(b, (32,), "float32")
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("copy"):
                i = T.axis.spatial(32, tx)
                B[i] = A[T.Cast("int32", A[i])]

    with pytest.raises(OpError, match="an index into A comes from memory"):
        count(gather, 32, 32)
