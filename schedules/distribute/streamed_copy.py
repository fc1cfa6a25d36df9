# SPDX-License-Identifier: Apache-2.0
"""Copy past the caches, into memory of which another process has read what it held before.

A store into a cache line that another core holds waits until that core has given it up; where the
two share no cache, a line takes tens of nanoseconds. A streaming store waits for nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tvm
from tvm import IRModule, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from schedules.tir.statements import STORE_FENCE_LLVM, store_fence

UNIT = 16
"""Bytes of which a piece, and the address to which it goes, are multiples."""

LEAST_BYTES, MOST_BYTES = 16 * 1024, 256 * 1024
"""Bounds of copies that are streamed: shorter messages stay in the caches, and longer ones belong
to exchanges between which little is computed. Kernels of networks stream these, too.

Measured between two ranks of one node, each of which packs, sends, receives and unpacks, stored
plainly and streamed, on two cores of a Zen 4 that share a cache, and on two that do not: 32 KB in
8.8 and 10, 21 and 9.3 us; 256 KB 36 and 44, 145 and 36; 1 MB 55 and 172 us on those that share it.
"""

STREAM = "tvm_fusion_stream"
TEXT = f"""
define i32 @{STREAM}(i64 %to, i64 %from, i64 %size) alwaysinline {{
begin:
  %none = icmp eq i64 %size, 0
  br i1 %none, label %end, label %unit
unit:
  %at = phi i64 [ 0, %begin ], [ %next, %unit ]
  %to_here = add i64 %to, %at
  %from_here = add i64 %from, %at
  %target = inttoptr i64 %to_here to ptr
  %source = inttoptr i64 %from_here to ptr
  %value = load <{UNIT} x i8>, ptr %source, align 1
  store <{UNIT} x i8> %value, ptr %target, align {UNIT}, !nontemporal !{{i32 1}}
  %next = add i64 %at, {UNIT}
  %more = icmp ult i64 %next, %size
  br i1 %more, label %unit, label %end
end:
  ret i32 0
}}
{STORE_FENCE_LLVM}"""
"""LLVM IR for x86: a copy, and the fence between it and the word that it is there."""


def streamed_copy_kernel() -> tirx.PrimFunc:
    """The kernel of a copy of pieces, which lie apart, to one behind the other.

    Its arguments are the two addresses, bytes of a piece, how many there are, and bytes from the
    begin of one to that of the next.
    """
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            names = "to", "source", "size", "count", "stride"
            to, source, size, count, stride = (T.arg(name, T.int64()) for name in names)
            T.func_attr({"tirx.is_scheduled": True})
            with T.sblock("root"):
                T.reads()
                T.writes()
                with T.attr(T.int32(0), "pragma_import_llvm", TEXT):
                    with T.serial(T.int64(0), count) as n:
                        places = to + n * size, source + n * stride
                        T.evaluate(T.call_extern("int32", STREAM, *places, size))
                    T.add_to_parent(store_fence())
    return builder.get()


@functools.cache
def streamed_copy() -> Callable[[int, int, int, int, int], None]:
    """Compile :func:`streamed_copy_kernel` for this machine, an x86-64."""
    module = IRModule({"main": streamed_copy_kernel()})
    compiled: Callable[[int, int, int, int, int], None] = tvm.compile(module, "llvm")["main"]
    return compiled
