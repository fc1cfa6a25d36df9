# SPDX-License-Identifier: Apache-2.0
"""The rule for chains of reductions over the same rows: softmax, log-softmax, normalisations."""

from __future__ import annotations

from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir.dlight.analysis import SBlockInfo
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from .consumers import vectorize_under
from .facts import Access, BlockFacts, Kernel, block_facts, open_kernel
from .lanes import arrange_lanes, split_into_lanes
from .overlap import Overlap, Tails
from .reduce_block import reducible, runs_in_columns
from .steps import (
    SERIAL_ELEMENTS,
    finish,
    fuse_group,
    inline_blocks,
    merge_groups,
    parallel_outer,
    schedule_spatial,
)
from .truncate import TAIL
from .vector_math import is_expensive

_TEMPORARY_BYTES = 16 * 1024


class Softmax(CPUScheduleRule):
    """Several reductions in a row, each over the same axes, with element-wise blocks between them.

    All of them are computed row by row inside one parallel loop, in vectors: along the row where
    it is contiguous, else along neighbouring rows::

        for row in T.parallel(64):
            ...                                  # maximum, in lanes
            for k in range(125):
                for lane in T.vectorized(8):
                    e[k * 8 + lane] = exp(x[row, k * 8 + lane] - maximum)
            ...                                  # sum, in lanes
            for k in range(125):
                for lane in T.vectorized(8):
                    out[row, k * 8 + lane] = e[k * 8 + lane] / sum

    An element-wise block is computed again for each use unless it calls an elementary function.
    Left alone: functions with fewer than two reductions, chains in which a block depends on more
    than its row, symbolic extents of the rows' elements.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """Schedule ``func``, or return None if it is no such chain."""
        kernel = open_kernel(func, target)
        if kernel is None or sum(not info.is_injective() for info in kernel.blocks) < 2:
            return None
        keep = [info for info in kernel.blocks if _is_shared_and_expensive(kernel, info)]
        blocks = inline_blocks(kernel, keep)
        stages = _stages(kernel, blocks)
        if stages is None or blocks[0].is_injective():
            return None
        if not all(reducible(stage.facts) for stage in stages if "R" in stage.facts.kinds):
            return None
        chain = _Columns if runs_in_columns(kernel, stages[0].facts) else _Rows
        return chain(kernel, stages).schedule()


def _is_shared_and_expensive(kernel: Kernel, info: SBlockInfo) -> bool:
    """Whether a block has several readers and calls an elementary function."""
    if not info.is_injective() or len(kernel.sch.get_consumers(info.block_rv)) < 2:
        return False
    calls: list[ir.Call] = []
    tvm_ffi.structural_walk(kernel.sch.get(info.block_rv).body, (ir.Call, calls.append))
    return any(is_expensive(call) for call in calls)


@dataclass
class _Stage:
    """One block of the chain with its loops over the rows.

    Parameters
    ----------
    info : SBlockInfo
        The block.
    facts : BlockFacts
        Its facts.
    rows : list[int]
        Positions of the iteration variables that number the rows.
    """

    info: SBlockInfo
    facts: BlockFacts
    rows: list[int]


def _stages(kernel: Kernel, blocks: list[SBlockInfo]) -> list[_Stage] | None:
    """Find the rows in each block; None if a block depends on more than its row.

    A reduction's rows are its spatial variables; an element-wise block has the rows of the
    reductions that it reads. Every access to a temporary must lead to the row itself.
    """
    stages: list[_Stage] = []
    written: dict[ir.Var, tuple[int | None, ...]] = {}
    for info in blocks:
        facts = block_facts(kernel.sch, info.block_rv)
        if facts is None or not facts.is_static or set(facts.kinds) - set("SR"):
            return None
        if info.is_injective():
            rows = _rows_read(facts, written)
        else:
            rows = facts.positions("S")
        if rows is None or [facts.extents[k] for k in rows] != _row_extents(stages, facts, rows):
            return None
        for load in facts.loads:
            if load.buffer in written and _row_dims(facts, load, rows) != written[load.buffer]:
                return None
        written[facts.store.buffer] = _row_dims(facts, facts.store, rows)
        stages.append(_Stage(info, facts, rows))
    return stages


def _row_extents(stages: list[_Stage], facts: BlockFacts, rows: list[int]) -> list[int | None]:
    first = stages[0] if stages else None
    extents, positions = (facts.extents, rows) if first is None else (first.facts.extents, first.rows)
    return [extents[k] for k in positions]


def _row_dims(facts: BlockFacts, access: Access, rows: list[int]) -> tuple[int | None, ...]:
    """For each row variable, which dimension of the buffer it is the index of."""
    return tuple(
        next(
            (d for d, index in enumerate(access.indices) if index.same_as(facts.vars[k])), None
        )
        for k in rows
    )


def _rows_read(
    facts: BlockFacts, written: dict[ir.Var, tuple[int | None, ...]]
) -> list[int] | None:
    """The row variables of a block that reads a temporary, taken from how it does."""
    for load in facts.loads:
        dims = written.get(load.buffer)
        if dims is None or None in dims:
            continue
        rows = [
            next(
                (k for k, var in enumerate(facts.vars) if load.indices[d].same_as(var)), None
            )
            for d in dims
            if d is not None
        ]
        return None if None in rows else [k for k in rows if k is not None]
    return None


class _Chain:
    """What rows and columns have in common."""

    def __init__(self, kernel: Kernel, stages: list[_Stage]) -> None:
        self.kernel, self.sch, self.stages = kernel, kernel.sch, stages
        self.depth = len(stages[0].rows)
        self.tails = Tails(kernel.sch)
        self.nests: list[SBlockRV] = []
        self.decompositions: list[tuple[SBlockRV, LoopRV]] = []
        self.overlaps: list[Overlap] = []

    def lanes(self, facts: BlockFacts) -> int:
        """Elements of a vector."""
        return max(1, self.kernel.cpu.vector_bits // 8 // facts.itemsize)

    def close(self) -> s_tir.Schedule:
        """Merge the loops over rows into one, run it in parallel, decompose the reductions."""
        sch, first = self.sch, self.stages[0].facts
        if self.depth:
            sch.merge(*[sch.get_loops(block)[self.depth - 1] for block in self.nests])
            if first.volume(range(len(first.extents))) >= SERIAL_ELEMENTS // 4:
                outer = sch.get_loops(self.nests[0])[: self.depth]
                parallel_outer(sch, outer, self.kernel.cpu.num_cores)
        for block, loop in self.decompositions:
            self.tails.decompose(block, loop)
        return finish(sch, [*self.tails.collect(), *self.overlaps])

    def rows_first(self, stage: _Stage) -> list[LoopRV]:
        """Bring the loops over rows outside; return all loops."""
        loops = self.sch.get_loops(stage.info.block_rv)
        rows = [loops[k] for k in stage.rows]
        rest = [loop for k, loop in enumerate(loops) if k not in stage.rows]
        self.sch.reorder(*rows, *rest)
        return [*rows, *rest]

    def fuse_reduced(self, stage: _Stage) -> list[LoopRV]:
        """Merge the reduced loops."""
        loops = self.sch.get_loops(stage.info.block_rv)
        groups = merge_groups(stage.facts, stage.facts.positions("R"))
        return [fuse_group(self.sch, [loops[k] for k in group]) for group in groups]


class _Rows(_Chain):
    """Rows whose elements are contiguous."""

    def schedule(self) -> s_tir.Schedule:
        """Schedule each block by itself, then merge."""
        sch = self.sch
        for stage in self.stages:
            block = stage.info.block_rv
            if stage.info.is_injective():
                self.rows_first(stage)
                self.nests.append(block)
                if self.depth:
                    vectorize_under(self.kernel, block, self.depth)
                else:
                    self.overlaps += schedule_spatial(self.kernel, block)
                continue
            loop = self.fuse_reduced(stage)[-1]
            split = split_into_lanes(sch, block, loop, self.lanes(stage.facts))
            self.nests += split.stages
            self.decompositions.append(
                (split.stages[0], arrange_lanes(sch, split, self.depth))
            )
        return self.close()


class _Columns(_Chain):
    """Rows whose elements are apart, while neighbouring rows lie side by side."""

    def schedule(self) -> s_tir.Schedule:
        """Schedule each block by itself on tiles of neighbouring rows, then merge."""
        sch = self.sch
        first = self.stages[0].facts
        tile = self._tile(first, first.extents[self.stages[0].rows[-1]] or 1)
        for stage in self.stages:
            block = stage.info.block_rv
            reduced = [] if stage.info.is_injective() else self.fuse_reduced(stage)
            loops = sch.get_loops(block)
            rows = [loops[k] for k in stage.rows]
            rest = reduced or [loop for k, loop in enumerate(loops) if k not in stage.rows]
            rows[-1], column = sch.split(rows[-1], [None, tile])
            lanes = min(tile, self.lanes(stage.facts))
            vector, lane = sch.split(column, [None, lanes])
            sch.reorder(*rows, *rest, vector, lane)
            self.tails.add(block, rows[-1], tile)
            if tile % lanes:
                sch.annotate(vector, TAIL, [2, tile])
            sch.vectorize(lane)
            self.nests.append(block)
            if reduced:
                self.decompositions.append((block, reduced[0]))
        return self.close()

    def _tile(self, facts: BlockFacts, extent: int) -> int:
        """Columns of a tile: whole vectors, as many as keep a temporary row in the L1 cache."""
        lanes = min(extent, self.lanes(facts))
        row = facts.volume(facts.positions("R")) * lanes * facts.itemsize
        return lanes * max(1, min(4, extent // lanes, _TEMPORARY_BYTES // max(1, row)))
