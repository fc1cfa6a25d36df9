# SPDX-License-Identifier: Apache-2.0
"""Tails: what to do when a loop is no multiple of its tile.

A guard in each tile would keep LLVM from using vectors. There are two ways around it; both rewrite
a finished schedule.

:func:`overlap_tails` lets the last tile start earlier and compute some elements a second time::

    before: for o in range(63):                    after: for o in range(63):
                for i in T.vectorized(16):                     for i in T.vectorized(16):
                    v = o * 16 + i                                 v = T.min(o * 16, 984) + i
                    T.where(o * 16 + i < 1000)

It is right only where computing an element twice gives the same value: a tile must hold all of its
work (a whole reduction, not a part of it), and the output must not be an input.

:func:`truncate_tails` writes the tail as code of its own, for reductions and for outputs that are
also inputs; it can also cut the loop where a condition on it changes::

    before: for o in range(63):                    after: for o in range(62):
                for i in T.vectorized(16):                     for i in T.vectorized(16): ...
                    T.where(o * 16 + i < 1000)             for i in T.vectorized(8): ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from .facts import uses

TAIL = "tvm_fusion.tail"
"""Annotation of the outermost part of a split loop; :func:`truncate_tails` says what it holds."""


@dataclass(frozen=True)
class Overlap:
    """Which axis of which block is tiled with an overlapping last tile.

    Parameters
    ----------
    block : str
        Name of the block.
    positions : tuple[int, ...]
        Consecutive iteration variables that were fused, row-major, into the tiled axis.
    tile : int
        Elements of one tile along that axis; at most the axis' extent.
    """

    block: str
    positions: tuple[int, ...]
    tile: int


def overlap_of(sch: s_tir.Schedule, block: SBlockRV, loop: LoopRV, tile: int) -> Overlap | None:
    """The overlap of a block along the axis that ``loop`` counts the tiles of.

    Parameters
    ----------
    sch : Schedule
        The schedule, before ``loop`` is fused with loops over other axes.
    block : SBlockRV
        A block under the loop.
    loop : LoopRV
        The outer part of a split loop.
    tile : int
        Iterations of the inner parts together.

    Returns
    -------
    Overlap | None
        None if the tile divides the axis, or if the block does not depend on the loop.
    """
    realize = tvm_ffi.get_global_func("s_tir.schedule.GetSBlockRealize")(sch, block)
    var = sch.get(loop).loop_var
    positions = tuple(k for k, value in enumerate(realize.iter_values) if uses(value, var))
    total = math.prod(int(realize.block.iter_vars[k].dom.extent) for k in positions)
    if not positions or total % tile == 0:
        return None
    return Overlap(realize.block.name_hint, positions, tile)


def overlap_tails(func: tirx.PrimFunc, overlaps: Sequence[Overlap]) -> tirx.PrimFunc:
    """Replace the guards of the listed axes by an overlapping last tile.

    Parameters
    ----------
    func : PrimFunc
        A scheduled function whose block names are unique.
    overlaps : Sequence[Overlap]
        The axes; a block may be listed once for each of its axes.

    Returns
    -------
    PrimFunc
        The function without these guards.
    """
    if not overlaps:
        return func
    analyzer = _analyzer_of_loops(func)

    def rewrite(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        for overlap in overlaps:
            if realize.block.name_hint == overlap.block:
                realize = _overlap_axis(realize, overlap, analyzer)
        return realize

    return tvm_ffi.structural_map(func, (s_tir.SBlockRealize, rewrite))


def _analyzer_of_loops(func: tirx.PrimFunc) -> sym.Analyzer:
    analyzer = sym.Analyzer()
    tvm_ffi.structural_walk(
        func.body,
        (tirx.For, lambda loop: analyzer.bind(
            loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent)
        )),
    )
    return analyzer


def _overlap_axis(
    realize: s_tir.SBlockRealize, overlap: Overlap, analyzer: sym.Analyzer
) -> s_tir.SBlockRealize:
    extents = [int(realize.block.iter_vars[k].dom.extent) for k in overlap.positions]
    total = math.prod(extents)
    values = list(realize.iter_values)
    position = values[overlap.positions[0]]
    for k, extent in zip(overlap.positions[1:], extents[1:], strict=True):
        position = position * extent + values[k]
    position = analyzer.simplify(position)
    start = analyzer.simplify(tirx.floordiv(position, overlap.tile) * overlap.tile)
    inside = analyzer.simplify(tirx.floormod(position, overlap.tile))
    moved = tirx.Min(start, _like(position, total - overlap.tile)) + inside
    stride = total
    for k, extent in zip(overlap.positions, extents, strict=True):
        stride //= extent
        part = moved if stride == 1 else tirx.floordiv(moved, stride)
        values[k] = part if k == overlap.positions[0] else tirx.floormod(part, extent)
    kept = [
        guard
        for guard in _conjuncts(realize.predicate)
        if not _bounds(guard, position, total, analyzer)
    ]
    predicate = tirx.all(*kept) if kept else tirx.IntImm("bool", 1)
    return s_tir.SBlockRealize(values, predicate, realize.block)


def _conjuncts(predicate: ir.Expr) -> list[ir.Expr]:
    if isinstance(predicate, tirx.And):
        return _conjuncts(predicate.a) + _conjuncts(predicate.b)
    return [predicate]


def _bounds(guard: ir.Expr, position: ir.Expr, total: int, analyzer: sym.Analyzer) -> bool:
    """Whether ``guard`` says just that ``position`` is inside the axis, or nothing at all."""
    if isinstance(guard, tirx.IntImm):
        return bool(guard.value)
    if not isinstance(guard, tirx.LT):
        return False
    difference = analyzer.simplify(guard.b - guard.a - (total - position))
    return isinstance(difference, tirx.IntImm) and int(difference) == 0


def truncate_tails(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give every loop that is annotated with ``TAIL`` a tail of its own.

    Parameters
    ----------
    func : PrimFunc
        A scheduled function. The annotation is a list: how many loops, perfectly nested from the
        annotated one on, are the parts of one split loop, and then where to cut that loop, the
        last number being its length; ``[2, 1000]`` is the example above. -1 for the length takes
        it from the block's guard.

    Returns
    -------
    PrimFunc
        The function without these annotations.
    """

    buffers = _Buffers(func)

    def rewrite(loop: tirx.For) -> tirx.Stmt:
        if TAIL not in loop.annotations:
            return loop
        depth, *ends = (int(value) for value in loop.annotations[TAIL])
        chain = _perfect_nest(loop, depth)
        bounds = [_like(loop.loop_var, end) for end in (0, *ends)]
        if ends[-1] < 0:
            bounds[-1] = _guard_bound(chain[-1].body)
        private = buffers.private_to(loop)
        pieces: list[tirx.Stmt] = []
        for start, end in zip(bounds, bounds[1:], strict=False):
            last = chain[-1].loop_var
            shifted = _substitute_nest(chain, {last: last + start})
            for piece in _truncated(shifted, sym.Analyzer().simplify(end - start)):
                pieces.append(buffers.with_own(piece, private) if pieces else piece)
        return pieces[0] if len(pieces) == 1 else tirx.SeqStmt(pieces)

    return buffers.allocate(tvm_ffi.structural_map(func, (tirx.For, rewrite)))


class _Buffers:
    """The temporary buffers of a function.

    A copy of a loop gets copies of the buffers that only this loop uses: shared by two copies, the
    few registers' worth of accumulators of one tile would grow to a whole row in memory.
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        self._all: list[ir.Var] = list(func.body.block.alloc_buffers)
        self._uses = [_count(func.body.block.body, buffer) for buffer in self._all]
        self._added: list[ir.Var] = []

    def private_to(self, loop: tirx.For) -> list[ir.Var]:
        return [
            buffer
            for buffer, total in zip(self._all, self._uses, strict=True)
            if total and _count(loop, buffer) == total
        ]

    def with_own(self, piece: tirx.Stmt, buffers: Sequence[ir.Var]) -> tirx.Stmt:
        own: dict[ir.Var, ir.Expr] = {}
        for buffer in buffers:
            own[buffer] = tirx.decl_buffer(
                buffer.shape, str(buffer.dtype), buffer.name, scope=buffer.scope()
            )
        self._added += own.values()
        return _substitute(piece, own)

    def allocate(self, func: tirx.PrimFunc) -> tirx.PrimFunc:
        if not self._added:
            return func
        root = func.body.block
        block = s_tir.SBlock(
            root.iter_vars,
            root.reads,
            root.writes,
            root.name_hint,
            root.body,
            root.init,
            [*root.alloc_buffers, *self._added],
            root.match_buffers,
            root.annotations,
        )
        return func.with_body(s_tir.SBlockRealize([], func.body.predicate, block))


def _count(stmt: tirx.Stmt, var: ir.Var) -> int:
    found = [0]

    def visit(node: ir.Var) -> None:
        found[0] += node.same_as(var)

    tvm_ffi.structural_walk(stmt, (ir.Var, visit))
    return found[0]


def _like(expr: ir.Expr, value: int) -> ir.Expr:
    """The constant ``value`` in the type of ``expr``."""
    return tirx.IntImm(str(expr.ty.dtype), value)


def _perfect_nest(loop: tirx.For, depth: int) -> list[tirx.For]:
    chain = [loop]
    while len(chain) < depth:
        chain.append(chain[-1].body)
    return chain


def _guard_bound(realize: s_tir.SBlockRealize) -> ir.Expr:
    """The right side of the block's one guard ``position < bound``."""
    return next(g for g in _conjuncts(realize.predicate) if isinstance(g, tirx.LT)).b


def _substitute_nest(chain: Sequence[tirx.For], values: dict[ir.Var, ir.Expr]) -> list[tirx.For]:
    """The nest with another body; its own loop variables stay."""
    body = _substitute(chain[-1].body, values)
    result: list[tirx.For] = []
    for loop in reversed(chain):
        result.insert(0, tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body))
        body = result[0]
    return result


def _truncated(chain: Sequence[tirx.For], count: ir.Expr) -> list[tirx.Stmt]:
    """Loops that run the first ``count`` iterations of the nest, counted row-major."""
    loop, inner = chain[0], math.prod(int(part.extent) for part in chain[1:])
    analyzer = sym.Analyzer()
    full = analyzer.simplify(tirx.floordiv(count, inner))
    rest = analyzer.simplify(tirx.floormod(count, inner))
    pieces = []
    if not _is(full, 0):
        pieces.append(_fresh(_nest(chain, full)))
    if not _is(rest, 0):
        tail = _substitute_nest(chain[1:], {loop.loop_var: full})
        pieces += _truncated(tail, rest)
    return pieces


def _nest(chain: Sequence[tirx.For], extent: ir.Expr) -> tirx.Stmt:
    """The nest with another extent of its outermost loop and without the guard that it obeys."""
    body: tirx.Stmt = chain[-1].body
    if isinstance(body, s_tir.SBlockRealize):
        body = s_tir.SBlockRealize(body.iter_values, tirx.IntImm("bool", 1), body.block)
    for loop in reversed(chain[1:]):
        body = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body)
    loop = chain[0]
    if _is(extent, 1):
        return _substitute(body, {loop.loop_var: _like(loop.loop_var, 0)})
    # A vector has a constant length.
    constant = isinstance(extent, tirx.IntImm) or loop.kind != tirx.ForKind.VECTORIZED
    kind = loop.kind if constant else tirx.ForKind.SERIAL
    return tirx.For(loop.loop_var, loop.min, extent, kind, body)


def _is(expr: ir.Expr, value: int) -> bool:
    return isinstance(expr, tirx.IntImm) and int(expr) == value


def _substitute(stmt: tirx.Stmt, values: dict[ir.Var, ir.Expr]) -> tirx.Stmt:
    def replace(var: ir.Var) -> ir.Expr:
        for old, new in values.items():
            if var.same_as(old):
                return new
        return var

    return tvm_ffi.structural_map(stmt, (ir.Var, replace))


def _fresh(stmt: tirx.Stmt) -> tirx.Stmt:
    """A copy that defines loop and iteration variables of its own."""
    defined: list[ir.Var] = []
    tvm_ffi.structural_walk(
        stmt,
        [
            (tirx.For, lambda loop: defined.append(loop.loop_var)),
            (tirx.IterVar, lambda axis: defined.append(axis.var)),
        ],
    )
    return _substitute(stmt, {var: tirx.Var(var.name, var.ty) for var in defined})
