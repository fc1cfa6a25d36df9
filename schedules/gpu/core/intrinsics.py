# SPDX-License-Identifier: Apache-2.0
"""Intrinsics that differ between CUDA and OpenCL: shuffles, tickets, locks, fences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.index_math import i64
from schedules.tir.statements import when

from .machine import GPUInfo

_TICKET = """
__forceinline__ __device__ int tvm_fusion_draw_ticket_{order}(void* counter, int last) {{
  int ticket;
  asm volatile("atom.{order}.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(ticket) : "l"(counter), "r"(last) : "memory");
  return ticket;
}}
"""

_SWAP = """
__forceinline__ __device__ {word} tvm_fusion_swap_{name}(
    void* p, {word} expected, {word} desired) {{
  typedef unsigned {word} bits_t;
  return ({word})atomicCAS((bits_t*)p, (bits_t)expected, (bits_t)desired);
}}
"""

_PUBLISH = """
__forceinline__ __device__ void tvm_fusion_publish_{name}(void* p, {word} value) {{
  asm volatile("st.release.gpu.global.s{bits} [%0], %1;"
               :: "l"(p), "{register}"(value) : "memory");
}}
"""

# A volatile read would have system scope.
_READ_NOW = """
__forceinline__ __device__ long long tvm_fusion_read_now(void* p, int n) {
  long long value;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];"
               : "=l"(value) : "l"((long long*)p + n) : "memory");
  return value;
}
"""

# One store, so that nobody sees a word without its tag. With a predicate, since the compiler would
# move what comes before into a branch, where it waits for the branch.
_STORE_TAGGED = """
__forceinline__ __device__ void tvm_fusion_store_tagged(
    void* p, int n, int word, int tag, bool stores) {
  asm volatile("{ .reg .b64 both; .reg .pred stores; mov.b64 both, {%1, %2};"
               " setp.ne.s32 stores, %3, 0; @stores st.relaxed.gpu.global.b64 [%0], both; }"
               :: "l"((long long*)p + n), "r"(word), "r"(tag), "r"((int)stores) : "memory");
}
"""

# An instruction of three sources; the compiler would make a long chain of two-sided ones.
_LOP3 = """
__forceinline__ __device__ int tvm_fusion_{name}(int a, int b, int c) {{
  int bits;
  asm("lop3.b32 %0, %1, %2, %3, {table};" : "=r"(bits) : "r"(a), "r"(b), "r"(c));
  return bits;
}}
"""
_DIFFER, _ANY = "0x7e", "0xfe"  # a, b and c are not all equal; any is set

# It waits for no store of this thread, where the compiler knows it.
_ACQUIRE = """
__forceinline__ __device__ void tvm_fusion_acquire() {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 13
  asm volatile("fence.acquire.gpu;" ::: "memory");
#else
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}
"""

_ADDRESS = """
__forceinline__ __device__ long long tvm_fusion_address(const void* p) { return (long long)p; }
"""

_POINTER = """
__forceinline__ __device__ void* tvm_fusion_pointer(void* p) {
  void* same;
  asm volatile("mov.b64 %0, %1;" : "=l"(same) : "l"(p));
  return same;
}
"""

# "Temporal grid launch number for this context" (PTX ISA, special registers).
_LAUNCH = """
__forceinline__ __device__ long long tvm_fusion_launch() {
  long long number;
  asm("mov.u64 %0, %%gridid;" : "=l"(number));
  return number;
}
"""

_FAIL = """
__forceinline__ __device__ void tvm_fusion_fail() {
  asm volatile("trap;");
  __builtin_unreachable();  // so that no registers are kept for what follows
}
"""

# Turns of waiting, on CUDA all but the first of at least a microsecond.
LAST_TURN = 1 << 24
_SHORT_TURNS = 16

_PAUSE = f"""
__forceinline__ __device__ void tvm_fusion_pause(int turn) {{
  __nanosleep(turn < {_SHORT_TURNS} ? 50 : 1000);
}}
"""

# TVM prints an external call as name and parentheses; a macro cannot be an argument.
_OPENCL_FENCE = "mem_fence(CLK_GLOBAL_MEM_FENCE); get_work_dim"


def shuffle_xor(value: tirx.Expr, mask: int, width: int) -> tirx.Expr:
    """The value of the lane whose number differs by ``mask``, within groups of ``width``."""
    every = tirx.const(-1, "int32")
    return T.tvm_warp_shuffle_xor(every, value, mask, width, 32)


def draw_ticket(
    gpu: GPUInfo, counter: tirx.Expr, tickets: int, is_ordered: bool = False
) -> tirx.Expr:
    """Draw a number from ``counter``; the last one, ``tickets - 1``, resets it to zero.

    Parameters
    ----------
    gpu : GPUInfo
        The device.
    counter : tirx.Expr
        Address of an int32.
    tickets : int
        Numbers until they begin again.
    is_ordered : bool
        Whether what this thread has read and written comes before its ticket, and what those before
        it have, before what this thread does next.
    """
    last = tirx.const(tickets - 1, "int32")
    if gpu.kind == "cuda":  # it wraps around
        order = "acq_rel" if is_ordered else "relaxed"
        source = _TICKET.format(order=order)
        name = f"tvm_fusion_draw_ticket_{order}"
        return T.bind(
            T.cuda.func_call(name, counter, last, source_code=source, return_type="int32")
        )
    if is_ordered:
        _fence()
    ticket = T.bind(T.call_extern("int32", "atomic_inc", counter))
    with T.If(tirx.EQ(ticket, last)):
        with T.Then():
            publish(gpu, counter, tirx.const(0, "int32"))
    if is_ordered:
        _fence()
    return ticket


def store_tagged(
    gpu: GPUInfo,
    words: tirx.Buffer,
    place: tuple[tirx.Expr, int],
    word: tirx.Expr,
    tag: tirx.Expr,
    condition: tirx.Expr | None = None,
) -> None:
    """Store an int32 and its tag, which is in the high half, for other blocks, in any order.

    It is stored at an index and an offset, as :func:`read_now` has them, unless there is a
    condition that does not hold.
    """
    index, offset = place
    if gpu.kind == "opencl":
        low = tirx.bitwise_and(word.astype("int64"), i64(0xFFFFFFFF))
        both = tirx.bitwise_or(tirx.shift_left(tag.astype("int64"), i64(32)), low)
        address = T.address_of(words[index + i64(offset)])
        with when(condition):
            T.evaluate(T.call_extern("int64", "atom_xchg", address, both))
        return
    stores = tirx.const(True, "bool") if condition is None else condition
    arguments = (T.address_of(words[index]), tirx.const(offset, "int32"), word, tag, stores)
    T.evaluate(T.cuda.func_call("tvm_fusion_store_tagged", *arguments, source_code=_STORE_TAGGED))


def try_lock(gpu: GPUInfo, lock: tirx.Expr) -> tirx.Expr:
    """One if this thread has got the lock, else zero; :func:`publish` of zero releases it."""
    one = tirx.const(1, "int32")
    before = T.bind(compare_and_swap(gpu, lock, tirx.const(0, "int32"), one))
    acquire(gpu)
    return one - before


def publish(gpu: GPUInfo, address: tirx.Expr, value: tirx.Expr) -> None:
    """Store an integer for other blocks, after all that this thread has read and written."""
    # Whoever reads the value sees all that this thread has seen and written.
    dtype = str(value.ty.dtype)
    if gpu.kind == "opencl":
        _fence()
        name = "atom_xchg" if dtype == "int64" else "atomic_xchg"
        T.evaluate(T.call_extern(dtype, name, address, value))
        return
    bits, register = (64, "l") if dtype == "int64" else (32, "r")
    source = _PUBLISH.format(name=dtype, word=_CUDA_WORDS[dtype], bits=bits, register=register)
    name = f"tvm_fusion_publish_{dtype}"
    T.evaluate(T.cuda.func_call(name, address, value, source_code=source))


def read_now(gpu: GPUInfo, words: tirx.Buffer, index: tirx.Expr, offset: int = 0) -> tirx.Expr:
    """The int64 at ``index + offset``, which other blocks may be changing; orders no other access.

    Reads that differ in the offset alone share the computation of their address.
    """
    if gpu.kind == "opencl":
        return compare_and_swap(gpu, T.address_of(words[index + i64(offset)]), i64(0), i64(0))
    return T.cuda.func_call(
        "tvm_fusion_read_now",
        T.address_of(words[index]),
        tirx.const(offset, "int32"),
        source_code=_READ_NOW,
        return_type="int64",
    )


def differences(gpu: GPUInfo, values: Sequence[tirx.Expr], expected: tirx.Expr) -> tirx.Expr:
    """An int32 that is zero if all of these are as wanted, by as short a chain as possible."""

    def call(name: str, table: str, *arguments: tirx.Expr) -> tirx.Expr:
        source = _LOP3.format(name=name, table=table)
        name = f"tvm_fusion_{name}"
        return T.bind(T.cuda.func_call(name, *arguments, source_code=source, return_type="int32"))

    if gpu.kind == "opencl":
        return functools.reduce(tirx.bitwise_or, (tirx.bitwise_xor(x, expected) for x in values))
    pairs = [(values[k], values[min(k + 1, len(values) - 1)]) for k in range(0, len(values), 2)]
    found = [call("differ", _DIFFER, *pair, expected) for pair in pairs]
    while len(found) > 1:
        rest = found[3:] or [found[-1]]
        found = [*found[3:], call("any", _ANY, *(found + rest)[:3])]
    return found[0]


def address_number(gpu: GPUInfo, address: tirx.Expr) -> tirx.Expr:
    """An address as int64."""
    if gpu.kind == "opencl":
        return T.call_extern("int64", "(long)", address)
    return T.cuda.func_call(
        "tvm_fusion_address", address, source_code=_ADDRESS, return_type="int64"
    )


def bound_address(gpu: GPUInfo, address: tirx.Expr) -> tirx.Expr:
    """The same address, computed here; else the compiler computes it where it is used."""
    if gpu.kind == "opencl":
        return address
    call = T.cuda.func_call(
        "tvm_fusion_pointer", address, source_code=_POINTER, return_type="handle"
    )
    return T.bind(call)


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


def wait_a_moment(
    gpu: GPUInfo,
    turn: tirx.Expr,
    notes: tirx.Buffer,
    places: tuple[int, int],
    give_up: Callable[[], None],
) -> None:
    """Emit a pause on CUDA, short in the first turns; and from some turn on, the end of waiting.

    That is turn :data:`LAST_TURN`, or any one after another thread has waited so long. On CUDA it
    is a trap, which ends the process's use of the GPU, unless the host reads the notes.

    Parameters
    ----------
    gpu : GPUInfo
        The device.
    turn : tirx.Expr
        How often the thread has waited.
    notes : tirx.Buffer
        Has two int64: one that is zero until a thread gives up, and one that is zero unless the
        host reads the former.
    places : tuple[int, int]
        Their places there.
    give_up : Callable
        Emits what a thread does that gives up.
    """
    if gpu.kind == "cuda":
        T.evaluate(T.cuda.func_call("tvm_fusion_pause", turn, source_code=_PAUSE))
    failed, watched = places
    has_failed = tirx.NE(T.bind(read_now(gpu, notes, i64(failed))), i64(0))
    with when(tirx.any(turn >= tirx.const(LAST_TURN, "int32"), has_failed)):
        store_tagged(gpu, notes, (i64(failed), 0), tirx.const(1, "int32"), tirx.const(0, "int32"))
        if gpu.kind == "cuda":
            with when(tirx.EQ(read_now(gpu, notes, i64(watched)), i64(0))):
                T.evaluate(T.cuda.func_call("tvm_fusion_fail", source_code=_FAIL))
        give_up()


def acquire(gpu: GPUInfo) -> None:
    """Emit a fence that orders this thread's later accesses after its reads so far."""
    if gpu.kind == "opencl":
        _fence()
    else:
        T.evaluate(T.cuda.func_call("tvm_fusion_acquire", source_code=_ACQUIRE))


def _fence() -> None:
    """Emit a fence of this work-item's accesses to global memory, in OpenCL."""
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
        Type of the element.
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
