# SPDX-License-Identifier: Apache-2.0
"""Reductions across contiguous addresses: vectors of neighbouring outputs.

::

    for chunk in T.parallel(...):                        # columns that the L1 cache holds
        for k in range(N // 4):                          # four streams through memory
            for tile in range(tiles):
                for v in T.unroll(4):
                    for g in T.unroll(4):
                        for lane in T.vectorized(8):
                            state[tile, v, lane] += data[k * 4 + g, column(tile, v, lane)]
        out[columns] = finish(state)

The last tile overlaps the one before it, and computes some columns again, so that there is no code
for a rest of columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.index_math import i64

from ..core.tiles import Index
from .source import ReduceSource
from .tasks import ReductionNest, Split, States, count, places, unrolled, vector, width


@dataclass(frozen=True)
class ColumnVectors:
    """The vectors of neighbouring outputs."""

    lanes: int  # Outputs of a vector.
    vectors: int  # Vectors of a tile.
    tiles: int  # Tiles of a task.
    rows: int  # Iterations of the innermost reduced loop that are added to a tile at once.

    @property
    def tile(self) -> int:
        """Outputs of a tile; at most as many as there are, unless that is symbolic."""
        return self.lanes * self.vectors


SCALARS = ColumnVectors(lanes=1, vectors=1, tiles=1, rows=1)


def reduce_columns(source: ReduceSource, columns: ColumnVectors, split: Split) -> s_tir.Schedule:
    """Write the nest of this module; a parallel loop is the one along the vectors.

    Where its extent is symbolic and less than a tile, outputs are computed one by one.
    """
    return _ColumnNest(source, columns, split).schedule()


class _ColumnNest(ReductionNest):
    def __init__(self, source: ReduceSource, columns: ColumnVectors, split: Split) -> None:
        super().__init__(source, split)
        self.columns = columns
        self.last = source.parallel[-1]

    def schedule(self) -> s_tir.Schedule:
        """The finished function."""
        with self.builder.body():
            if self.last.size is not None:
                self._write_columns(self.columns)
            else:
                with T.If(self.last.extent >= self.columns.tile):
                    with T.Then():
                        self._write_columns(self.columns)
                    with T.Else():
                        self._write_columns(SCALARS)
        return self.builder.schedule()

    def _write_columns(self, columns: ColumnVectors) -> None:
        parts, outputs = self.split.parts, self.source.outputs
        partial = self.states(outputs * parts) if parts > 1 else None
        for indices, chunk, part in self._tasks(columns, parts):
            states = self.states(columns.tiles * columns.tile)
            self.hold(columns.lanes)
            states.clear(columns.tiles * columns.tile, columns.lanes)
            self.indices = indices
            self._loops(0, columns, states, chunk, part)
            for at, place in self._each_vector(columns, chunk):
                if partial is None:
                    self.write(states.load(at), place)
                else:
                    partial.store(part * outputs + self.source.output_index(place), states.load(at))
        if partial is not None:
            self._combine_parts(partial)

    def _tasks(
        self, columns: ColumnVectors, parts: int, elements: int | None = None
    ) -> Iterator[tuple[dict, Index, Index]]:
        """Open the loop over tasks; yields the outer loops' indices, the chunk and the part."""
        outer = self.source.parallel[:-1]
        tiles = _ceildiv(self.last.size or self.last.extent, columns.tile)
        chunks = _ceildiv(tiles, columns.tiles)
        number = math.prod(axis.extent for axis in outer) * chunks * parts
        with self.tasks(number, elements) as task:
            part = tirx.floormod(task, i64(parts))
            place = tirx.floordiv(task, i64(parts))
            if outer:
                indices = places(outer, tirx.floordiv(place, i64(chunks)))
                yield indices, tirx.floormod(place, i64(chunks)), part
            else:
                yield {}, place, part

    def _column(self, columns: ColumnVectors, chunk: Index, tile: Index) -> Index:
        """First output of a tile."""
        first = (chunk * columns.tiles + tile) * columns.tile
        size = self.last.size
        if size is not None and size % (columns.tile * columns.tiles) == 0:
            return first
        return tirx.min(first, i64(self.last.extent) - columns.tile)

    def _each_vector(self, columns: ColumnVectors, chunk: Index) -> Iterator[tuple[Index, dict]]:
        """Open the loops over a task's outputs; yields their places in the states and indices."""
        with count(columns.tiles) as tile:
            column = self._column(columns, chunk, tile)
            with unrolled(columns.vectors) as v, vector(columns.lanes) as lane:
                offset = v * columns.lanes + lane
                yield tile * columns.tile + offset, {**self.indices, self.last.var: column + offset}

    def _loops(
        self, position: int, columns: ColumnVectors, states: States, chunk: Index, part: Index
    ) -> None:
        """The reduced loops from ``position`` on."""
        axis, span = self.source.reduced[position], self.span(position, part)
        if position < len(self.source.reduced) - 1:
            with count(width(span)) as index:
                self.indices[axis.var] = span[0] + index
                self._loops(position + 1, columns, states, chunk, part)
            return
        start, number = span[0], width(span)
        static = isinstance(number, int)
        groups = number // columns.rows if static else tirx.floordiv(number, columns.rows)
        with count(groups) as k:
            self._pass(columns, states, chunk, start + k * columns.rows, columns.rows)
        start = start + groups * columns.rows
        if static:
            if number % columns.rows:
                self._pass(columns, states, chunk, start, number % columns.rows)
        elif columns.rows > 1:
            with count(tirx.floormod(number, columns.rows)) as k:
                self._pass(columns, states, chunk, start + k, 1)

    def _pass(
        self, columns: ColumnVectors, states: States, chunk: Index, start: Index, rows: int
    ) -> None:
        """Add some rows to all tiles."""
        reduced = self.source.reduced[-1].var
        with count(columns.tiles) as tile:
            column = self._column(columns, chunk, tile)
            with unrolled(columns.vectors) as v, unrolled(rows) as row:
                offset = v * columns.lanes

                def indices(lane: Index) -> dict[tirx.Var, tirx.Expr]:
                    place = column + offset + lane
                    return {**self.indices, self.last.var: place, reduced: start + row}

                self.step(states, tile * columns.tile + offset, columns.lanes, indices)

    def _combine_parts(self, partial: States) -> None:
        """Combine the parts of each output in order."""
        columns = ColumnVectors(self.columns.lanes, 1, 1, 1)
        outputs = self.source.outputs
        for indices, chunk, _ in self._tasks(columns, 1, self.partial_states):
            self.indices = indices
            whole = self.states(columns.lanes)
            for number, place in self._each_vector(columns, chunk):
                whole.store(number, partial.load(self.source.output_index(place)))
            with T.serial(0, i64(self.split.parts - 1)) as part:
                for number, place in self._each_vector(columns, chunk):
                    index = (part + 1) * outputs + self.source.output_index(place)
                    whole.update(number, partial.load(index))
            for number, place in self._each_vector(columns, chunk):
                self.write(whole.load(number), place)


def _ceildiv(extent: Index, size: int) -> Index:
    return -(-extent // size) if isinstance(extent, int) else tirx.ceildiv(extent, i64(size))
