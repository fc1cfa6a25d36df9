# SPDX-License-Identifier: Apache-2.0
"""Intrinsics that differ between CUDA and OpenCL: shuffles, tickets, locks, fences."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.index_math import i64

from .machine import GPUInfo

_TICKET = """
__forceinline__ __device__ int tvm_fusion_draw_ticket(void* counter, int last) {
  // What the block has written comes before its ticket, what the others have written after it.
  int ticket;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(ticket) : "l"(counter), "r"(last) : "memory");
  return ticket;
}
"""

_SWAP = """
__forceinline__ __device__ {word} tvm_fusion_swap_{name}(
    void* p, {word} expected, {word} desired) {{
  typedef unsigned {word} bits_t;
  return ({word})atomicCAS((bits_t*)p, (bits_t)expected, (bits_t)desired);
}}
"""

# The fence also acquires what was read before: whoever reads the value sees all that this thread
# has seen and written.
_PUBLISH = """
__forceinline__ __device__ void tvm_fusion_publish_{name}(void* p, {word} value) {{
  asm volatile("fence.acq_rel.gpu; st.relaxed.gpu.global.s{bits} [%0], %1;"
               :: "l"(p), "{register}"(value) : "memory");
}}
"""

# A volatile read would have system scope.
_READ_NOW = """
__forceinline__ __device__ long long tvm_fusion_read_now(void* p) {
  long long value;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
"""

_FENCE = """
__forceinline__ __device__ void tvm_fusion_fence() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
"""

_ADDRESS = """
__forceinline__ __device__ long long tvm_fusion_address(const void* p) { return (long long)p; }
"""

# "Temporal grid launch number for this context" (PTX ISA, special registers).
_LAUNCH = """
__forceinline__ __device__ long long tvm_fusion_launch() {
  long long number;
  asm("mov.u64 %0, %%gridid;" : "=l"(number));
  return number;
}
"""

# Turns of waiting, each of at least a microsecond.
LAST_TURN = 1 << 24

_WAIT = f"""
extern "C" __device__ void __assertfail(
    const char*, const char*, unsigned int, const char*, size_t);
__forceinline__ __device__ void tvm_fusion_wait(int turn) {{
  if (turn >= {LAST_TURN}) {{
    __assertfail("a reduction found no free slot of its workspace: too many streams run it at once,"
                 " or one that failed has left it in use; start the process again",
                 "tvm_fusion", 0, "reduction", 1);
  }}
  __nanosleep(1000);
}}
"""

# TVM prints an external call as name and parentheses; a macro cannot be an argument.
_OPENCL_FENCE = "mem_fence(CLK_GLOBAL_MEM_FENCE); get_work_dim"


def shuffle_xor(value: tirx.Expr, mask: int, width: int) -> tirx.Expr:
    """The value of the lane whose number differs by ``mask``, within groups of ``width``."""
    every = tirx.const(-1, "int32")
    return T.tvm_warp_shuffle_xor(every, value, mask, width, 32)


def draw_ticket(gpu: GPUInfo, counter: tirx.Expr, blocks: int) -> tirx.Expr:
    """Count this block at ``counter``; the last ticket, ``blocks - 1``, resets it to zero."""
    last = tirx.const(blocks - 1, "int32")
    if gpu.kind == "cuda":  # it wraps around
        return T.bind(
            T.cuda.func_call(
                "tvm_fusion_draw_ticket", counter, last, source_code=_TICKET, return_type="int32"
            )
        )
    ticket = T.bind(T.call_extern("int32", "atomic_inc", counter))
    with T.If(tirx.EQ(ticket, last)):
        with T.Then():
            publish(gpu, counter, tirx.const(0, "int32"))
    return ticket


def try_lock(gpu: GPUInfo, lock: tirx.Expr) -> tirx.Expr:
    """One if this thread has got the lock, else zero; :func:`publish` of zero releases it."""
    one = tirx.const(1, "int32")
    before = T.bind(compare_and_swap(gpu, lock, tirx.const(0, "int32"), one))
    acquire(gpu)
    return one - before


def publish(gpu: GPUInfo, address: tirx.Expr, value: tirx.Expr) -> None:
    """Store an integer for other blocks, after all that this thread has read and written."""
    dtype = str(value.ty.dtype)
    if gpu.kind == "opencl":
        fence(gpu)
        name = "atom_xchg" if dtype == "int64" else "atomic_xchg"
        T.evaluate(T.call_extern(dtype, name, address, value))
        return
    bits, register = (64, "l") if dtype == "int64" else (32, "r")
    source = _PUBLISH.format(name=dtype, word=_CUDA_WORDS[dtype], bits=bits, register=register)
    T.evaluate(T.cuda.func_call(f"tvm_fusion_publish_{dtype}", address, value, source_code=source))


def read_now(gpu: GPUInfo, address: tirx.Expr) -> tirx.Expr:
    """An int64 that other blocks may be changing; must be followed by :func:`acquire`."""
    if gpu.kind == "opencl":
        return compare_and_swap(gpu, address, i64(0), i64(0))
    return T.cuda.func_call(
        "tvm_fusion_read_now", address, source_code=_READ_NOW, return_type="int64"
    )


def address_number(gpu: GPUInfo, address: tirx.Expr) -> tirx.Expr:
    """An address as int64."""
    if gpu.kind == "opencl":
        return T.call_extern("int64", "(long)", address)
    return T.cuda.func_call(
        "tvm_fusion_address", address, source_code=_ADDRESS, return_type="int64"
    )


def current_stream(gpu: GPUInfo) -> tirx.Expr:
    """The number of the stream of the next launch, an int64; emitted by the host, outside of it.

    TVM has one queue for all OpenCL launches on a device.
    """
    if gpu.kind == "opencl":
        return i64(0)
    return T.bind(tirx.call_intrin("int64", "tirx.tvm_call_packed", "runtime.get_cuda_stream"))


def launch_number(gpu: GPUInfo) -> tirx.Expr:
    """The number of the launch, an int64, the same in all of its blocks; zero on OpenCL.

    A launch that was captured into a graph has another one each time that it is replayed.
    """
    if gpu.kind == "opencl":
        return i64(0)
    return T.cuda.func_call("tvm_fusion_launch", source_code=_LAUNCH, return_type="int64")


def wait_a_moment(gpu: GPUInfo, turn: tirx.Expr) -> None:
    """Emit a pause, and on CUDA an error in the turn :data:`LAST_TURN`, which ends all kernels."""
    if gpu.kind == "cuda":
        T.evaluate(T.cuda.func_call("tvm_fusion_wait", turn, source_code=_WAIT))


def acquire(gpu: GPUInfo) -> None:
    """Emit a fence that orders this thread's later accesses after its reads so far."""
    if gpu.kind == "opencl":
        fence(gpu)
    else:
        T.evaluate(T.cuda.func_call("tvm_fusion_fence", source_code=_FENCE))


def fence(gpu: GPUInfo) -> None:
    """Emit a fence that orders this thread's accesses to global memory around its ticket."""
    if gpu.kind == "opencl":  # on CUDA the ticket itself is fenced
        T.evaluate(T.call_extern("int32", _OPENCL_FENCE))


def sync() -> None:
    """Emit a barrier of the block."""
    T.evaluate(T.tvm_storage_sync("shared"))


def compare_and_swap(
    gpu: GPUInfo, address: tirx.Expr, expected: tirx.Expr, desired: tirx.Expr
) -> tirx.Expr:
    """Store ``desired`` if the signed integer is ``expected``; returns the old value."""
    dtype = str(expected.ty.dtype)
    wide = dtype == "int64"
    if gpu.kind == "opencl":
        name = "atom_cmpxchg" if wide else "atomic_cmpxchg"
        return T.call_extern(dtype, name, address, expected, desired)
    return T.cuda.func_call(
        f"tvm_fusion_swap_{dtype}",
        address,
        expected,
        desired,
        source_code=_SWAP.format(name=dtype, word=_CUDA_WORDS[dtype]),
        return_type=dtype,
    )


def native_atomic(
    gpu: GPUInfo, instruction: str, dtype: str
) -> Callable[[tirx.Expr, tirx.Expr], None] | None:
    """Emitter of an update by one instruction; None where the device has none.

    Parameters
    ----------
    gpu : GPUInfo
        The device.
    instruction : str
        ``add``, ``min`` or ``max``; others have no instruction.
    dtype : str
        Of the element.
    """
    if gpu.kind == "opencl":
        if instruction not in ("add", "min", "max") or dtype != "int32":
            return None
        return lambda address, value: T.evaluate(
            T.call_extern("int32", f"atomic_{instruction}", address, value)
        )
    body = _cuda_atomic(gpu, instruction, dtype)
    if body is None:
        return None
    name = f"tvm_fusion_atomic_{instruction}_{dtype}"
    of = _CUDA_TYPES[dtype]
    source = f"\n__forceinline__ __device__ void {name}({of}* p, {of} v) {{\n  {body}\n}}\n"
    return lambda address, value: T.evaluate(
        T.cuda.func_call(name, address, value, source_code=source)
    )


_CUDA_WORDS = {"int16": "short", "int32": "int", "int64": "long long"}
_CUDA_TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "half",
    "bfloat16": "nv_bfloat16",
    "int64": "int64_t",
    "int32": "int",
}

# Signed integers order floats with a clear sign bit, unsigned ones in reverse those with it set;
# NaN goes in as the pattern that no number comes before.
_FLOAT_MAX = (
    "if (v != v) atomicMax((int*)p, 0x7fffffff);\n"
    "  else if (__float_as_int(v) >= 0) atomicMax((int*)p, __float_as_int(v));\n"
    "  else atomicMin((unsigned int*)p, __float_as_uint(v));"
)
_FLOAT_MIN = (
    "if (v != v) atomicMax((unsigned int*)p, 0xffffffffu);\n"
    "  else if (__float_as_int(v) >= 0) atomicMin((int*)p, __float_as_int(v));\n"
    "  else atomicMax((unsigned int*)p, __float_as_uint(v));"
)


def _cuda_atomic(gpu: GPUInfo, instruction: str, dtype: str) -> str | None:
    """The body of ``void f(T* p, T v)``."""
    if dtype == "float32" and instruction in ("min", "max"):
        return _FLOAT_MAX if instruction == "max" else _FLOAT_MIN
    if dtype == "int64":
        unsigned = "unsigned long long"
        return {
            "add": f"atomicAdd(({unsigned}*)p, ({unsigned})v);",
            "min": "atomicMin((long long*)p, (long long)v);",
            "max": "atomicMax((long long*)p, (long long)v);",
        }.get(instruction)
    if dtype == "int32" and instruction in ("add", "min", "max"):
        return f"atomic{instruction.capitalize()}(p, v);"
    adds = ("float32", "float64", "float16") if gpu.arch < 90 else tuple(_CUDA_TYPES)
    return "atomicAdd(p, v);" if instruction == "add" and dtype in adds else None


# For 16-bit types the built-in functions also handle shared memory, at the cost of a branch.
_RED = 'asm volatile("red.global.add.noftz.{0}x2 [%0], %1;" :: "l"(p), "r"(*(int*)&v) : "memory");'
_VECTOR_ADDS = {
    ("float32", 2): "atomicAdd((float2*)p, make_float2(a, b));",
    ("float32", 4): "atomicAdd((float4*)p, make_float4(a, b, c, d));",
    ("float16", 2): "__half2 v = __halves2half2(a, b); " + _RED.format("f16"),
    ("bfloat16", 2): "__nv_bfloat162 v = __halves2bfloat162(a, b); " + _RED.format("bf16"),
}


def vector_add_width(gpu: GPUInfo, dtype: str, elements: int) -> int:
    """Number of neighbours that one instruction adds; 1 where there are no vector instructions."""
    if gpu.kind != "cuda" or (gpu.arch < 90 and dtype != "float16"):
        return 1
    widths = [width for kind, width in _VECTOR_ADDS if kind == dtype and elements % width == 0]
    return max(widths, default=1)


def vector_add(address: tirx.Expr, values: list[tirx.Expr], dtype: str) -> None:
    """Emit one atomic addition of neighbours; the address is a multiple of their size."""
    element = _CUDA_TYPES[dtype]
    name = f"tvm_fusion_atomic_add{len(values)}_{dtype}"
    parameters = ", ".join(f"{element} {letter}" for letter in "abcd"[: len(values)])
    source = (
        f"\n__forceinline__ __device__ void {name}({element}* p, {parameters}) {{\n"
        f"  {_VECTOR_ADDS[dtype, len(values)]}\n}}\n"
    )
    T.evaluate(T.cuda.func_call(name, address, *values, source_code=source))
