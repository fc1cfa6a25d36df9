# SPDX-License-Identifier: Apache-2.0
"""Intrinsics of thread-block clusters: a barrier, and reads of each other's shared memory.

Blocks of sm_90 and later that are launched as a cluster run at the same time, and each may read the
shared memory of the others. Every thread of a cluster takes part in a barrier: it arrives, then it
waits. No block may end while another one may still read its memory.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

ARRIVE = "tvm_fusion_cluster_arrive"
WAIT = "tvm_fusion_cluster_wait"
REMOTE = "tvm_fusion_cluster_read_"  # and the type
KEEP = "tvm_fusion_keep"

# The compiler moves no access to memory across them.
_BARRIER = """
__forceinline__ __device__ void {name}() {{
  asm volatile("barrier.cluster.{instruction};" ::: "memory");
}}
"""

_REMOTE = """
__forceinline__ __device__ {type} {name}({type}* own, int rank) {{
  {type}* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(own), "r"(rank));
  return *there;
}}
"""

_KEEP = f"\n__forceinline__ __device__ void {KEEP}(const void*) {{}}\n"
_TYPES = {"float64": "double", "float32": "float", "int64": "int64_t", "int32": "int"}


def arrive() -> None:
    """Emit the first half of a barrier: stores of this thread are visible after it."""
    _barrier(ARRIVE, "arrive.release")


def wait() -> None:
    """Emit the second half of a barrier: all threads of the cluster have arrived."""
    _barrier(WAIT, "wait.acquire")


def read(buffer: tirx.Buffer, index: tirx.Expr, rank: int) -> tirx.Expr:
    """Element ``index`` of a shared buffer in block ``rank`` of the cluster."""
    dtype = str(buffer.dtype)
    name = REMOTE + dtype
    return T.cuda.func_call(
        name,
        T.address_of(buffer[index]),
        tirx.const(rank, "int32"),
        source_code=_REMOTE.format(name=name, type=_TYPES[dtype]),
        return_type=dtype,
    )


def keep(buffer: tirx.Buffer) -> None:
    """Emit a use of a shared buffer; until then TVM gives its memory to no other buffer."""
    address = T.address_of(buffer[0])
    T.evaluate(T.cuda.func_call(KEEP, address, source_code=_KEEP))


def _barrier(name: str, instruction: str) -> None:
    source = _BARRIER.format(name=name, instruction=instruction)
    T.evaluate(T.cuda.func_call(name, source_code=source))
