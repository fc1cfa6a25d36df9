# SPDX-License-Identifier: Apache-2.0
"""Reductions along contiguous addresses: several vectors of states for each output, or one stream.

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

With three columns and eight lanes, 24 neighbouring elements are three whole vectors, in which each
lane always holds the same column::

    for k in range(N * 3 // 24):
        for u in T.unroll(3):
            for lane in T.vectorized(8):
                state[u, lane] += data[k * 24 + u * 8 + lane]
    for column in range(3):
        out[column] = finish(state[column], state[column + 3], state[column + 6], ...)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T

from schedules.cpu.core.tiles import Index, Span
from schedules.tir.extents import Extent
from schedules.tir.index_math import i64
from schedules.workload.reduce import FLOATS

from .source import ReduceSource
from .tasks import ReductionNest, Split, States, count, places, share, unrolled, vector, width

BLOCK = 256
"""Additions on one state before it is added to another, for the sake of rounding."""

_SHORTEST_BLOCK = 32


@dataclass(frozen=True)
class RowVectors:
    """The vectors of one output."""

    lanes: int
    """States of a vector, a power of two, not more than the innermost loop has iterations."""
    vectors: int  # Independent vectors; at most as many as the innermost loop has.
    outputs: int
    """Neighbouring outputs of a task, with states each; a divisor of the innermost parallel loop.
    Several of them where the innermost reduced loop is so short that scanning one output alone
    would jump through memory. For known extents, and no parts."""

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


@dataclass(frozen=True)
class StreamVectors:
    """The states of neighbouring elements."""

    lanes: int  # States of a vector.
    vectors: int  # Vectors; all their lanes together are a multiple of the columns.

    @property
    def step(self) -> int:
        """Elements that are combined with all states once."""
        return self.lanes * self.vectors


def reduce_stream(source: ReduceSource, stream: StreamVectors, split: Split) -> s_tir.Schedule:
    """Write the nest of this module."""
    return _StreamNest(source, stream, split).schedule()


class _StreamNest(ReductionNest):
    def __init__(self, source: ReduceSource, stream: StreamVectors, split: Split) -> None:
        super().__init__(source, split)
        self.stream = stream
        self.rows, self.columns = source.axes[-2:]
        self.width = int(self.columns.extent)

    def schedule(self) -> s_tir.Schedule:
        """The finished function."""
        parts, outputs = self.split.parts, self.source.outputs
        with self.builder.body():
            partial = self.states(outputs * parts) if parts > 1 else None
            for part in self._tasks(parts):
                states = self._reduce(part)
                for at, place in self._each_output():
                    if partial is None:
                        self.write(states.load(at), place)
                    else:
                        index = part * outputs + self.source.output_index(place)
                        partial.store(index, states.load(at))
            if partial is not None:
                for _ in self._tasks(1, self.partial_states):
                    self._combine_parts(partial)
        return self.builder.schedule()

    def _tasks(self, parts: int, elements: int | None = None) -> Iterator[Index]:
        outer = self.source.parallel[:-1]
        with self.tasks(math.prod(axis.extent for axis in outer) * parts, elements) as task:
            self.indices = places(outer, tirx.floordiv(task, i64(parts)))
            yield tirx.floormod(task, i64(parts))

    def _reduce(self, part: Index) -> States:
        """Reduce one part; the states of the columns are the first ones of the result."""
        lanes, step = self.stream.lanes, self.stream.step
        states = self.states(step)
        self.hold(lanes)
        states.clear(step, lanes)
        self._loops(0, states, part)
        if not self._has_rest():
            return self._fold(states)
        # Variable subscripts would keep the states of the loop above out of registers.
        rest = self.states(step)
        with unrolled(self.stream.vectors) as u, vector(lanes) as lane:
            rest.store(u * lanes + lane, states.load(u * lanes + lane))
        self._rest(rest, part)
        return self._fold(rest)

    def _has_rest(self) -> bool:
        return self.rows.size is None or self.rows.size * self.width % self.stream.step != 0

    def _loops(self, position: int, states: States, part: Index) -> None:
        axis = self.source.reduced[position]
        if position < len(self.source.reduced) - 1:
            span = self.span(position, part)
            with count(width(span)) as index:
                self.indices[axis.var] = span[0] + index
                self._loops(position + 1, states, part)
            return
        span = self._steps(part)
        with count(width(span)) as k, unrolled(self.stream.vectors) as u:
            at = u * self.stream.lanes
            self._vector(states, at, self.stream.lanes, (span[0] + k) * self.stream.step + at)

    def _steps(self, part: Index) -> Span:
        """Whole steps of the stream that one part takes."""
        elements = self.rows.extent * self.width
        static = self.rows.size is not None
        steps = elements // self.stream.step if static else elements // i64(self.stream.step)
        if self.split.parts > 1 and self.split.axis == len(self.source.reduced) - 1:
            return share(steps, part, self.split.parts)
        return 0, steps

    def _vector(self, states: States, at: Index, lanes: int, start: Index) -> None:
        def indices(lane: Index) -> dict[tirx.Var, tirx.Expr]:
            place = {self.rows.var: i64(0), self.columns.var: start + lane}
            return {**self.indices, **place}

        self.step(states, at, lanes, indices)

    def _rest(self, states: States, part: Index) -> None:
        """Rest after whole steps, in every iteration of the outer loops."""

        def outer(position: int) -> None:
            if position == len(self.source.reduced) - 1:
                self._elements_left(states)
                return
            span = self.span(position, part)
            with count(width(span)) as index:
                self.indices[self.source.reduced[position].var] = span[0] + index
                outer(position + 1)

        if self.split.parts > 1 and self.split.axis == len(self.source.reduced) - 1:
            with T.If(tirx.EQ(part, i64(self.split.parts - 1))), T.Then():
                outer(0)
        else:
            outer(0)

    def _elements_left(self, states: States) -> None:
        elements, step = i64(self.rows.extent * self.width), i64(self.stream.step)
        start = tirx.floordiv(elements, step) * step
        with T.serial(0, elements - start) as k:
            self._vector(states, k, 1, start + k)

    def _fold(self, states: States) -> States:
        """Combine the states of each column."""
        size = self.stream.step
        if self.width % self.stream.lanes == 0:
            states.fold(size, self.width)
            return states
        while size % 2 == 0 and size // 2 % self.width == 0 and size // 2 % self.stream.lanes == 0:
            size //= 2
            with unrolled(size // self.stream.lanes) as u, vector(self.stream.lanes) as lane:
                at = u * self.stream.lanes + lane
                states.update(at, states.load(at + size))
        if size > self.width:
            with T.serial(0, i64(size // self.width - 1)) as group:
                with T.serial(0, i64(self.width)) as column:
                    states.update(column, states.load((group + 1) * self.width + column))
        return states

    def _each_output(self) -> Iterator[tuple[Index, dict]]:
        lanes = self.stream.lanes if self.width % self.stream.lanes == 0 else 1
        with unrolled(self.width // lanes) as v, vector(lanes) as lane:
            at = v * lanes + lane
            yield at, {**self.indices, self.columns.var: at}

    def _combine_parts(self, partial: States) -> None:
        outputs = self.source.outputs
        whole = self.states(self.width)
        for number, place in self._each_output():
            whole.store(number, partial.load(self.source.output_index(place)))
        with T.serial(0, i64(self.split.parts - 1)) as part:
            for number, place in self._each_output():
                index = (part + 1) * outputs + self.source.output_index(place)
                whole.update(number, partial.load(index))
        for number, place in self._each_output():
            self.write(whole.load(number), place)
