# SPDX-License-Identifier: Apache-2.0
"""Tails by overlapping tiles.

A guard in each tile would keep LLVM from using vectors. The last tile of a loop that is no multiple
of its tile can start earlier instead and compute some elements a second time::

    before: for o in range(63):                    after: for o in range(63):
                for i in T.vectorized(16):                     for i in T.vectorized(16):
                    v = o * 16 + i                                 v = T.min(o * 16, 984) + i
                    T.where(o * 16 + i < 1000)

It is right only where computing an element twice gives the same value: a tile must hold all of its
work (a whole reduction, not a part of it), and the output must not be an input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.topi.utils import ravel_index

from schedules.tir.expression_walk import uses, variables

from .blocks import realize_of


@dataclass(frozen=True)
class Overlap:
    """Axis of a block that is tiled with an overlapping last tile.

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
    """The overlap of a block along the axis whose tiles ``loop`` counts.

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
        None if the tile divides the axis, if the block does not depend on the loop, or if an
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
    """Overlaps that are found while a function is scheduled, and named when it is finished.

    Parameters
    ----------
    sch : Schedule
        The schedule.
    """

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
