# SPDX-License-Identifier: Apache-2.0
"""Tails: by tiles that overlap, or by code of their own.

A guard in each tile would keep LLVM from using vectors. The last tile of a loop that is no multiple
of its tile can start earlier instead and compute some elements a second time::

    before: for o in range(63):                    after: for o in range(63):
                for i in T.vectorized(16):                     for i in T.vectorized(16):
                    v = o * 16 + i                                 v = T.min(o * 16, 984) + i
                    T.where(o * 16 + i < 1000)

It is right only where computing an element twice gives the same value: a tile must hold all of its
work (a whole reduction, not a part of it), and the output must not be an input.

Where tiles must not overlap (reductions, outputs that are also inputs) the rest of a loop becomes a
loop of its own; and a loop can be cut where a condition on it changes::

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
from tvm.topi.utils import ravel_index

from schedules import attributes
from schedules.tir.expression_walk import substitute, uses, variables
from schedules.tir.extents import constant

from .blocks import realize_of


@dataclass(frozen=True)
class Overlap:
    """Axis of a block that is tiled with an overlapping last tile."""

    block: str  # Name of the block.
    positions: tuple[int, ...]
    """Consecutive iteration variables that were fused, row-major, into the tiled axis."""
    tile: int  # Elements of one tile along that axis; at most the axis' extent.


def overlap_of(
    sch: s_tir.Schedule,  # The schedule, before ``loop`` is fused with loops over other axes.
    block: SBlockRV,  # A block under the loop.
    loop: LoopRV,  # The outer part of a split loop.
    tile: int,  # Iterations of the inner parts together.
) -> Overlap | None:
    """The overlap of a block along the axis whose tiles ``loop`` counts.

    Returns None if the tile divides the axis, if the block does not depend on the loop, or if an
    iteration computes anything but the next tile (reshaped, reversed or shifted axes).
    """
    realize = realize_of(sch, block)
    var = sch.get(loop).loop_var
    positions = tuple(k for k, value in enumerate(realize.iter_values) if uses(value, var))
    extents = [realize.block.iter_vars[k].dom.extent for k in positions]
    if not positions or not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    total = math.prod(int(extent) for extent in extents)
    if total % tile == 0 or total < tile:
        return None
    analyzer = sym.Analyzer()
    for around in sch.get_loops(block):
        outer = sch.get(around)
        analyzer.bind(outer.loop_var, ir.Range.from_min_extent(outer.min, outer.extent))
    inside = analyzer.simplify(_place(realize, positions) - var * tile)
    bound = analyzer.const_int_bound(inside)
    if uses(inside, var) or bound.min_value < 0 or bound.max_value >= tile:
        return None
    return Overlap(realize.block.name_hint, positions, tile)


def _place(realize: s_tir.SBlockRealize, positions: Sequence[int]) -> ir.Expr:
    """The iteration along the axis into which variables are fused, row-major."""
    extents = [realize.block.iter_vars[k].dom.extent for k in positions]
    return ravel_index([realize.iter_values[k] for k in positions], extents)


def overlap_tails(
    func: tirx.PrimFunc,  # A scheduled function whose block names are unique.
    overlaps: Sequence[Overlap],  # The axes; a block may be listed once for each of its axes.
) -> tirx.PrimFunc:
    """Replace the guards of the listed axes by an overlapping last tile.

    Returns the function without these guards.
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
        (
            tirx.For,
            lambda loop: analyzer.bind(
                loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent)
            ),
        ),
    )
    return analyzer


def _overlap_axis(
    realize: s_tir.SBlockRealize, overlap: Overlap, analyzer: sym.Analyzer
) -> s_tir.SBlockRealize:
    extents = [int(realize.block.iter_vars[k].dom.extent) for k in overlap.positions]
    total = math.prod(extents)
    values = list(realize.iter_values)
    position = analyzer.simplify(_place(realize, overlap.positions))
    start = analyzer.simplify(tirx.floordiv(position, overlap.tile) * overlap.tile)
    inside = analyzer.simplify(tirx.floormod(position, overlap.tile))
    moved = tirx.Min(start, tirx.IntImm(str(position.ty.dtype), total - overlap.tile)) + inside
    stride = total
    for k, extent in zip(overlap.positions, extents, strict=True):
        stride //= extent
        part = moved if stride == 1 else tirx.floordiv(moved, stride)
        values[k] = part if k == overlap.positions[0] else tirx.floormod(part, extent)
    # Only this axis' guard depends on the place inside the tile.
    inner = variables(inside)
    kept = [
        guard
        for guard in conjuncts(realize.predicate)
        if not uses(guard, *inner) and not isinstance(guard, tirx.IntImm)
    ]
    predicate = tirx.all(*kept) if kept else tirx.IntImm("bool", 1)
    return s_tir.SBlockRealize(values, predicate, realize.block)


def conjuncts(predicate: ir.Expr) -> list[ir.Expr]:
    """The conditions that a predicate joins by ``and``."""
    if isinstance(predicate, tirx.And):
        return conjuncts(predicate.a) + conjuncts(predicate.b)
    return [predicate]


class Tails:
    """Overlaps that are found while a function is scheduled, and named when it is finished."""

    def __init__(self, sch: s_tir.Schedule) -> None:
        self._sch = sch
        self._found: list[Overlap] = []
        self._parts: dict[str, list[str]] = {}

    def add(self, block: SBlockRV, loop: LoopRV, tile: int) -> None:
        """Let the last tile that ``loop`` counts overlap in ``block``, if the tile does not fit."""
        overlap = overlap_of(self._sch, block, loop, tile)
        if overlap is not None:
            self._found.append(overlap)

    def decompose(self, block: SBlockRV, loop: LoopRV) -> SBlockRV:
        """Decompose a reduction at ``loop``; return the block of its initial values."""
        name = self._sch.get(block).name_hint
        init = self._sch.decompose_reduction(block, loop)
        self._parts[name] = [self._sch.get(part).name_hint for part in (init, block)]
        return init

    def collect(self) -> list[Overlap]:
        """All overlaps, for both parts of each decomposed reduction."""
        return [
            Overlap(name, overlap.positions, overlap.tile)
            for overlap in self._found
            for name in self._parts.get(overlap.block, [overlap.block])
        ]


def truncate_tails(
    # A scheduled function. The annotation is a list: the number of loops, perfectly nested from the
    # annotated one on, that are the parts of one split loop, and then the cuts of that loop, the
    # last number being its length; ``[2, 1000]`` is the example above. -1 for the length takes it
    # from the block's guard, or, without one, from the loops.
    func: tirx.PrimFunc,
) -> tirx.PrimFunc:
    """Give every loop that is annotated with ``TAIL`` a separate tail.

    Returns the function without these annotations.
    """
    buffers = _Buffers(func)

    def rewrite(loop: tirx.For) -> tirx.Stmt:
        if attributes.TAIL not in loop.annotations:
            return loop
        depth, *ends = (int(value) for value in loop.annotations[attributes.TAIL])
        chain = _perfect_nest(loop, depth)
        bounds = [_like(loop.loop_var, end) for end in (0, *ends)]
        if ends[-1] < 0:
            bounds[-1] = _guard_bound(chain)
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
    accumulators of one tile would grow from a few registers to a whole row in memory.
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
        replacements: dict[ir.Var, ir.Expr] = {}
        for buffer in buffers:
            replacements[buffer] = tirx.decl_buffer(
                buffer.shape, str(buffer.dtype), buffer.name, scope=buffer.scope()
            )
        self._added += replacements.values()
        return substitute(piece, replacements)

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
    count = [0]

    def visit(node: ir.Var) -> None:
        count[0] += node.same_as(var)

    tvm_ffi.structural_walk(stmt, (ir.Var, visit))
    return count[0]


def _like(expr: ir.Expr, value: int) -> ir.Expr:
    """The constant ``value`` in the type of ``expr``."""
    return tirx.IntImm(str(expr.ty.dtype), value)


def _perfect_nest(loop: tirx.For, depth: int) -> list[tirx.For]:
    chain = [loop]
    while len(chain) < depth:
        chain.append(chain[-1].body)
    return chain


def _guard_bound(chain: Sequence[tirx.For]) -> ir.Expr:
    """The right side of the guard ``position < bound`` of the chain's loop."""
    realize, lane = chain[-1].body, chain[-1].loop_var
    for guard in conjuncts(realize.predicate):
        if isinstance(guard, tirx.LT) and uses(guard.a, lane):
            return guard.b
    # The parts divide a loop without a guard.
    return math.prod((part.extent for part in chain[1:]), start=chain[0].extent)


def _substitute_nest(chain: Sequence[tirx.For], values: dict[ir.Var, ir.Expr]) -> list[tirx.For]:
    """The nest with another body; its own loop variables stay."""
    body = substitute(chain[-1].body, values)
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
    if constant(full) != 0:
        pieces.append(fresh(_nest(chain, full)))
    if constant(rest) != 0:
        tail = _substitute_nest(chain[1:], {loop.loop_var: full})
        pieces += _truncated(tail, rest)
    return pieces


def _nest(chain: Sequence[tirx.For], extent: ir.Expr) -> tirx.Stmt:
    """The nest with another extent of its outermost loop, without the guards that then hold."""
    variables = [loop.loop_var for loop in chain]

    def without_guards(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        kept = [guard for guard in conjuncts(realize.predicate) if not uses(guard, *variables)]
        predicate = tirx.all(*kept) if kept else tirx.IntImm("bool", 1)
        return s_tir.SBlockRealize(realize.iter_values, predicate, realize.block)

    body = tvm_ffi.structural_map(chain[-1].body, (s_tir.SBlockRealize, without_guards))
    for loop in reversed(chain[1:]):
        body = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body)
    loop = chain[0]
    if constant(extent) == 1:
        return substitute(body, {loop.loop_var: _like(loop.loop_var, 0)})
    # A vector has a constant length.
    known = constant(extent) is not None or loop.kind != tirx.ForKind.VECTORIZED
    kind = loop.kind if known else tirx.ForKind.SERIAL
    return tirx.For(loop.loop_var, loop.min, extent, kind, body)


def fresh(stmt: tirx.Stmt) -> tirx.Stmt:
    """A copy that defines its own variables, with simplified bindings."""
    analyzer = sym.Analyzer()

    def simplified(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        values = [analyzer.simplify(value) for value in realize.iter_values]
        return s_tir.SBlockRealize(values, realize.predicate, realize.block)

    stmt = tvm_ffi.structural_map(stmt, (s_tir.SBlockRealize, simplified))
    defined: list[ir.Var] = []
    tvm_ffi.structural_walk(
        stmt,
        [
            (tirx.For, lambda loop: defined.append(loop.loop_var)),
            (tirx.IterVar, lambda axis: defined.append(axis.var)),
            ((tirx.Bind, tirx.Let), lambda binding: defined.append(binding.var)),
        ],
    )
    return substitute(stmt, {var: tirx.Var(var.name, var.ty) for var in defined})
