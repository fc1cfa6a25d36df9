# SPDX-License-Identifier: Apache-2.0
"""Registers of a thread's scores, their change to the values of logits, and to weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.index_math import i64
from schedules.tir.statements import when

from ..core.machine_costs import COSTS
from ..gemm.matmul.matmul_pattern import divides
from ..gemm.matmul.tensor_core_matmul import Exchanging, rows_after, store_products
from ..gemm.matmul.tensor_core_tile import ELEMENTS, STEP
from ..pointwise.coalescing import Lanes, classify
from ..pointwise.point_kernel import PointWriter, Views
from .attention_pattern import AttentionFunction

FLOAT = "float32"
_QUAD = 4  # lanes that share a row of a product, two neighbouring columns each


def registers(count: int) -> tirx.Buffer:
    """Allocate some registers of a thread."""
    return T.alloc_buffer((count,), FLOAT, scope="local")


def fill(buffer: tirx.Buffer, value: float) -> None:
    """Store a value in all registers of a buffer."""
    for e in range(int(buffer.shape[0])):
        T.buffer_store(buffer, tirx.const(value, FLOAT), [e])


def logit_lanes(attention: AttentionFunction, count: int) -> Lanes:
    """Lanes that read the bias and mask of ``count`` neighbouring scores at once, if aligned."""
    logit = attention.logit
    lanes = classify(logit.space, count, [logit.score])
    return lanes if lanes.is_aligned else classify(logit.space, 1, [logit.score])


def row_that_exists(attention: AttentionFunction, rows: int, row: tirx.Expr) -> tirx.Expr:
    """A row of a tile of ``rows``, or the last one for those past the end."""
    if not divides(rows, attention.m):
        row = tirx.min(row, i64(attention.m) - i64(1))
    return T.bind(row)


def store_logits(
    # ``attention``, ``lanes``, ``views``: the function, a result of :func:`logit_lanes`, and views
    # of its tensors.
    attention: AttentionFunction,
    lanes: Lanes,
    views: Views,
    place: Sequence[tirx.Expr],  # Batch, row and column of the first score.
    scores: tirx.Buffer,  # Registers.
    elements: Sequence[int],  # Indices of the scores.
    keys: int | None,  # Keys of a tile, or None if all of them exist and are visible.
) -> None:
    """Replace neighbouring scores by the values of logits; -inf past the last key."""
    *before, column = place
    logit = attention.logit
    is_whole = keys is None or divides(keys, attention.n)
    value = logit.visible if keys is None else logit.value
    with when(None if is_whole else column < i64(attention.n)):
        places = [[*before, column + i64(k)] for k in range(lanes.vector)]
        writer = PointWriter(lanes, views, places)
        writer.give(logit.score, [scores[e] for e in elements])
        writer.steps()
        for k, e in enumerate(elements):
            T.buffer_store(scores, writer.value(value, k), [e])
    if not is_whole:
        with when(column >= i64(attention.n)):
            for e in elements:
                T.buffer_store(scores, tirx.const(float("-inf"), FLOAT), [e])


class RowTile(Protocol):
    """Tile of which a warp has some rows."""

    @property
    def rows(self) -> int:
        """Queries of the block."""

    @property
    def warp_rows(self) -> int:
        """Queries of a warp, a multiple of 16."""

    @property
    def keys(self) -> int:
        """Keys that the block visits at a time."""

    @property
    def columns(self) -> int:
        """Elements of a value that the block computes."""


class LaneCore(Exchanging, Protocol):
    """Instructions that a softmax takes."""

    def pack(self, low: tirx.Expr, high: tirx.Expr) -> tirx.Expr:
        """Two floats as one register of a factor."""

    def exp2(self, value: tirx.Expr) -> tirx.Expr:
        """Two to the power of a float32."""


class RowSoftmax:
    """Online softmax of a warp's rows, in the layout of the sums of products of 16 x 8."""

    def __init__(
        self,
        lanes: LaneCore,  # Instructions.
        # ``attention``, ``tile``, ``views``: the function, its tile, and views of its tensors.
        attention: AttentionFunction,
        tile: RowTile,
        views: Views,
        place: Sequence[tirx.Expr],  # Batch and first query of the warp.
        lane: tirx.Expr,
    ):
        self.lanes, self.attention, self.tile, self.views = lanes, attention, tile, views
        *self.batch, self.first = place
        self.lane, self.blocks = lane, tile.warp_rows // STEP
        self.scores = registers(tile.warp_rows * tile.keys // COSTS.warp)
        self.output = registers(tile.warp_rows * tile.columns // COSTS.warp)
        self.maximum, self.total, self.rescaling = (registers(2 * self.blocks) for _ in range(3))

    def begin(self) -> None:
        """Emit the state before the first tile."""
        fill(self.output, 0.0)
        fill(self.total, 0.0)
        fill(self.maximum, float("-inf"))

    def pack(self, key: int, left: tirx.Buffer, first: int) -> None:
        """Store the weights of 16 keys as the registers of a left factor."""
        for r in range(4 * self.blocks):
            # Rows of the upper, the lower half; then the next eight columns.
            e = self.place(r // 4, key // ELEMENTS, self.tile.keys) + r % 4 // 2 * 4 + r % 2 * 2
            T.buffer_store(left, self.lanes.pack(self.scores[e], self.scores[e + 1]), [first + r])

    def place(self, block: int, number: int, columns: int) -> int:
        """The first sum of a product of 16 x 8."""
        return (block * (columns // ELEMENTS) + number) * 4

    def _own(self, half: int, columns: int) -> list[int]:
        """The lane's sums in one of its rows, of which each 16 rows have two."""
        first = self.place(half // 2, 0, columns) + half % 2 * 2
        return [first + 4 * j + e for j in range(columns // ELEMENTS) for e in range(2)]

    def weigh(self, first: tirx.Expr) -> None:
        """Turn scores of the keys from ``first`` on into weights; rescale the sum of them."""
        self._logits(first)
        for half in range(2 * self.blocks):
            elements = self._own(half, self.tile.keys)
            higher = registers(1)
            T.buffer_store(higher, self.maximum[half], [0])
            for e in elements:
                T.buffer_store(higher, tirx.max(higher[0], self.scores[e]), [0])
            self._over_quad(higher, 0, tirx.max)
            # While all logits are -inf, any other reference avoids the difference of infinities.
            nothing = tirx.EQ(higher[0], tirx.const(float("-inf"), FLOAT))
            reference = registers(1)
            zero = tirx.const(0, FLOAT)
            T.buffer_store(reference, tirx.Select(nothing, zero, higher[0]), [0])
            [rescaling] = self._powers(reference[0], [self.maximum[half]])
            T.buffer_store(self.rescaling, rescaling, [half])
            T.buffer_store(self.maximum, higher[0], [half])
            T.buffer_store(self.total, self.total[half] * self.rescaling[half], [half])
            weights = self._powers(reference[0], [self.scores[e] for e in elements])
            for e, weight in zip(elements, weights, strict=True):
                T.buffer_store(self.scores, weight, [e])
                T.buffer_store(self.total, self.total[half] + self.scores[e], [half])

    def rescale(self) -> None:
        """Emit the product of what was summed up and the change of the weights' reference."""
        for half in range(2 * self.blocks):
            for e in self._own(half, self.tile.columns):
                T.buffer_store(self.output, self.output[e] * self.rescaling[half], [e])

    def _powers(self, reference: tirx.Expr, values: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        """Exponentials of some values of logits less a reference, times the factor of the logit."""
        factor = self.attention.logit.factor * math.log2(math.e)
        scale = tirx.const(factor, FLOAT)
        if factor > 1:  # products by it may overflow
            return [self.lanes.exp2((value - reference) * scale) for value in values]
        scaled = registers(1)
        T.buffer_store(scaled, reference * scale, [0])
        return [self.lanes.exp2(value * scale - scaled[0]) for value in values]

    def _logits(self, first: tirx.Expr) -> None:
        """Replace the scores by the values of logits, -inf where a key does not exist."""
        attention, keys = self.attention, self.tile.keys
        logit, whole = attention.logit, []
        if not divides(keys, attention.n):
            whole.append(first + i64(keys) <= i64(attention.n))
        if logit.ahead is not None:
            whole.append(first + i64(keys - 1) <= self.first + i64(logit.ahead))
        if not logit.visible.same_as(logit.score):
            with when(*whole):
                self._store_logits(first, hides=False)
        if whole:
            with when(tirx.Not(tirx.all(*whole))):
                self._store_logits(first, hides=True)

    def _store_logits(self, first: tirx.Expr, hides: bool) -> None:
        lanes = logit_lanes(self.attention, 2)
        for half in range(2 * self.blocks):
            row = self.first + i64(self.lane // _QUAD + 8 * half)
            row = row_that_exists(self.attention, self.tile.rows, row)
            own = self._own(half, self.tile.keys)
            for place in range(0, len(own), lanes.vector):
                column = ELEMENTS * (place // 2) + place % 2
                column = T.bind(first + i64(self.lane % _QUAD * 2) + i64(column))
                at = own[place : place + lanes.vector]
                where = [*self.batch, row, column]
                keys = self.tile.keys if hides else None
                store_logits(self.attention, lanes, self.views, where, self.scores, at, keys)

    def _over_quad(
        self,
        values: tirx.Buffer,
        place: int,
        combine: Callable[[tirx.Expr, tirx.Expr], tirx.Expr],
    ) -> None:
        """Combine values of the lanes that share a row; all of them get the result."""
        other = registers(1)
        for mask in (1, 2):
            T.buffer_store(other, self.lanes.exchange(values[place], mask), [0])
            T.buffer_store(values, combine(values[place], other[0]), [place])

    def finish(self) -> None:
        """Divide by the sums of the weights; store."""
        results = self.attention.results
        for half in range(2 * self.blocks):
            self._over_quad(self.total, half, lambda a, b: a + b)
            T.buffer_store(self.total, tirx.const(1, FLOAT) / self.total[half], [half])
        exist = divides(self.tile.rows, results.m)
        for i in range(self.blocks):
            span = self.place(i, 0, self.tile.columns), self.place(i + 1, 0, self.tile.columns)
            sums = [self.output[e] * self.total[2 * i + e // 2 % 2] for e in range(*span)]
            rows = rows_after(results, self.batch, self.first + i64(STEP * i), exist)
            store_products(self.lanes, self.lane, results, self.views, rows, i64(0), sums)
