# SPDX-License-Identifier: Apache-2.0
"""CPU rule for chains of reductions over the same rows: softmax, log-softmax, norms."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tvm import ir, s_tir, tirx
from tvm.s_tir.dlight.analysis import SBlockInfo
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from schedules import attributes
from schedules.cpu.core.machine import CPUInfo, vector_sizes
from schedules.cpu.core.rule import TunableCPURule
from schedules.cpu.nests.blocks import Access, BlockFacts, Kernel, block_facts, open_kernel
from schedules.cpu.nests.elementwise_nest import schedule_spatial
from schedules.cpu.nests.fused_consumers import vectorize_under
from schedules.cpu.nests.loop_transforms import (
    SERIAL_ELEMENTS,
    attempt,
    finish,
    fuse_group,
    inline_blocks,
    merge_groups,
    parallel_outer,
)
from schedules.cpu.nests.reduction_nests import (
    arrange_lanes,
    in_any_order,
    reducible,
    runs_in_columns,
    split_into_lanes,
)
from schedules.cpu.nests.tails import Overlap, Tails
from schedules.schedule_rule import KernelFacts
from schedules.tir.expression_walk import nodes
from schedules.tir.vector_math import is_expensive
from schedules.tuning.template import Template


@dataclass
class RowStage:
    """One block of the chain with its loops over the rows."""

    info: SBlockInfo
    facts: BlockFacts
    rows: list[int]  # Positions of the iteration variables that number the rows.


def find_stages(kernel: Kernel, blocks: list[SBlockInfo]) -> list[RowStage] | None:
    """Find the rows in each block; None if a block depends on more than its row.

    A reduction's rows are its spatial variables; an element-wise block has the rows of the
    reductions that it reads. Every access to a temporary must lead to the row itself.
    """
    stages: list[RowStage] = []
    written: dict[ir.Var, tuple[int | None, ...]] = {}
    for info in blocks:
        facts = block_facts(kernel.sch, info.block_rv)
        if facts is None or set(facts.kinds) - set("SR"):
            return None
        if info.is_injective():
            rows = _rows_read(facts, written)
        else:
            rows = facts.positions("S")
        if rows is None or not _same_rows(stages, facts, rows):
            return None
        if any(extent is None for k, extent in enumerate(facts.extents) if k not in rows):
            return None
        for load in facts.loads:
            if load.buffer in written and _row_dims(facts, load, rows) != written[load.buffer]:
                return None
        written[facts.store.buffer] = _row_dims(facts, facts.store, rows)
        stages.append(RowStage(info, facts, rows))
    return stages


def _same_rows(stages: list[RowStage], facts: BlockFacts, rows: list[int]) -> bool:
    """Return whether there are as many rows as in the first stage."""
    if not stages:
        return True
    first = stages[0]
    return [facts.extents[k] for k in rows] == [first.facts.extents[k] for k in first.rows]


def _row_dims(facts: BlockFacts, access: Access, rows: list[int]) -> tuple[int | None, ...]:
    """Dimension of the buffer that each row variable indexes."""
    return tuple(
        next((d for d, index in enumerate(access.indices) if index.same_as(facts.vars[k])), None)
        for k in rows
    )


def _rows_read(
    facts: BlockFacts, written: dict[ir.Var, tuple[int | None, ...]]
) -> list[int] | None:
    """The row variables of a block that reads a temporary, from its accesses."""
    for load in facts.loads:
        dims = written.get(load.buffer)
        if dims is None or None in dims:
            continue
        rows = [
            next((k for k, var in enumerate(facts.vars) if load.indices[d].same_as(var)), None)
            for d in dims
            if d is not None
        ]
        return None if None in rows else [k for k in rows if k is not None]
    return None


_VECTORS = 4
_ALL_VECTORS = (1, 2, 3, 4, 6, 8)
_TEMPORARY_BYTES = 16 * 1024
_SYMBOLIC = 64  # rows that a symbolic extent stands for
_FUNCTION = 12.0  # cycles of an elementary function of a vector
_COMBINE = 4.0  # cycles until a sum can be used again
_OPERATORS = {tirx.Add: "sum", tirx.Mul: "prod", tirx.Max: "max", tirx.Min: "min"}
MAP = "map"


@dataclass(frozen=True)
class RowChain:
    """A chain of reductions and element-wise steps, row by row."""

    rows: tuple[int | None, ...]  # Extents of the loops over rows; None where symbolic.
    stages: tuple[tuple[str, int, bool], ...]
    """Operator of each block, ``map`` if it reduces nothing; the elements of a row that it computes
    or reduces; and whether each takes an elementary function."""
    item_bytes: int  # Bytes of the widest element.
    side_by_side: bool = False
    """Whether neighbouring rows are adjacent in memory, not the elements of a row."""

    @classmethod
    def of(cls, kernel: Kernel, stages: Sequence[RowStage], side_by_side: bool) -> RowChain:
        """The chain of some blocks."""
        first = stages[0]
        return cls(
            rows=tuple(first.facts.extents[k] for k in first.rows),
            stages=tuple(_described(kernel, stage) for stage in stages),
            item_bytes=first.facts.itemsize,
            side_by_side=side_by_side,
        )

    @classmethod
    def from_json(cls, text: str) -> RowChain:
        """Read the JSON of a workload.

        Raises ``ValueError`` if it is anything else, or the number of rows is symbolic.
        """
        values = json.loads(text)
        stages = tuple((str(name), int(size), bool(more)) for name, size, more in values["stages"])
        found = cls(**{**values, "rows": tuple(values["rows"]), "stages": stages})
        extents = (*found.rows, *(size for _, size, _ in stages), found.item_bytes)
        if not stages or not all(type(extent) is int and extent > 0 for extent in extents):
            raise ValueError(f"{text:.100} describes no chain of reductions")
        return found

    @property
    def is_static(self) -> bool:
        """Return whether the number of rows is known."""
        return None not in self.rows

    @property
    def row_count(self) -> int:
        """Number of rows; a symbolic extent counts as a few."""
        return math.prod(_SYMBOLIC if extent is None else extent for extent in self.rows)

    def lanes(self, vector_bits: int) -> int:
        """Elements of a vector."""
        return max(1, vector_bits // 8 // self.item_bytes)


@dataclass(frozen=True)
class RowChainKnobs:
    """Knobs of a chain."""

    vector_bits: int
    vectors: int
    """Vectors of sums of one row; of rows that are side by side, vectors of rows of a tile."""
    threads: bool  # Whether threads share the rows.


def default_row_chain(chain: RowChain, cpu: CPUInfo) -> RowChainKnobs:
    """Sums enough to hide their latency, or as many rows as keep a temporary in the L1 cache."""
    elements = chain.row_count * chain.stages[0][1]
    threads = bool(chain.rows) and elements >= SERIAL_ELEMENTS // 4
    if not chain.side_by_side:
        return RowChainKnobs(cpu.vector_bits, _VECTORS, threads)
    extent = chain.rows[-1] or 1
    lanes = min(extent, chain.lanes(cpu.vector_bits))
    row = chain.stages[0][1] * lanes * chain.item_bytes
    vectors = max(1, min(_VECTORS, extent // lanes, _TEMPORARY_BYTES // max(1, row)))
    return RowChainKnobs(cpu.vector_bits, vectors, threads)


def all_row_chains(chain: RowChain, cpu: CPUInfo) -> Iterator[RowChainKnobs]:
    """Whole or half vectors, several sums, with threads or without."""
    threads = (False, True) if chain.rows and cpu.num_cores > 1 else (False,)
    for vector_bits, vectors, shared in product(vector_sizes(cpu), _ALL_VECTORS, threads):
        lanes = chain.lanes(vector_bits)
        extent = int(chain.rows[-1] or 1) if chain.side_by_side else chain.stages[0][1]
        if vectors == 1 or vectors * lanes <= extent:
            yield RowChainKnobs(vector_bits, vectors, shared)


def row_chain_cycles(chain: RowChain, knobs: RowChainKnobs, cpu: CPUInfo) -> float:
    """Cycles of the busiest thread: steps of all stages, and adding up the lanes of each sum."""
    lanes, rows = chain.lanes(knobs.vector_bits), chain.row_count
    at_once = lanes * knobs.vectors if chain.side_by_side else 1
    per_row = 0.0
    for operator, elements, functions in chain.stages:
        steps = elements if chain.side_by_side else -(-elements // lanes)
        cycles = 2 / cpu.costs.loads_per_cycle + _FUNCTION * functions
        if operator != MAP:
            cycles = max(cycles, _COMBINE / knobs.vectors)
            folds = math.log2(knobs.vectors) + (0 if chain.side_by_side else lanes)
            per_row += _COMBINE * folds / (at_once if chain.side_by_side else 1)
        per_row += steps * cycles / (lanes if chain.side_by_side else 1)
    tiles = -(-rows // at_once)
    cores = cpu.num_cores if knobs.threads else 1
    share = -(-tiles // cores) / tiles
    return tiles * at_once * per_row * share + (cpu.costs.fork if knobs.threads else 0.0)


def _described(kernel: Kernel, stage: RowStage) -> tuple[str, int, bool]:
    block: s_tir.SBlock = kernel.sch.get(stage.info.block_rv)
    others = [k for k in range(len(stage.facts.extents)) if k not in stage.rows]
    operator = MAP
    if "R" in stage.facts.kinds:
        kind = type(nodes(block.body, tirx.BufferStore)[0].value)
        operator = _OPERATORS.get(kind, kind.__name__)
    return operator, stage.facts.volume(others), is_expensive(block.body)


class RowChainTemplate(Template[RowChain, RowChainKnobs, CPUInfo]):
    """Vectors and threads of :class:`Softmax`."""

    name = "cpu.row_chain"
    version = 2
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
