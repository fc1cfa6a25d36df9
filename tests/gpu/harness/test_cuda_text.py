# SPDX-License-Identifier: Apache-2.0
"""The CUDA tools: text, resources and machine code of small kernels."""

from __future__ import annotations

import pytest
from cuda_text import count, cuda_source, loops, opcodes, ptxas, sass
from tvm import tirx
from tvm.script import tirx as T

from examples.benchmarks.gpu import sass as disassembly
from schedules.errors import CompilationError, EngineError


def column_sums(lanes: int, dtype: str = "float32") -> tirx.PrimFunc:
    """Each thread adds 512 vectors of ``lanes`` elements."""
    zero = tirx.const(0, "float32")

    @T.prim_func(s_tir=True)
    def sums(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (512, 64 * lanes), dtype)
        B = T.match_buffer(b, (64 * lanes,), "float32")
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("sum"):
                t = T.axis.spatial(64, tx)
                T.reads(A[0:512, t * lanes : t * lanes + lanes])
                T.writes(B[t * lanes : t * lanes + lanes])
                S = T.sblock_alloc_buffer((lanes,), "float32", scope="local")
                V = T.sblock_alloc_buffer((lanes,), dtype, scope="local")
                for v in T.unroll(lanes):
                    S[v] = zero
                for k in range(512):
                    for v in T.vectorized(lanes):
                        V[v] = A[k, t * lanes + v]
                    # Not vectorised: TVM's text for eight float32 lanes does not compile.
                    for v in T.unroll(lanes):
                        S[v] = S[v] + T.Cast("float32", V[v])
                for v in T.unroll(lanes):
                    B[t * lanes + v] = S[v]

    return sums


@T.prim_func(s_tir=True)
def indexed_locally(a: T.handle, b: T.handle):
    A = T.match_buffer(a, (64, 16), "int32")
    B = T.match_buffer(b, (64,), "int32")
    for tx in T.thread_binding(64, thread="threadIdx.x"):
        with T.sblock("pick"):
            t = T.axis.spatial(64, tx)
            T.reads(A[t, 0:16])
            T.writes(B[t])
            S = T.sblock_alloc_buffer((16,), "int32", scope="local")
            for k in T.unroll(16):
                S[k] = 0
            for k in range(16):
                S[A[t, k] & 15] = S[A[t, k] & 15] + 1
            B[t] = S[3]


@T.prim_func(s_tir=True)
def shared_sum(a: T.handle, b: T.handle):
    A = T.match_buffer(a, (8, 96), "int8")
    B = T.match_buffer(b, (8,), "int8")
    for bx in T.thread_binding(8, thread="blockIdx.x"):
        for tx in T.thread_binding(96, thread="threadIdx.x"):
            with T.sblock("sum"):
                i, r = T.axis.remap("SR", [bx, tx])
                with T.init():
                    B[i] = T.int8(0)
                B[i] = B[i] + A[i, r]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lanes", "dtype", "wide", "narrow"),
    [
        (4, "float32", "LDG.E.128", "LDG.E.64"),
        (2, "float32", "LDG.E.64", "LDG.E.128"),
        (8, "float16", "LDG.E.128", "LDG.E.64"),
        (8, "bfloat16", "LDG.E.128", "LDG.E.64"),
        (1, "float32", "LDG.E", "LDG.E.128"),
    ],
)
def test_wide_loads(lanes: int, dtype: str, wide: str, narrow: str) -> None:
    source = cuda_source(column_sums(lanes, dtype))
    [code] = sass(source).values()
    [main] = loops(code)
    loads = count(main, "LDG")
    assert loads > 0 and count(main, wide) == loads and count(main, narrow) == 0
    [used] = ptxas(source).values()
    assert used.registers > 0
    assert used.stack_frame == used.spill_stores == used.spill_loads == used.shared == 0


@pytest.mark.slow
def test_stack_frame_of_an_array_with_a_dynamic_index() -> None:
    source = cuda_source(indexed_locally)
    used = ptxas(source)["indexed_locally_kernel"]
    assert used.stack_frame >= 16 * 4 and used.spill_stores == used.spill_loads == 0
    assert count(opcodes(sass(source)["indexed_locally_kernel"]), "STL") > 0


def test_shared_memory() -> None:
    assert ptxas(cuda_source(shared_sum))["shared_sum_kernel"].shared >= 96


def test_spills() -> None:
    source = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* a) {
  float v[64];
  #pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = a[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 64; ++i) a[(63 - i) * 1024 + threadIdx.x] = v[i];
}
extern "C" __global__ void lean(float* a) { a[threadIdx.x] = 0; }
"""
    used = ptxas(source)
    assert set(used) == set(sass(source)) == {"spilling", "lean"}
    assert used["spilling"].spill_stores > 0 and used["spilling"].spill_loads > 0
    assert used["spilling"].registers <= 32
    assert used["lean"].spill_stores == used["lean"].spill_loads == 0


def test_text_that_does_not_compile() -> None:
    with pytest.raises(CompilationError, match='identifier "nonsense" is undefined'):
        ptxas('extern "C" __global__ void f(float* a) { a[0] = nonsense; }')


@pytest.mark.slow
def test_other_architectures() -> None:
    source = cuda_source(column_sums(4), arch="sm_80")
    [code] = sass(source, arch="sm_80").values()
    assert count(opcodes(code), "LDG.E.128") > 0


def test_without_the_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembly, "find_program", lambda name: None)
    with pytest.raises(EngineError, match="nvdisasm is not installed"):
        sass('extern "C" __global__ void f(float* a) { a[0] = 1; }')
