# SPDX-License-Identifier: Apache-2.0
"""Lowering of GPU kernels: which of their buffers are compacted, and which numbers they keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx
from tvm.ir.transform import PassContext
from tvm.script import tirx as T
from tvm.target import Target

from tvm_fusion.codegen.nvrtc import compile_cuda
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


@T.prim_func(s_tir=True)
def rounding(
    data: T.Buffer((32,), "float32"),
    sums: T.Buffer((32,), "int32"),
    wide: T.Buffer((32,), "float64"),
):
    T.func_attr({"global_symbol": "rounding", "tirx.noalias": True})
    with T.launch_thread("blockIdx.x", 1):
        i = T.launch_thread("threadIdx.x", 32)
        bound: T.let[T.float32] = data[i] / T.float32(3)
        data[i] = T.round(bound) + T.round(data[i] / data[0]) + data[i] / T.float32(5)
        data[i] = T.Cast("float32", sums[i]) * T.float32(3.2300844192504883) + data[i]
        data[i] = data[i] * T.float32(0.1) + data[0]
        wide[i] = wide[i] * T.float64(1e-20) + T.float64(0.5)


def cuda_text(pipeline: str, *functions: tirx.PrimFunc, **context: Any) -> str:
    return device_text(TARGET, pipeline, *functions, **context)


def device_text(target: Target, pipeline: str, *functions: tirx.PrimFunc, **context: Any) -> str:
    mod = tvm.IRModule({str(func.attrs["global_symbol"]): func for func in functions})
    with PassContext(**context):
        return str(tvm.tirx.build(mod, target, pipeline).imports[0].inspect_source())


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


def test_numbers_that_are_rounded_to_whole_ones_are_those_of_cpus() -> None:
    text = cuda_text(GPU_LOWERING, rounding)
    assert text.count("nearbyintf(__fdiv_rn(") + text.count("= __fdiv_rn(") == 2
    assert text.count("__fdiv_rn(") == 2 and text.count(" / ") == 1, "others are approximate"
    assert text.count("__fmaf_rn(((float)sums_ptr[") == text.count("__fmaf_rn(") == 1
    compile_cuda(text, "sm_80")
    text = device_text(resolve("opencl"), GPU_LOWERING, rounding)
    assert text.count("fma((convert_float(sums_ptr[") == 1  # others may be, too
    assert text.count(" / ") == 3


def test_constants_keep_all_their_digits() -> None:
    text = device_text(resolve("opencl"), GPU_LOWERING, rounding)
    assert f"as_float({np.float32(3.2300844192504883).view('int32')})" in text
    assert text.count("as_float") == 1 and "1.000000e-01f" in text
    text = cuda_text(GPU_LOWERING, rounding)
    assert f"__longlong_as_double((int64_t){np.float64(1e-20).view('int64')})" in text
    assert text.count("__longlong_as_double") == 1
