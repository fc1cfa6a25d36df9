# SPDX-License-Identifier: Apache-2.0
"""Transfer of a factor's tiles to shared memory, where neighbouring rows lie beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.index_math import i64
from schedules.tir.statements import when

from ...pointwise.coalescing import Lanes, classify
from ...pointwise.point_kernel import PointWriter, Views
from .matmul_pattern import Operand, divides
from .row_tile import RowTile

WIDTH = 4
"""Elements of an access to shared memory."""
_SKEW = 4


@dataclass(frozen=True)
class FactorTiles:
    """A factor's tiles in shared memory, one or several for each group of threads.

    Parameters
    ----------
    operand : Operand
        The factor.
    lanes : Lanes
        Width of its loads.
    rows, depth : int
        Extents of a tile.
    threads : int
        Threads of a group, which load a tile together.
    groups : int
        Groups, which have neighbouring tiles along the reduced axis.
    shared : tuple[tirx.Buffer, ...]
        Each ``[groups, depth, rows + skew]``, as one row.
    staged : tirx.Buffer
        Registers for the thread's loads of the next tile.
    """

    operand: Operand
    lanes: Lanes
    rows: int
    depth: int
    threads: int
    groups: int
    shared: tuple[tirx.Buffer, ...]
    staged: tirx.Buffer

    @classmethod
    def allocate(
        cls,
        operand: Operand,
        rows: int,
        depth: int,
        threads: int,
        dtype: str,
        groups: int = 1,
        stages: int = 1,
    ) -> FactorTiles:
        """Shared memory for some stages, and registers; a thread loads whole vectors."""
        size = groups * depth * pitch_of(rows)
        shared = tuple(T.alloc_buffer((size,), dtype, scope="shared") for _ in range(stages))
        staged = T.alloc_buffer((rows * depth // threads,), dtype, scope="local")
        lanes = operand_lanes(operand, WIDTH)
        return cls(operand, lanes, rows, depth, threads, groups, shared, staged)

    @property
    def pitch(self) -> int:
        """Elements of a row in shared memory."""
        return pitch_of(self.rows)

    def start(self, group: tirx.Expr) -> tirx.Expr:
        """Begin of a group's tile in shared memory."""
        return group * i64(self.depth * self.pitch)

    def place(self, number: int, thread: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """Row and depth in the tile of a thread's vector."""
        index, vector = thread + i64(number * self.threads), self.lanes.vector
        if self.operand.rows_first:
            per_line = i64(self.rows // vector)
            return index % per_line * i64(vector), index // per_line
        per_row = i64(self.depth // vector)
        return index // per_row, index % per_row * i64(vector)

    @property
    def count(self) -> int:
        """Vectors that a thread loads."""
        return self.rows * self.depth // self.lanes.vector // self.threads

    def shifts(self, rows: RowTile, first: tirx.Expr, thread: tirx.Expr) -> tirx.Buffer | None:
        """Registers with the value of a row that is subtracted from each of a thread's vectors."""
        name = self.operand.shift
        if name is None:
            return None
        found = T.alloc_buffer((self.count,), name.ty.dtype, scope="local")
        for number in range(self.count):
            row, _ = self.place(number, thread)
            T.buffer_store(found, rows.at(name, first + row), [number])
        return found

    def load(
        self,
        views: Views,
        batch: Sequence[tirx.Expr],
        first_row: tirx.Expr,
        first_depth: tirx.Expr,
        thread: tirx.Expr,
        shifts: tirx.Buffer | None = None,
    ) -> None:
        """Load a thread's part of a tile to registers; zero past the end."""
        rows, depth = self.operand.space.extents[-2:]
        vector = self.lanes.vector
        for number in range(self.count):
            row, inner = self.place(number, thread)
            row, inner = T.bind(first_row + row), T.bind(first_depth + inner)
            whole = self.depth * self.groups
            inside = [
                None if divides(self.rows, rows) else row < i64(rows),
                None if divides(whole, depth) else inner < i64(depth),
            ]
            if any(condition is not None for condition in inside):
                for k in range(vector):
                    zero = tirx.const(0, self.staged.dtype)
                    T.buffer_store(self.staged, zero, [number * vector + k])
            with when(*inside):
                places = []
                for k in range(vector):
                    at = (row + i64(k), inner) if self.operand.rows_first else (row, inner + i64(k))
                    places.append([*batch, *(at[::-1] if self.operand.rows_first else at)])
                writer = PointWriter(self.lanes, views, places)
                if shifts is not None:
                    writer.give(self.operand.shift, [shifts[number]] * vector)
                writer.steps()
                for k in range(vector):
                    value = writer.value(self.operand.value, k)
                    T.buffer_store(self.staged, value, [number * vector + k])

    def keep(self, stage: int, group: tirx.Expr, thread: tirx.Expr) -> None:
        """Store the loaded elements to shared memory, neighbouring rows beside each other."""
        vector = self.lanes.vector
        for number in range(self.count):
            row, inner = self.place(number, thread)
            at = T.bind(self.start(group) + inner * i64(self.pitch) + row)
            if self.operand.rows_first and vector > 1:
                with T.vectorized(0, vector) as k:
                    value = self.staged[k + number * vector]
                    T.buffer_store(self.shared[stage], value, [at + k.astype("int64")])
                continue
            for k in range(vector):
                value = self.staged[number * vector + k]
                T.buffer_store(self.shared[stage], value, [at + i64(k * self.pitch)])

    def fetch(self, stage: int, registers: tirx.Buffer, start: tirx.Expr, unit: tirx.Expr) -> None:
        """Load a thread's rows of one line, a chunk of up to four after the other."""
        fetch_line(self.shared[stage], self.rows, registers, start, unit)


def fetch_line(
    line: tirx.Buffer, rows: int, registers: tirx.Buffer, start: tirx.Expr, unit: tirx.Expr
) -> None:
    """Load the rows of a thread with the number ``unit`` from a line that begins at ``start``."""
    count = int(registers.shape[0])
    width = min(WIDTH, count)
    chunks = count // width
    for chunk in range(chunks):
        at = start + i64(chunk * (rows // chunks)) + unit * i64(width)
        with T.vectorized(0, width) as k:
            T.buffer_store(registers, line[at + k.astype("int64")], [k + chunk * width])


def pitch_of(rows: int) -> int:
    """Elements of a line of ``rows`` in shared memory; neighbouring lines begin in other banks."""
    return rows + _SKEW


def operand_lanes(operand: Operand, width: int) -> Lanes:
    """Lanes of an operand: neighbours in memory, where all reads allow it, else one element."""
    space = operand.along_neighbours
    lanes = classify(space, width)
    if lanes.is_aligned and "each" not in lanes.kinds.values():
        return lanes
    return classify(space, 1)
