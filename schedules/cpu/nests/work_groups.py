# SPDX-License-Identifier: Apache-2.0
"""Kernels for CPUs as work-groups of OpenCL, for a device that is a CPU.

Each iteration of a parallel loop becomes a work-group of one work-item, whose intermediate results
are its own, in vectors of lengths that OpenCL has::

    before: for i in T.parallel(8):              after: for i in T.thread_binding(8, "blockIdx.x"):
                for j in range(99):                         for j in range(99):
                    for v in T.vectorized(16): ...              for v in T.vectorized(16): ...
                for v in T.vectorized(15): ...              for v in range(15): ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx

from schedules.tir.expression_walk import extern_name, nodes, op_name, substitute
from schedules.tir.extents import constant

from .streaming_stores import buffer_bytes, is_fence, opencl_store
from .vector_loads import IMPORT, opencl_planes

_LENGTHS = (16, 8, 4, 2)
_PRIVATE_BYTES = 32 * 1024
"""Private memory of a work-item, which is on a thread's stack."""
_LLVM_ONLY = ("tirx.call_llvm_intrin", "tirx.call_llvm_pure_intrin", "tirx.call_pure_extern")
_ROUNDED = "#pragma OPENCL FP_CONTRACT OFF\n"
"""Products and sums are joined where the rules did, so that results have the bits of the CPU."""


def _lower_fma(call: ir.Call) -> ir.Call:
    return tirx.call_pure_extern(call.ty, "fma", *call.args)


tvm.ir.register_op_attr("tirx.fma", "opencl.FLowerIntrinsic", _lower_fma)  # TVM has none


@dataclass(frozen=True)
class WorkGroups:
    """A function for OpenCL."""

    func: tirx.PrimFunc  # The function, scheduled.
    before: tuple[str, ...]  # What stands before its kernels in OpenCL: functions that they call.


def work_groups(
    func: tirx.PrimFunc,  # A function that our rules have scheduled for a CPU.
) -> WorkGroups | None:
    """Bind the parallel loops of a function to blocks.

    Returns None if its kernels have instructions for which OpenCL has no name, or a thread has
    large intermediate results.
    """
    root = func.body.block
    body = _grouped(root.body)
    private = _private(body, root.alloc_buffers)
    if private is None:
        return None
    body = substitute(body, private)
    body = tvm_ffi.structural_map(body, (tirx.For, _of_known_length))
    called = _called(body)
    if called is None or not all(map(_is_known_vector, nodes(body, ir.Expr))):
        return None
    block = s_tir.SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        body,
        root.init,
        [private.get(buffer, buffer) for buffer in root.alloc_buffers],
        root.match_buffers,
        root.annotations,
    )
    done = func.with_body(s_tir.SBlockRealize([], func.body.predicate, block))
    return WorkGroups(done, (_ROUNDED, *called))


def _grouped(stmt: tirx.Stmt) -> tirx.Stmt:
    """Each nest of a function in work-groups: one where it has no parallel loop outside."""
    if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == IMPORT:
        return _grouped(stmt.body)
    if isinstance(stmt, tirx.SeqStmt):
        # The end of a kernel orders its stores, as the fence does for the thread that calls it.
        kept = [each for each in stmt.seq if not is_fence(each)]
        return tirx.SeqStmt([_grouped(each) for each in kept]) if kept[1:] else _grouped(kept[0])
    if isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.PARALLEL:
        return _bound(stmt.loop_var, stmt.extent, _serial(stmt.body))
    if isinstance(stmt, tirx.For | s_tir.SBlockRealize):
        return _bound(tirx.Var("group", "int64"), tirx.const(1, "int64"), _serial(stmt))
    return stmt


def _bound(var: tirx.Var, extent: tirx.Expr, body: tirx.Stmt) -> tirx.For:
    block = tirx.IterVar(
        None,
        tirx.Var("blockIdx.x", var.ty),
        tirx.IterVar.ThreadIndex,
        "blockIdx.x",
    )
    zero = tirx.const(0, str(var.ty.dtype))
    return tirx.For(var, zero, extent, tirx.ForKind.THREAD_BINDING, body, block)


def _serial(stmt: tirx.Stmt) -> tirx.Stmt:
    def rewrite(loop: tirx.For) -> tirx.For:
        return _serial_loop(loop) if loop.kind == tirx.ForKind.PARALLEL else loop

    return tvm_ffi.structural_map(stmt, (tirx.For, rewrite))


def _serial_loop(loop: tirx.For) -> tirx.For:
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)


def _of_known_length(loop: tirx.For) -> tirx.For:
    """A vector loop in the longest vectors of OpenCL that divide it."""
    extent = constant(loop.extent)
    if loop.kind != tirx.ForKind.VECTORIZED or extent in _LENGTHS:
        return loop
    lanes = next((n for n in _LENGTHS if extent and extent % n == 0), None)
    if lanes is None or extent is None:
        return _serial_loop(loop)
    var, zero = loop.loop_var, loop.min
    dtype = str(var.ty.dtype)
    outer, lane = tirx.Var(f"{var.name}_outer", var.ty), tirx.Var(var.name, var.ty)
    body = substitute(loop.body, {var: outer * tirx.const(lanes, dtype) + lane})
    inner = tirx.For(lane, zero, tirx.const(lanes, dtype), tirx.ForKind.VECTORIZED, body)
    return tirx.For(outer, zero, tirx.const(extent // lanes, dtype), tirx.ForKind.UNROLLED, inner)


def _private(body: tirx.Stmt, buffers: Sequence[ir.Var]) -> dict[ir.Var, ir.Var] | None:
    """Buffers that one nest uses alone, and those of a work-item that take their place."""
    if any(block.alloc_buffers for block in nodes(body, s_tir.SBlock)):
        return None
    groups = [loop for loop in nodes(body, tirx.For) if loop.kind == tirx.ForKind.THREAD_BINDING]
    used = [set(nodes(group, ir.Var)) for group in groups]
    private = [buffer for buffer in buffers if sum(buffer in variables for variables in used) == 1]
    sizes = list(map(buffer_bytes, private))
    if 0 in sizes or sum(sizes) > _PRIVATE_BYTES:
        return None
    return {
        buffer: tirx.decl_buffer(
            buffer.shape, str(buffer.dtype), buffer.name, scope="local", layout=buffer.ty.layout
        )
        for buffer in private
    }


def _called(body: tirx.Stmt) -> tuple[str, ...] | None:
    """OpenCL of the functions that are called; None if there is one of which there is none."""
    calls = nodes(body, ir.Call)
    if any(op_name(call) in _LLVM_ONLY for call in calls):
        return None
    names = sorted(set(filter(None, map(extern_name, calls))))
    texts = [opencl_store(name) or opencl_planes(name) for name in names]
    return None if None in texts else tuple(text for text in texts if text)


def _is_known_vector(expression: ir.Expr) -> bool:
    dtype = getattr(expression.ty, "dtype", None)  # memory has none
    return dtype is None or tvm_ffi.dtype(str(dtype)).lanes in (1, *_LENGTHS)
