# SPDX-License-Identifier: Apache-2.0
"""Merged loops over one-dimensional views of the parameters.

TVM simplifies each index of a buffer for itself. Where three loops or more are fused, and vectors
cross the ends of the innermost or a buffer is accessed from an offset known at run time only, that
spoils the sum of the indices: it is no plain vector any more, and LLVM computes each lane's address
by divisions. So such loops are merged before they are scheduled::

    before: for i, j, c in T.grid(4096, 4096, 3):   after: for m in range(50331648):
                o[i + lo, j, c] = a[i, j, c] * 2               o[m + lo * 12288] = a[m] * 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from schedules.tir.expression_walk import substitute, variables
from schedules.tir.extents import size_of
from schedules.tir.index_math import as_type

from .blocks import BlockFacts, Domain, Kernel, open_blocks
from .loop_transforms import merge_groups, state_init
from .streaming_stores import worth_streaming
from .vector_loads import is_interleaved

Facts = Sequence[BlockFacts | None]


def merge_shifted_loops(
    kernel: Kernel,  # A function whose blocks have been inlined where that is possible.
    known: Facts,
) -> tuple[Kernel, Facts]:
    """Merge the loops that every access traverses as one, where their sum would be lost.

    Returns the same kernel and facts where no block is of that kind; else facts are None.
    """
    func = kernel.sch.mod["main"]
    parameters = set(func.params)
    shifted = {
        facts.name: facts
        for facts in known
        if facts is not None and _is_shifted(kernel, facts, parameters)
    }
    if not shifted:
        return kernel, known
    views = _Views()
    root = func.body
    body = root.block.body
    parts = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    parts = [_merge_nest(part, shifted, views) for part in parts]
    block = s_tir.SBlock(
        root.block.iter_vars,
        root.block.reads,
        root.block.writes,
        root.block.name_hint,
        tirx.SeqStmt([*views.statements, *parts]),
        root.block.init,
        root.block.alloc_buffers,
        root.block.match_buffers,
        root.block.annotations,
    )
    merged = func.with_body(s_tir.SBlockRealize([], root.predicate, block))
    opened = open_blocks(s_tir.Schedule(merged), kernel.cpu)
    return (kernel, known) if opened is None else (opened, [None] * len(opened.blocks))


def _is_shifted(kernel: Kernel, facts: BlockFacts, parameters: set[ir.Var]) -> bool:
    """True if fused loops of a block would lose the plain vectors of its accesses."""
    if set(facts.kinds) - {"S"} or facts.indirect:
        return False
    if any(access.buffer not in parameters for access in facts.accesses):
        return False
    groups = merge_groups(facts, range(len(facts.extents)))
    if max(map(len, groups), default=1) == 1:
        return False
    if any(_crosses(facts, group, kernel.lanes(facts)) for group in groups):
        return True
    own = set(facts.vars)
    moved = any(variables(access.offset) - own for access in facts.accesses)
    return moved or worth_streaming(kernel, facts) or is_interleaved(facts, groups[-1][-1])


def _crosses(facts: BlockFacts, group: list[int], lanes: int) -> bool:
    """True if a vector of three merged loops or more is no whole part of the innermost."""
    innermost = facts.extents[group[-1]]
    return len(group) > 2 and innermost is not None and innermost % lanes != 0


class _Views:
    """One-dimensional views of buffers, and the statements that declare them."""

    def __init__(self) -> None:
        self._views: dict[ir.Var, ir.Var] = {}
        self.statements: list[tirx.Stmt] = []

    def of(self, buffer: ir.Var) -> ir.Var:
        if buffer not in self._views:
            size = as_type(size_of(buffer.shape), "int64")
            view = tirx.decl_buffer((size,), str(buffer.dtype), f"{buffer.name}_flat")
            self._views[buffer] = view
            self.statements.append(tirx.DeclBuffer(view, data=buffer.data))
        return self._views[buffer]


def _merge_nest(nest: tirx.Stmt, shifted: dict[str, BlockFacts], views: _Views) -> tirx.Stmt:
    """The nest of one of the blocks found, with its loops merged; others stay."""
    stmt, loops = nest, []
    while isinstance(stmt, tirx.For):
        loops.append(stmt)
        stmt = stmt.body
    if not isinstance(stmt, s_tir.SBlockRealize) or stmt.block.name_hint not in shifted:
        return nest
    facts = shifted[stmt.block.name_hint]
    axes, values = _merged_axes(stmt.block, facts)
    loop_vars = [tirx.Var(axis.var.name, axis.var.ty) for axis in axes]
    merged: tirx.Stmt = s_tir.SBlockRealize(
        loop_vars, stmt.predicate, _over_views(stmt.block, facts, axes, values, views)
    )
    for var, axis in zip(reversed(loop_vars), reversed(axes), strict=True):
        merged = tirx.For(var, axis.dom.min, axis.dom.extent, tirx.ForKind.SERIAL, merged)
    return merged


def _merged_axes(
    block: s_tir.SBlock, facts: BlockFacts
) -> tuple[list[tirx.IterVar], dict[ir.Var, tirx.Expr]]:
    """One iteration variable a group, and the old variables in terms of them."""
    axes, values = [], {}
    for group in merge_groups(facts, range(len(facts.extents))):
        old = [block.iter_vars[k] for k in group]
        dtype = str(old[0].var.ty.dtype)
        var = tirx.Var("_".join(axis.var.name for axis in old), dtype)
        extent = old[0].dom.extent if len(old) == 1 else tirx.const(facts.volume(group), dtype)
        axes.append(tirx.IterVar(ir.Range(0, extent), var, tirx.IterVar.DataPar))
        inner = facts.volume(group)
        for axis, k in zip(old, group, strict=True):
            if len(group) == 1:
                values[axis.var] = var
                continue
            inner //= facts.volume([k])
            values[axis.var] = tirx.floormod(tirx.floordiv(var, inner), axis.dom.extent)
    return axes, values


def _over_views(
    block: s_tir.SBlock,
    facts: BlockFacts,
    axes: Sequence[tirx.IterVar],
    values: Mapping[ir.Var, tirx.Expr],
    views: _Views,
) -> s_tir.SBlock:
    """The block with other iteration variables, whose accesses go through the views."""
    domain = Domain(list(block.iter_vars))
    groups = merge_groups(facts, range(len(facts.extents)))

    def place(buffer: ir.Var, indices: Sequence[tirx.Expr]) -> tirx.Expr:
        access = domain.access(buffer, indices)
        offset = access.offset
        for axis, group in zip(axes, groups, strict=True):
            first = {facts.vars[k]: tirx.const(0, str(facts.vars[k].ty.dtype)) for k in group}
            if len(group) > 1:
                offset = substitute(offset, first) + axis.var * access.strides[group[-1]]
        return Analyzer().simplify(substitute(offset, values))

    def load(node: ir.TensorLoad) -> ir.TensorLoad:
        return views.of(node.source)[place(node.source, list(node.indices))]

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        offset = place(node.buffer, list(node.indices))
        return tirx.BufferStore(views.of(node.buffer), node.value, [offset])

    body = state_init(block).body
    body = tvm_ffi.structural_map(body, [(ir.TensorLoad, load), (tirx.BufferStore, store)])
    reads, writes = (
        [tirx.BufferRegion(view, [_all_of(view)]) for view in (views.of(r.source) for r in regions)]
        for regions in (block.reads, block.writes)
    )
    return s_tir.SBlock(axes, reads, writes, block.name_hint, substitute(body, values))


def _all_of(view: ir.Var) -> ir.Range:
    return ir.Range(0, view.shape[0])
