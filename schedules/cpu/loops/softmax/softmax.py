# SPDX-License-Identifier: Apache-2.0
"""CPU rule for chains of reductions over the same rows: softmax, log-softmax, norms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tvm import s_tir, tirx
from tvm.s_tir.dlight.analysis import SBlockInfo
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from schedules import attributes
from schedules.schedule_rule import KernelFacts
from schedules.tir.vector_math import is_expensive
from schedules.tuning.template import Template

from ...core.machine import CPUInfo
from ...core.rule import TunableCPURule
from ...nests.blocks import Kernel, open_kernel
from ...nests.elementwise_nest import schedule_spatial
from ...nests.fused_consumers import vectorize_under
from ...nests.lane_reduction import arrange_lanes, split_into_lanes
from ...nests.loop_transforms import (
    attempt,
    finish,
    fuse_group,
    inline_blocks,
    merge_groups,
    parallel_outer,
)
from ...nests.overlapping_tails import Overlap, Tails
from ...nests.reduction_nests import in_any_order, reducible, runs_in_columns
from .row_chain import RowStage, find_stages
from .row_chain_knobs import (
    RowChain,
    RowChainKnobs,
    all_row_chains,
    default_row_chain,
    row_chain_cycles,
)


class RowChainTemplate(Template[RowChain, RowChainKnobs, CPUInfo]):
    """Vectors and threads of :class:`Softmax`."""

    name = "cpu.row_chain"
    version = 1
    knobs = RowChainKnobs

    def read_workload(self, text: str) -> RowChain:
        """Read the JSON of a workload."""
        return RowChain.from_json(text)

    def describe(self, workload: RowChain) -> str:
        """Return the stages and the rows."""
        stages = ", ".join(f"{name} {size}" for name, size, _ in workload.stages)
        return f"chain of {stages} for {workload.row_count} rows"

    def default(self, workload: RowChain, machine: CPUInfo) -> RowChainKnobs:
        """Return the setting of the rules."""
        return default_row_chain(workload, machine)

    def settings(self, workload: RowChain, machine: CPUInfo) -> Iterable[RowChainKnobs]:
        """Yield every legal setting."""
        return all_row_chains(workload, machine)

    def write(
        self, func: tirx.PrimFunc, workload: RowChain, knobs: RowChainKnobs, target: Target
    ) -> s_tir.Schedule:
        """Write the nest."""
        opened = _open(KernelFacts(func, target))
        assert opened is not None, "the workload was read from another function"
        kernel, stages, _ = opened
        written = _write(kernel, stages, workload, knobs)
        assert written is not None, "the rows of the default nest are the same"
        return written

    def cycles(self, workload: RowChain, knobs: RowChainKnobs, machine: CPUInfo) -> float:
        """Return the cycles of the busiest thread."""
        return row_chain_cycles(workload, knobs, machine)


ROW_CHAIN = RowChainTemplate()


class Softmax(TunableCPURule):
    """Reductions in a row, each over the same axes, and element-wise blocks between and after them.

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

    An element-wise block is recomputed for each use unless it calls an elementary function. Left
    alone: functions without a reduction, chains in which a block depends on more than
    its row, symbolic extents of the rows' elements.
    """

    template = ROW_CHAIN

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a function, or return None if it is no such chain."""
        opened = _open(facts)
        if opened is None:
            return None
        kernel, stages, chain = opened
        recorded = self.recorded(facts.func, chain, facts.target) if chain.is_static else None
        return recorded or _write(kernel, stages, chain, default_row_chain(chain, kernel.cpu))

    def workload(self, func: tirx.PrimFunc, target: Target) -> RowChain | None:
        """Return the chain, if the number of rows is known and they can be merged."""
        opened = _open(KernelFacts(func, target))
        if opened is None or not opened[2].is_static:
            return None
        kernel, stages, chain = opened
        knobs = default_row_chain(chain, kernel.cpu)
        return None if _write(kernel, stages, chain, knobs) is None else chain


def _open(facts: KernelFacts) -> tuple[Kernel, list[RowStage], RowChain] | None:
    """Open a function for scheduling; None if it is no chain."""
    kernel = open_kernel(facts)
    if kernel is None or sum(not info.is_injective() for info in kernel.blocks) < 1:
        return None
    keep = [info for info in kernel.blocks if _is_shared_and_expensive(kernel, info)]
    blocks = inline_blocks(kernel, keep)
    stages = find_stages(kernel, blocks)
    if stages is None or blocks[0].is_injective():
        return None
    reductions = [stage for stage in stages if "R" in stage.facts.kinds]
    if not all(reducible(each.facts) and _has_parts(kernel, each) for each in reductions):
        return None
    side_by_side = runs_in_columns(kernel, stages[0].facts)
    if side_by_side and len(stages) < 2:
        return None  # a reduction by itself, whose nest there is nothing to merge with
    return kernel, stages, RowChain.of(kernel, stages, side_by_side)


def _has_parts(kernel: Kernel, stage: RowStage) -> bool:
    """Return whether lanes can reduce, and in a way that TVM knows: of several outputs few."""
    sch, block = kernel.sch, stage.info.block_rv
    if len(sch.get(block).writes) == 1:
        return True
    probe = sch.copy()
    return in_any_order(sch, block) and attempt(probe.rfactor, probe.get_loops(block)[-1], 0)


def _write(
    kernel: Kernel, stages: list[RowStage], chain: RowChain, knobs: RowChainKnobs
) -> s_tir.Schedule | None:
    kernel.cpu = replace(kernel.cpu, vector_bits=knobs.vector_bits)
    form = _NeighbouringRows if chain.side_by_side else _ContiguousRows
    return form(kernel, stages, knobs).schedule()


def _is_shared_and_expensive(kernel: Kernel, info: SBlockInfo) -> bool:
    """Return whether a block has several readers and calls an elementary function."""
    if not info.is_injective() or len(kernel.sch.get_consumers(info.block_rv)) < 2:
        return False
    return is_expensive(kernel.sch.get(info.block_rv).body)


class _Chain:
    """Base of both forms of chains."""

    def __init__(self, kernel: Kernel, stages: list[RowStage], knobs: RowChainKnobs) -> None:
        self.kernel, self.sch, self.stages, self.knobs = kernel, kernel.sch, stages, knobs
        self.depth = len(stages[0].rows)
        self.tails = Tails(kernel.sch)
        self.nests: list[SBlockRV] = []
        self.decompositions: list[tuple[SBlockRV, LoopRV]] = []
        self.overlaps: list[Overlap] = []

    def close(self) -> s_tir.Schedule | None:
        """Merge the loops over rows into one, run it in parallel, decompose the reductions.

        None if the rows are not the same.
        """
        sch = self.sch
        if self.depth:
            rows = [sch.get_loops(block)[self.depth - 1] for block in self.nests]
            if not attempt(sch.merge, *rows):
                return None
            if self.knobs.threads:
                outer = sch.get_loops(self.nests[0])[: self.depth]
                parallel_outer(sch, outer, self.kernel.cpu.num_cores)
        for block, loop in self.decompositions:
            self.tails.decompose(block, loop)
        return finish(sch, [*self.tails.collect(), *self.overlaps])

    def rows_first(self, stage: RowStage) -> list[LoopRV]:
        """Bring the loops over rows outside; return all loops."""
        loops = self.sch.get_loops(stage.info.block_rv)
        rows = [loops[k] for k in stage.rows]
        rest = [loop for k, loop in enumerate(loops) if k not in stage.rows]
        self.sch.reorder(*rows, *rest)
        return [*rows, *rest]

    def fuse_reduced(self, stage: RowStage) -> list[LoopRV]:
        """Merge the reduced loops."""
        loops = self.sch.get_loops(stage.info.block_rv)
        groups = merge_groups(stage.facts, stage.facts.positions("R"))
        return [fuse_group(self.sch, [loops[k] for k in group]) for group in groups]


class _ContiguousRows(_Chain):
    """Rows whose elements are contiguous."""

    def schedule(self) -> s_tir.Schedule | None:
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
            split = split_into_lanes(
                sch, block, loop, self.kernel.lanes(stage.facts), self.knobs.vectors
            )
            self.nests += split.stages
            self.decompositions.append((split.stages[0], arrange_lanes(sch, split, self.depth)))
        return self.close()


class _NeighbouringRows(_Chain):
    """Rows whose elements are strided, while neighbouring rows are adjacent."""

    def schedule(self) -> s_tir.Schedule | None:
        """Schedule each block by itself on tiles of neighbouring rows, then merge."""
        sch = self.sch
        first = self.stages[0].facts
        extent = first.extents[self.stages[0].rows[-1]] or 1
        tile = self.knobs.vectors * min(extent, self.kernel.lanes(first))
        for stage in self.stages:
            block = stage.info.block_rv
            reduced = [] if stage.info.is_injective() else self.fuse_reduced(stage)
            loops = sch.get_loops(block)
            rows = [loops[k] for k in stage.rows]
            rest = reduced or [loop for k, loop in enumerate(loops) if k not in stage.rows]
            rows[-1], column = sch.split(rows[-1], [None, tile])
            lanes = min(tile, self.kernel.lanes(stage.facts))
            vector, lane = sch.split(column, [None, lanes])
            sch.reorder(*rows, *rest, vector, lane)
            self.tails.add(block, rows[-1], tile)
            if tile % lanes:
                sch.annotate(vector, attributes.TAIL, [2, tile])
            sch.vectorize(lane)
            self.nests.append(block)
            if reduced:
                self.decompositions.append((block, reduced[0]))
        return self.close()
