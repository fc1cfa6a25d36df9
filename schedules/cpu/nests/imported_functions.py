# SPDX-License-Identifier: Apache-2.0
"""Functions in LLVM IR that a kernel brings with it, for what TVM has no instruction.

They are linked and inlined; buffers through which they take and give vectors stay in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, s_tir, tirx

IMPORT = "pragma_import_llvm"
"""Attribute around what calls the functions: their text."""


def with_functions(
    func: tirx.PrimFunc, buffers: Sequence[ir.Var], text: str, end: tirx.Stmt | None = None
) -> tirx.PrimFunc:
    """The function with more buffers, imported functions, and a statement at its end."""
    root = func.body
    body = root.block.body if end is None else tirx.SeqStmt([root.block.body, end])
    block = s_tir.SBlock(
        root.block.iter_vars,
        root.block.reads,
        root.block.writes,
        root.block.name_hint,
        tirx.AttrStmt(tirx.IntImm("int32", 0), IMPORT, ir.StringImm(text), body),
        root.block.init,
        [*root.block.alloc_buffers, *buffers],
        root.block.match_buffers,
        root.block.annotations,
    )
    return func.with_body(s_tir.SBlockRealize([], root.predicate, block))


def axis_along(loop: tirx.For) -> tirx.IterVar:
    """A new iteration variable of a block for a loop."""
    zero = tirx.const(0, str(loop.loop_var.ty.dtype))
    return tirx.IterVar(ir.Range(zero, loop.extent), tirx.Var("at", loop.loop_var.ty), 0)
