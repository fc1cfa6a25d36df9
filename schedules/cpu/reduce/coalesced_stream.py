# SPDX-License-Identifier: Apache-2.0
"""Reductions of tall and narrow data: rows and columns as one stream of vectors.

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

from schedules.tir.index_math import i64

from ..core.tiles import Index, Span
from .source import ReduceSource
from .tasks import ReductionNest, Split, places, share, width
from .vector_states import States, count, unrolled, vector


@dataclass(frozen=True)
class StreamVectors:
    """The states of neighbouring elements.

    Parameters
    ----------
    lanes : int
        States of a vector.
    vectors : int
        Vectors; all their lanes together are a multiple of the columns.
    """

    lanes: int
    vectors: int

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
        for at, place in self._each_output():
            whole.store(at, partial.load(self.source.output_index(place)))
        with T.serial(0, i64(self.split.parts - 1)) as part:
            for at, place in self._each_output():
                index = (part + 1) * outputs + self.source.output_index(place)
                whole.update(at, partial.load(index))
        for at, place in self._each_output():
            self.write(whole.load(at), place)
