# SPDX-License-Identifier: Apache-2.0
"""Reductions along contiguous addresses: several vectors of states for each output.

::

    for row in T.parallel(M):
        for block in range(...):                     # float sums: few additions on each state
            for k in range(256):
                for u in T.unroll(8):
                    for lane in T.vectorized(8):
                        state[u, lane] += data[row, block, k, u, lane]
            total[:] += state[:]
        out[row] = finish(all of total)

The rest of a row is one vector that overlaps the one before it, with the lanes counted before
masked off; where the length is symbolic it is a loop over elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import Extent
from schedules.tir.index_math import i64
from schedules.workload.reduce import FLOATS

from ..core.tiles import Index, Span
from .source import ReduceSource
from .tasks import ReductionNest, Split, places, share, width
from .vector_states import States, count, unrolled, vector

BLOCK = 256
"""Additions on one state before it is added to another, for the sake of rounding."""

_SHORTEST_BLOCK = 32


@dataclass(frozen=True)
class RowVectors:
    """The vectors of one output.

    Parameters
    ----------
    lanes : int
        States of a vector, a power of two, not more than the innermost loop has iterations.
    vectors : int
        Independent vectors; at most as many as the innermost loop has.
    outputs : int
        Neighbouring outputs of a task, with states each; a divisor of the innermost parallel loop.
        Several of them where the innermost reduced loop is so short that scanning one output alone
        would jump through memory. For known extents, and no parts.
    """

    lanes: int
    vectors: int
    outputs: int

    @property
    def step(self) -> int:
        """Elements that are combined with all states once."""
        return self.lanes * self.vectors


def reduce_rows(source: ReduceSource, rows: RowVectors, split: Split) -> s_tir.Schedule:
    """Write the nest of this module; the innermost loop of the data is a reduced one."""
    return _RowNest(source, rows, split).schedule()


class _RowNest(ReductionNest):
    def __init__(self, source: ReduceSource, rows: RowVectors, split: Split) -> None:
        super().__init__(source, split)
        self.rows = rows
        self.last = source.reduced[-1]
        self.blocks = _blocks(source, rows) if rows.outputs == 1 else 0
        self.first: Index = 0  # state of the current output
        self.accumulators: States
        self.total: States | None = None
        self.single: States | None = None

    def schedule(self) -> s_tir.Schedule:
        """The finished function."""
        outputs, parts = self.source.outputs, self.split.parts
        if self.rows.outputs > 1:
            with self.builder.body(), self.tasks(outputs // self.rows.outputs) as task:
                self.reduce_together(task)
            return self.builder.schedule()
        with self.builder.body():
            partial = self.states(outputs * parts) if parts > 1 else None
            with self.tasks(outputs * parts) as task:
                row = task if parts == 1 else tirx.floordiv(task, parts)
                part = i64(0) if parts == 1 else tirx.floormod(task, parts)
                self.reduce(row, part)
                if partial is None:
                    self.write(self.current.load(0), places(self.source.parallel, row))
                else:
                    partial.store(task, self.current.load(0))
            if partial is not None:
                self.combine_parts(partial)
        return self.builder.schedule()

    @property
    def current(self) -> States:
        """Place of the result of a row."""
        return self.accumulators if self.total is None else self.total

    def reduce(self, row: Index, part: Index) -> None:
        """Reduce a part of a row to one state."""
        lanes, step = self.rows.lanes, self.rows.step
        self.accumulators = self.states(step)
        self.total = self.states(step) if self.blocks else None
        self.single = self.states(1) if self.last.size is None else None
        self.hold(lanes)
        self.indices = places(self.source.parallel, row)
        for states, size in ((self.accumulators, step), (self.total, step), (self.single, 1)):
            if states is not None:
                states.clear(size, min(size, lanes))
        self._loops(0, part)
        if self.total is not None:
            self.total.merge(self.accumulators, step, lanes)
        self.current.fold(step, lanes)
        self.current.fold_lanes(lanes)
        if self.single is not None:
            self.current.update(0, self.single.load(0))

    def reduce_together(self, task: Index) -> None:
        """Reduce the neighbouring outputs of a task, and write them."""
        outputs, lanes, step = self.rows.outputs, self.rows.lanes, self.rows.step
        self.accumulators, row = self.states(outputs * step), self.states(step)
        self.hold(lanes)
        self.accumulators.clear(outputs * step, lanes)
        self.indices = places(self.source.parallel, task * outputs)
        self._loops(0, i64(0))
        for _ in self._each_output():
            with unrolled(self.rows.vectors) as u, vector(lanes) as lane:
                at = u * lanes + lane
                row.store(at, self.accumulators.load(self.first + at))
            row.fold(step, lanes)
            row.fold_lanes(lanes)
            self.write(row.load(0), self.indices)

    def _each_output(self) -> Iterator[None]:
        """Open the loop over the outputs of a task."""
        if self.rows.outputs == 1:
            yield
            return
        neighbour, outer = self.source.parallel[-1].var, self.indices
        with T.serial(0, i64(self.rows.outputs)) as output:
            self.first = output * self.rows.step
            self.indices = {**outer, neighbour: outer[neighbour] + output}
            yield
        self.indices = outer

    def combine_parts(self, partial: States) -> None:
        """Combine the parts of each output in order."""
        parts = self.split.parts
        with T.serial(0, i64(self.source.outputs)) as row, T.sblock("parts"):
            T.reads()
            T.writes()
            whole = self.states(1)
            whole.store(0, partial.load(row * parts))
            with T.serial(0, i64(parts - 1)) as part:
                whole.update(0, partial.load(row * parts + part + 1))
            self.write(whole.load(0), places(self.source.parallel, row))

    def _loops(self, position: int, part: Index) -> None:
        """The reduced loops from ``position`` on."""
        if position == len(self.source.reduced) - 1:
            for _ in self._each_output():
                self._innermost(part)
        else:
            span = self.span(position, part)
            with count(width(span)) as index:
                self.indices[self.source.reduced[position].var] = span[0] + index
                self._loops(position + 1, part)
        if position and position == self.blocks:
            assert self.total is not None, "blocks have totals"
            self.total.merge(self.accumulators, self.rows.step, self.rows.lanes)

    def _innermost(self, part: Index) -> None:
        step, size = self.rows.step, self.last.size
        steps: Extent = self.last.extent // step if size else tirx.floordiv(self.last.extent, step)
        shared = self.split.parts > 1 and self.split.axis == len(self.source.reduced) - 1
        span: Span = share(steps, part, self.split.parts) if shared else (0, steps)
        self._steps(span)
        if size is not None and size % step == 0:
            return
        if not shared:
            self._rest(steps)
            return
        with T.If(tirx.EQ(part, i64(self.split.parts - 1))), T.Then():
            self._rest(steps)

    def _steps(self, span: Span) -> None:
        start, number = span[0], width(span)
        if self.blocks != len(self.source.reduced):
            with count(number) as k:
                self._step(start + k)
            return
        assert self.total is not None, "blocks have totals"
        with T.serial(0, tirx.ceildiv(i64(number), BLOCK)) as block:
            with T.serial(0, tirx.min(i64(BLOCK), number - block * BLOCK)) as k:
                self._step(start + block * BLOCK + k)
            self.total.merge(self.accumulators, self.rows.step, self.rows.lanes)

    def _step(self, k: Index) -> None:
        with unrolled(self.rows.vectors) as u:
            self._vector(self.accumulators, u, k * self.rows.step + u * self.rows.lanes)

    def _vector(self, states: States, number: Index, start: Index, since: int = 0) -> None:
        def indices(lane: Index) -> dict[tirx.Var, tirx.Expr]:
            return {**self.indices, self.last.var: i64(start) + lane}

        lanes = self.rows.lanes if states is self.accumulators else 1
        self.step(states, self.first + number * lanes, lanes, indices, since)

    def _rest(self, steps: Extent) -> None:
        """Rest of the innermost loop after whole steps."""
        start, lanes = steps * self.rows.step, self.rows.lanes
        if self.last.size is None:
            self._symbolic_rest(start)
            return
        full, rest = divmod(self.last.size - start, lanes)
        for u in range(full):
            self._vector(self.accumulators, i64(u), start + u * lanes)
        if rest:
            u = i64(full % self.rows.vectors)
            self._vector(self.accumulators, u, self.last.size - lanes, lanes - rest)

    def _symbolic_rest(self, start: Index) -> None:
        assert self.single is not None, "a symbolic rest has its own state"
        lanes = self.rows.lanes
        full = tirx.floordiv(self.last.extent - start, lanes)
        with count(full) as k:
            self._vector(self.accumulators, i64(0), start + k * lanes)
        start = start + full * lanes
        with count(self.last.extent - start) as k:
            self._vector(self.single, i64(0), start + k)


def _blocks(source: ReduceSource, rows: RowVectors) -> int:
    """Number of reduced loops outside of a block; 0 if all additions are one block."""
    workload = source.workload
    if workload.acc_dtype not in FLOATS or workload.operator not in ("sum", "mean", "sum_squares"):
        return 0
    reduced = source.reduced
    steps = [math.inf if axis.size is None else axis.size for axis in reduced]
    steps[-1] = steps[-1] / rows.step
    if math.prod(steps) <= 2 * BLOCK:
        return 0
    if steps[-1] > 2 * BLOCK:
        return len(reduced)
    inside = 1.0
    for position in reversed(range(1, len(reduced))):
        inside *= steps[position]
        if inside >= _SHORTEST_BLOCK:
            return position
    return 0
