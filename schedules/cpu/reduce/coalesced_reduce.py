# SPDX-License-Identifier: Apache-2.0
"""CPU rule for the op ``coalesced_reduce``, and the templates of its nests."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

from tvm import s_tir, tirx
from tvm.target import Target

from schedules import attributes
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.rule import TunableCPURule
from schedules.cpu.nests.loop_transforms import finish
from schedules.schedule_rule import KernelFacts
from schedules.tuning.template import Template

from .coalesced_columns import reduce_columns
from .coalesced_rows import reduce_rows, reduce_stream
from .reduce_knobs import (
    ColumnKnobs,
    ReductionLoops,
    RowKnobs,
    StreamKnobs,
    all_columns,
    all_rows,
    all_streams,
    default_columns,
    default_rows,
    default_stream,
    estimate,
    find_stream,
    prefers_rows,
)
from .source import ReduceSource, read_source
from .tasks import Split

_FUNCTION = 12.0  # cycles of an elementary function of a vector
_COMBINE = 4.0  # cycles until a combined state can be used again
_TASK = 30.0  # beginning a task
_STRIDED = 1.0  # a lane of a load that no vector load can do

Knobs = TypeVar("Knobs", bound=Split)


class ReduceTemplate(Template[ReductionLoops, Knobs, CPUInfo]):
    """Base of the templates of reductions."""

    form: str  # Name of the nest.

    def read_workload(self, text: str) -> ReductionLoops:
        """Read the JSON of a workload."""
        return ReductionLoops.from_json(text)

    def describe(self, workload: ReductionLoops) -> str:
        """Return operator, type and loops."""
        pairs = zip(workload.kinds, workload.extents, strict=True)
        loops = " x ".join(f"{extent}{'r' if kind == 'R' else ''}" for kind, extent in pairs)
        return f"{workload.operator} of {workload.dtype}, {loops} (r: reduced)"

    def write(
        self, func: tirx.PrimFunc, workload: ReductionLoops, knobs: Knobs, target: Target
    ) -> s_tir.Schedule:
        """Write the nest."""
        source = read_source(KernelFacts(func, target))
        assert source is not None, "the workload was read from another function"
        return self.write_source(source, knobs)

    def write_source(self, source: ReduceSource, knobs: Knobs) -> s_tir.Schedule:
        """Write the nest of a reduction that was read; ``RULE`` of the function names it."""
        func = finish(self.nest(source, knobs)).mod["main"]
        return s_tir.Schedule(func.with_attr(attributes.RULE, f"CoalescedReduce ({self.form})"))

    def nest(self, source: ReduceSource, knobs: Knobs) -> s_tir.Schedule:
        """Write the nest before what follows on every nest."""
        raise NotImplementedError

    def cycles(self, workload: ReductionLoops, knobs: Knobs, machine: CPUInfo) -> float:
        """Return the cycles of the busiest thread: its steps or its traffic, and its tasks."""
        terms = self.terms(workload, knobs, machine)
        busy = max(terms["steps"], terms["traffic"])
        return terms["fork"] + busy + terms["tasks"] + terms["parts"]

    def features(
        self, workload: ReductionLoops, knobs: Knobs, machine: CPUInfo
    ) -> dict[str, float]:
        """Return the knobs, and the terms of :meth:`cycles`."""
        return super().features(workload, knobs, machine) | self.terms(workload, knobs, machine)

    def terms(self, workload: ReductionLoops, knobs: Knobs, machine: CPUInfo) -> dict[str, float]:
        """Return the cycles of steps, of traffic, of tasks, of combining parts, and of the fork."""
        tasks = self.tasks(workload, knobs) * knobs.parts
        cores = machine.num_cores if knobs.threads else 1
        share = -(-tasks // cores) / tasks
        states, vector_steps, strided = self.work(workload, knobs)
        costs = machine.costs
        loads = max(1, len(workload.strides)) / costs.loads_per_cycle
        step = max(loads, 1 / machine.fma_per_cycle, _COMBINE / states)
        step += _FUNCTION * workload.has_functions + strided * _STRIDED
        step += max(0, states - machine.num_vector_registers) / states * costs.spill
        level = sum(
            estimate(workload.extents) * workload.item_bytes > size
            for size in (machine.l1d_bytes, machine.l2_bytes, machine.l3_bytes)
        )
        rate = costs.bytes_per_cycle[level]
        if level == 3:
            rate *= min(1.0, costs.memory_cores / cores)
        folds = math.log2(max(2, states)) * _COMBINE
        return {
            "steps": vector_steps * step * share,
            "traffic": estimate(workload.extents) * workload.item_bytes / rate * share,
            "tasks": tasks * share * (_TASK + folds),
            "parts": estimate(workload.parallel) * (knobs.parts - 1) * _COMBINE,
            "fork": costs.fork if knobs.threads else 0.0,
        }

    def tasks(self, workload: ReductionLoops, knobs: Knobs) -> int:
        """Pieces of work, without the parts of each."""
        raise NotImplementedError

    def work(self, workload: ReductionLoops, knobs: Knobs) -> tuple[int, float, int]:
        """Independent vectors of states, steps of a vector in all, and lanes loaded singly."""
        raise NotImplementedError


class RowTemplate(ReduceTemplate[RowKnobs]):
    """Vectors along the innermost loop."""

    name = "cpu.reduce_rows"
    version = 1
    knobs = RowKnobs
    form = "rows"

    def default(self, workload: ReductionLoops, machine: CPUInfo) -> RowKnobs:
        """Return the setting of the rules."""
        return default_rows(workload, machine)

    def settings(self, workload: ReductionLoops, machine: CPUInfo) -> Iterable[RowKnobs]:
        """Yield every legal setting."""
        return all_rows(workload, machine)

    def nest(self, source: ReduceSource, knobs: RowKnobs) -> s_tir.Schedule:
        """Write the nest."""
        return reduce_rows(source, knobs, knobs)

    def tasks(self, workload: ReductionLoops, knobs: RowKnobs) -> int:
        """Pieces of work."""
        return -(-estimate(workload.parallel) // knobs.outputs)

    def work(self, workload: ReductionLoops, knobs: RowKnobs) -> tuple[int, float, int]:
        """Independent vectors, and steps."""
        rows = estimate(workload.parallel) * estimate(workload.reduced[:-1])
        return knobs.vectors, rows * -(-int(workload.reduced[-1] or 1) // knobs.lanes), 0


class ColumnTemplate(ReduceTemplate[ColumnKnobs]):
    """Vectors of neighbouring outputs."""

    name = "cpu.reduce_columns"
    version = 1
    knobs = ColumnKnobs
    form = "columns"

    def default(self, workload: ReductionLoops, machine: CPUInfo) -> ColumnKnobs:
        """Return the setting of the rules."""
        return default_columns(workload, machine)

    def settings(self, workload: ReductionLoops, machine: CPUInfo) -> Iterable[ColumnKnobs]:
        """Yield every legal setting."""
        return all_columns(workload, machine)

    def nest(self, source: ReduceSource, knobs: ColumnKnobs) -> s_tir.Schedule:
        """Write the nest."""
        return reduce_columns(source, knobs, knobs)

    def tasks(self, workload: ReductionLoops, knobs: ColumnKnobs) -> int:
        """Pieces of work."""
        tiles = -(-int(workload.parallel[-1] or 1) // knobs.tile)
        return estimate(workload.parallel[:-1]) * -(-tiles // knobs.tiles)

    def work(self, workload: ReductionLoops, knobs: ColumnKnobs) -> tuple[int, float, int]:
        """Independent vectors, and steps; states of several tiles are loaded and stored."""
        vectors = self.tasks(workload, knobs) * knobs.tiles * knobs.vectors
        last = len(workload.kinds) - 1 - workload.kinds[::-1].index("P")
        strided = any(load[last] not in (0, 1) for load in workload.strides)
        steps = float(vectors * estimate(workload.reduced))
        if knobs.tiles > 1:
            steps *= 1 + 1 / knobs.rows
        return knobs.vectors, steps, knobs.lanes if strided else 0


class StreamTemplate(ReduceTemplate[StreamKnobs]):
    """Rows and columns as one stream."""

    name = "cpu.reduce_stream"
    version = 1
    knobs = StreamKnobs
    form = "stream"

    def default(self, workload: ReductionLoops, machine: CPUInfo) -> StreamKnobs:
        """Return the setting of the rules."""
        return default_stream(workload, machine)

    def settings(self, workload: ReductionLoops, machine: CPUInfo) -> Iterable[StreamKnobs]:
        """Yield every legal setting."""
        return all_streams(workload, machine)

    def nest(self, source: ReduceSource, knobs: StreamKnobs) -> s_tir.Schedule:
        """Write the nest."""
        return reduce_stream(source, knobs, knobs)

    def tasks(self, workload: ReductionLoops, knobs: StreamKnobs) -> int:
        """Pieces of work."""
        return estimate(workload.parallel[:-1])

    def work(self, workload: ReductionLoops, knobs: StreamKnobs) -> tuple[int, float, int]:
        """Independent vectors, and steps."""
        return knobs.vectors, -(-estimate(workload.extents) // knobs.lanes), 0


ROWS, COLUMNS, STREAM = RowTemplate(), ColumnTemplate(), StreamTemplate()
REDUCTIONS: tuple[ReduceTemplate[Any], ...] = (ROWS, COLUMNS, STREAM)


class CoalescedReduce(TunableCPURule):
    """One reduction over any axes: a legalized ``coalesced_reduce``, or one of TVM's operators.

    Producers and epilogue are computed with it. Rows (:mod:`.coalesced_rows`) where the reduced
    loop scans consecutive addresses, else columns (:mod:`.coalesced_columns`), or a stream
    (in the same file as rows) where there are few of them; the attribute ``RULE`` of the function
    names the choice. NaN wins every minimum and maximum, whose identity is an infinity. Left alone:
    functions with no or several reductions, consumers of another shape than the result, and
    reductions of TVM's operators under a condition (padding) or to positions.
    """

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a function, or return None if it holds anything else."""
        source = read_source(facts)
        if source is None:
            return None
        loops, cpu = ReductionLoops.of(source), source.cpu
        recorded = self.recorded(facts.func, loops, facts.target) if loops.is_static else None
        template = self.templates(loops, cpu)[0]
        return recorded or template.write_source(source, template.default(loops, cpu))

    def workload(self, func: tirx.PrimFunc, target: Target) -> ReductionLoops | None:
        """Return the loops of the reduction, if all their extents are known."""
        source = read_source(KernelFacts(func, target))
        loops = None if source is None else ReductionLoops.of(source)
        return loops if loops is not None and loops.is_static else None

    def templates(self, workload: ReductionLoops, cpu: CPUInfo) -> list[ReduceTemplate]:
        """Return the nests that can compute a reduction, the one that suits it best first."""
        narrow = find_stream(workload, cpu) is not None
        if workload.kinds[-1] == "R":
            found: list[ReduceTemplate] = [ROWS, COLUMNS] if workload.parallel else [ROWS]
            return found if prefers_rows(workload, cpu) else found[::-1]
        return [STREAM, COLUMNS] if narrow else [COLUMNS]
