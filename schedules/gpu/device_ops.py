# SPDX-License-Identifier: Apache-2.0
"""What CUDA and OpenCL say differently: exchange between lanes, tickets, fences."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .device import GPUInfo

_TICKET = """
__forceinline__ __device__ int tvm_fusion_draw_ticket(int* counter, int last) {
  __threadfence();  // what the block has written comes before its ticket
  int ticket = (int)atomicInc((unsigned int*)counter, (unsigned int)last);
  __threadfence();  // what the other blocks have written comes after it
  return ticket;
}
"""

# TVM prints an external call as name and parentheses; the flag is a macro and cannot be an argument.
_OPENCL_FENCE = "mem_fence(CLK_GLOBAL_MEM_FENCE); get_work_dim"


def shuffle_xor(value: tirx.Expr, mask: int, width: int) -> tirx.Expr:
    """The value of the lane whose number differs by ``mask``, within groups of ``width``."""
    every = tirx.const(-1, "int32")
    return T.tvm_warp_shuffle_xor(every, value, mask, width, 32)


def draw_ticket(gpu: GPUInfo, counter: tirx.Expr, blocks: int) -> tirx.Expr:
    """Count this block at ``counter``; the ticket ``blocks - 1`` is the last one.

    On CUDA the counter is zero again when the last ticket has been drawn; on OpenCL the block that
    drew it has to reset it.
    """
    if gpu.kind == "cuda":
        return T.cuda.func_call(
            "tvm_fusion_draw_ticket",
            counter,
            tirx.const(blocks - 1, "int32"),
            source_code=_TICKET,
            return_type="int32",
        )
    return T.call_extern("int32", "atomic_inc", counter)


def fence(gpu: GPUInfo) -> None:
    """Emit what orders this thread's accesses to global memory around its ticket."""
    if gpu.kind == "opencl":  # on CUDA the ticket itself is fenced
        T.evaluate(T.call_extern("int32", _OPENCL_FENCE))


def sync() -> None:
    """Emit a barrier of the block."""
    T.evaluate(T.tvm_storage_sync("shared"))
