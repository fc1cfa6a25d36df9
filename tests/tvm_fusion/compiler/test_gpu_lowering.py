# SPDX-License-Identifier: Apache-2.0
"""Lowering of GPU kernels: which of their buffers are compacted."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import s_tir, te, tirx
from tvm.ir.transform import PassContext
from tvm.script import tirx as T

from tvm_fusion.compiler.build_kernels import GPU_LOWERING
from tvm_fusion.compiler.targets import resolve

TARGET = resolve("cuda -arch=sm_80")


@pytest.fixture(autouse=True)
def _no_instruments() -> None:
    PassContext.current().override_instruments([])


@T.prim_func(s_tir=True)
def written(data: T.Buffer((32,), "float32"), out: T.Buffer((32,), "float32")):
    T.func_attr({"global_symbol": "written", "tirx.noalias": True})
    with T.launch_thread("blockIdx.x", 1):
        thread = T.launch_thread("threadIdx.x", 32)
        held = T.alloc_buffer((8,), scope="shared")
        held[thread % 4] = data[thread]
        out[thread] = held[thread % 4]


def scheduled() -> tirx.PrimFunc:
    """A function whose intermediate results are in shared memory, 32 of 64 at a time."""
    data = te.placeholder((64,), name="data")
    held = te.compute(data.shape, lambda i: data[i] + 1.0, name="held")
    out = te.compute(data.shape, lambda i: held[i] * 2.0, name="out")
    sch = s_tir.Schedule(te.create_prim_func([data, out]))
    block, thread = sch.split(*sch.get_loops("out"), [2, 32])
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    sch.set_scope("held", 0, "shared")
    sch.compute_at("held", block)
    sch.bind(sch.get_loops("held")[-1], "threadIdx.x")
    return sch.mod["main"].with_attr("global_symbol", "scheduled")


def cuda_text(pipeline: str, *functions: tirx.PrimFunc, **context: Any) -> str:
    mod = tvm.IRModule({str(func.attrs["global_symbol"]): func for func in functions})
    with PassContext(**context):
        return str(tvm.tirx.build(mod, TARGET, pipeline).imports[0].inspect_source())


def test_a_written_kernel_keeps_its_buffers() -> None:
    assert "held_ptr[4]" in cuda_text("default", written)
    assert "held_ptr[8]" in cuda_text(GPU_LOWERING, written)


def test_a_scheduled_kernel_is_compacted() -> None:
    both = cuda_text(GPU_LOWERING, written, scheduled())
    assert "held_shared_ptr[32]" in both and "held_ptr[8]" in both
    assert cuda_text(GPU_LOWERING, scheduled()) == cuda_text("default", scheduled())


def test_the_context_holds_for_both() -> None:
    disabled = ["tirx.StorageRewrite", "s_tir.MergeSharedMemoryAllocations"]
    text = cuda_text(
        GPU_LOWERING, written, scheduled(), disabled_pass=["s_tir.CompactBufferAllocation"]
    )
    assert "held_shared_ptr[64]" in text and "held_ptr[8]" in text
    assert cuda_text(GPU_LOWERING, scheduled(), disabled_pass=disabled) == cuda_text(
        "default", scheduled(), disabled_pass=disabled
    )


def test_instruments_see_the_whole_module() -> None:
    seen: list[int] = []

    @tvm.ir.instrument.pass_instrument
    class Sizes:
        def run_before_pass(self, mod: tvm.IRModule, info: Any) -> None:
            if info.name == "s_tir.CompactBufferAllocation":
                seen.append(len(mod.functions))

    cuda_text(GPU_LOWERING, written, scheduled(), instruments=[Sizes()])
    assert seen == [2]
