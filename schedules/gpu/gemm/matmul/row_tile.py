# SPDX-License-Identifier: Apache-2.0
"""Statistics of the rows of a block's tile: those it uses, and moments of segments of its results.

The threads of a block first compute what its rows need from the moments of their segments, one row
a thread, and keep it in shared memory. Moments of results are those of a few neighbours in one
thread, which are then combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.compute.norms import SEGMENT
from schedules.tir.index_math import i64
from schedules.tir.statements import when

from ...core.intrinsics import sync
from ...pointwise.coalescing import classify
from ...pointwise.point_kernel import PointWriter, Views
from .matmul_pattern import MatmulFunction, divides
from .row_statistics import RowStatistics, SegmentMoments


@dataclass(frozen=True)
class RowTile:
    """Statistics of the rows of a tile in shared memory.

    Parameters
    ----------
    first : tirx.Expr
        The first row of the tile.
    buffers : dict[tirx.Var, tirx.Buffer]
        From the variable of each value to that of every row.
    """

    first: tirx.Expr
    buffers: dict[tirx.Var, tirx.Buffer]

    @classmethod
    def compute(
        cls,
        matmul: MatmulFunction,
        views: Views,
        first: tirx.Expr,
        rows: int,
        thread: tirx.Expr,
        threads: int,
    ) -> RowTile:
        """Emit the code of a thread that computes its share of ``rows`` rows, and a barrier."""
        statistics = matmul.statistics
        if statistics is None:
            return cls(first, {})
        buffers = {
            name: T.alloc_buffer((rows,), name.ty.dtype, scope="shared")
            for name in statistics.names
        }
        for turn in range(-(-rows // threads)):
            own = T.bind(thread.astype("int64") + i64(turn * threads))
            inside = [
                None if divides(threads, rows) else own < i64(rows),
                None if divides(rows, matmul.m) else first + own < i64(matmul.m),
            ]
            with when(*inside):
                _store_row(statistics, list(buffers.values()), views, first + own, own)
        sync()
        return cls(first, buffers)

    def at(self, name: tirx.Var, row: tirx.Expr) -> tirx.Expr:
        """A value of a row."""
        return self.buffers[name][row - self.first]

    def give(self, writer: PointWriter, row: tirx.Expr) -> None:
        """Let a writer of neighbours of a row know its values."""
        for name in self.buffers:
            writer.give(name, [self.at(name, row)] * writer.lanes.vector)


def _store_row(
    statistics: RowStatistics,
    buffers: Sequence[tirx.Buffer],
    views: Views,
    row: tirx.Expr,
    own: tirx.Expr,
) -> None:
    writer = PointWriter(classify(statistics.space, 1), views, [[row]])
    writer.steps()
    for buffer, value in zip(buffers, statistics.values, strict=True):
        T.buffer_store(buffer, writer.value(value, 0), [own])


class MomentRegisters:
    """Sums and squares of vectors of neighbours of a row, in registers of a thread; zero at first.

    Parameters
    ----------
    source : tirx.Expr
        The result, by the variables of the epilogue.
    dtype : str
        Its type.
    vectors : int
        Vectors that are taken one after the other.
    """

    def __init__(self, source: tirx.Expr, dtype: str, vectors: int) -> None:
        self.source, self.vectors, self._taken = source, vectors, 0
        self.held = T.alloc_buffer((2 * vectors,), dtype, scope="local")
        for k in range(2 * vectors):
            T.buffer_store(self.held, tirx.const(0, dtype), [k])

    @classmethod
    def allocate(cls, matmul: MatmulFunction, vectors: int = 1) -> MomentRegisters | None:
        """Registers for a product with moments."""
        if matmul.moments is None:
            return None
        stores = matmul.epilogue.stores
        [source] = [s.value for s in stores if s.buffer.same_as(matmul.moments.source)]
        return cls(source, matmul.moments.sums.dtype, vectors)

    @property
    def parts(self) -> list[tuple[tirx.Expr, tirx.Expr]]:
        """Sum and squares of each vector."""
        return [(self.held[2 * k], self.held[2 * k + 1]) for k in range(self.vectors)]

    def take(self, writer: PointWriter) -> None:
        """Compute those of the next vector, which was just written."""
        count, at = writer.lanes.vector, self._taken % self.vectors * 2
        self._taken += 1
        values = T.alloc_buffer((count,), self.held.dtype, scope="local")
        for k in range(count):
            T.buffer_store(values, writer.value(self.source, k), [k])
        T.buffer_store(self.held, _tree([values[k] for k in range(count)]), [at])
        mean = self.held[at] * tirx.const(1 / count, self.held.dtype)
        differences = [values[k] - mean for k in range(count)]
        T.buffer_store(self.held, _tree([each * each for each in differences]), [at + 1])


def _tree(terms: Sequence[tirx.Expr]) -> tirx.Expr:
    """The sum of neighbours, then of pairs, and so on."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return _tree(terms[:half]) + _tree(terms[half:])


def combine(held: tirx.Buffer, parts: Sequence[tuple[tirx.Expr, tirx.Expr]], count: int) -> None:
    """Set registers to the moments of several parts of ``count`` elements, by sum and squares.

    They may be those of one of the parts.
    """
    size, each = count * len(parts), tirx.const(1 / count, held.dtype)
    total = T.alloc_buffer((1,), held.dtype, scope="local")
    T.buffer_store(total, _tree([part for part, _ in parts]), [0])
    mean = total[0] * tirx.const(1 / size, held.dtype)
    between = [part * each - mean for part, _ in parts]
    weight = tirx.const(count, held.dtype)
    squares = [own + d * d * weight for (_, own), d in zip(parts, between, strict=True)]
    T.buffer_store(held, _tree(squares), [1])
    T.buffer_store(held, total[0], [0])


def store_moments(
    matmul: MatmulFunction,
    moments: SegmentMoments,
    views: Views,
    row: tirx.Expr,
    column: tirx.Expr,
    held: tirx.Buffer,
) -> None:
    """Store the moments of the segment that a column begins."""
    at = column // i64(SEGMENT) * i64(matmul.m) + row
    for k, buffer in enumerate((moments.sums, moments.squares)):
        view = views.row(buffer)
        assert view is not None, "float32 has a view on every device"
        T.buffer_store(view, held[k], [at])
