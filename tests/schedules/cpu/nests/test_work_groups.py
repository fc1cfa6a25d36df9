# SPDX-License-Identifier: Apache-2.0
"""Kernels for CPUs as work-groups: what becomes of loops, vectors and buffers, and what is refused.

Numbers are in ``tests/tvm_fusion/distributed/accelerator/test_in_place.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tvm
from cpu.rule_cases import function, tensor
from tvm import te, tirx
from tvm.script import tirx as T

from schedules.cpu import RULES
from schedules.cpu.nests.work_groups import work_groups
from schedules.schedule_rule import schedule_function
from tvm_fusion.compiler.targets import resolve


@T.prim_func(private=True, s_tir=True)
def before(a: T.Buffer((8, 39), "float32"), c: T.Buffer((8, 39), "float32")):
    with T.sblock("root"):
        both = T.sblock_alloc_buffer((8, 39))
        own = T.sblock_alloc_buffer((24,))
        for i in range(8):
            for j in T.vectorized(39):
                with T.sblock("both"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    both[vi, vj] = T.fma(a[vi, vj], T.float32(2), T.float32(1))
        for i in T.parallel(T.int64(8)):
            for j in T.vectorized(24):
                with T.sblock("own"):
                    vi = T.axis.spatial(8, T.cast(i, "int32"))
                    vj = T.axis.spatial(24, j)
                    own[vj] = both[vi, vj]
            for j in T.vectorized(16):
                with T.sblock("c"):
                    vi = T.axis.spatial(8, T.cast(i, "int32"))
                    vj = T.axis.spatial(39, j)
                    c[vi, vj] = own[vj]


@T.prim_func(private=True, s_tir=True)
def after(a: T.Buffer((8, 39), "float32"), c: T.Buffer((8, 39), "float32")):
    with T.sblock("root"):
        both = T.sblock_alloc_buffer((8, 39))
        own = T.sblock_alloc_buffer((24,), scope="local")
        for _ in T.thread_binding(T.int64(1), thread="blockIdx.x"):
            for i in range(8):
                for j in range(39):
                    with T.sblock("both"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        both[vi, vj] = T.fma(a[vi, vj], T.float32(2), T.float32(1))
        for i in T.thread_binding(T.int64(8), thread="blockIdx.x"):
            for j_outer in T.unroll(3):
                for j in T.vectorized(8):
                    with T.sblock("own"):
                        vi = T.axis.spatial(8, T.cast(i, "int32"))
                        vj = T.axis.spatial(24, j_outer * 8 + j)
                        own[vj] = both[vi, vj]
            for j in T.vectorized(16):
                with T.sblock("c"):
                    vi = T.axis.spatial(8, T.cast(i, "int32"))
                    vj = T.axis.spatial(39, j)
                    c[vi, vj] = own[vj]


def test_loops_vectors_and_buffers() -> None:
    found = work_groups(before)
    assert found is not None and found.before == ("#pragma OPENCL FP_CONTRACT OFF\n",)
    tvm.ir.assert_structural_equal(found.func, after)


def scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    target = resolve("znver3", 2)
    with target:
        return schedule_function("f", func, target, RULES)


def test_stores_past_the_caches() -> None:
    a = tensor("a", 4096, 8192)
    copied = scheduled(function([a], te.compute(a.shape, lambda i, j: a[i, j] + 1)))
    found = work_groups(copied)
    assert found is not None
    functions = ["tvm_fusion_stream_32_32", "tvm_fusion_stream_prefetch"]
    assert [text.split("(")[0] for text in found.before[1:]] == [f"\nint {f}" for f in functions]
    text = found.func.script()
    assert "tvm_fusion_stream_32_32" in text and "stream_end" not in text
    assert "pragma" not in text and "T.parallel" not in text


def with_intrinsic() -> tirx.PrimFunc:
    @T.prim_func(private=True, s_tir=True)
    def func(a: T.Buffer((8,), "float32"), c: T.Buffer((8,), "float32")):
        for i in T.parallel(8):
            with T.sblock("c"):
                v = T.axis.spatial(8, i)
                c[v] = T.call_llvm_pure_intrin("float32", "llvm.sqrt.f32", a[v])

    return func


def with_extern() -> tirx.PrimFunc:
    @T.prim_func(private=True, s_tir=True)
    def func(a: T.Buffer((8,), "float32")):
        for i in T.parallel(8):
            with T.sblock("a"):
                v = T.axis.spatial(8, i)
                T.writes(a[v])
                T.call_extern("int32", "somebody_elses", T.address_of(a[v]))

    return func


def with_large_buffer() -> tirx.PrimFunc:
    @T.prim_func(private=True, s_tir=True)
    def func(a: T.Buffer((8,), "float32"), c: T.Buffer((8,), "float32")):
        with T.sblock("root"):
            large = T.sblock_alloc_buffer((10000,))
            for i in T.parallel(8):
                for j in range(10000):
                    with T.sblock("large"):
                        v, w = T.axis.remap("SS", [i, j])
                        large[w] = a[v]
                with T.sblock("c"):
                    v = T.axis.spatial(8, i)
                    c[v] = large[v]

    return func


@pytest.mark.parametrize("make", [with_intrinsic, with_extern, with_large_buffer])
def test_what_opencl_has_no_name_for(make: Callable[[], tirx.PrimFunc]) -> None:
    assert work_groups(make()) is None
