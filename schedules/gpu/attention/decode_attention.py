# SPDX-License-Identifier: Apache-2.0
"""Kernels of an attention of few queries, a decoder's step, whose keys are divided among blocks.

Source: T. Dao, D. Haziza, F. Massa and G. Sizov, *Flash-Decoding for long-context inference*, 2023.
Heads that share keys and values, as those of grouped queries do, are rows of one block, so that a
key is read once for all of them. Some lanes share a key, and have neighbouring elements of it and
of its value::

    for part in parts of the keys:                              # blocks
        for key of the part, several in flight:                 # one for each unit of lanes
            score = sum of query * key                          # over the lanes
            higher = max(maximum, logit of the score)
            total, output = rescaled, plus weight and weight * value
        maximum, total, output of the units together            # through shared memory
    output = sum of the parts' outputs, rescaled, / that of their totals     # in another kernel
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import Extent, unravel
from schedules.tir.index_math import ceildiv, i64, ravel, simplified, volume
from schedules.tir.statements import when

from ..core.intrinsics import shuffle_xor, sync
from ..core.kernel_function import resident_blocks, unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..gemm.matmul.factor_tiles import operand_lanes
from ..gemm.matmul.matmul_pattern import Operand
from ..gemm.matmul.tiled_matmul import epilogue_lanes, store_results
from ..pointwise.coalescing import Lanes
from ..pointwise.point_kernel import PointWriter, Views
from .attention_pattern import AttentionFunction
from .decode_tile import THREADS, DecodeTile
from .score_registers import FLOAT, fill, logit_lanes, registers, store_logits


@dataclass(frozen=True)
class _Partials:
    """Results of the parts of the keys, in memory."""

    attention: AttentionFunction
    tile: DecodeTile
    """``attention`` and ``tile``: the function and its partition."""
    outputs: tirx.Buffer  # ``[rows, splits, columns]``, relative to the maximum of the part.
    sums: tirx.Buffer  # ``[rows, splits, 2]``: maximum and total.

    @classmethod
    def allocate(cls, attention: AttentionFunction, tile: DecodeTile) -> _Partials:
        """Memory for the time of a call."""
        parts = i64(_rows(attention)) * i64(tile.splits)
        outputs = T.alloc_buffer((parts * i64(attention.columns),), FLOAT, scope="global")
        sums = T.alloc_buffer((parts * i64(2),), FLOAT, scope="global")
        return cls(attention, tile, outputs, sums)

    def part(self, row: tirx.Expr, split: tirx.Expr) -> tirx.Expr:
        """Number of a part of a row."""
        return row * i64(self.tile.splits) + split

    def combine(self, views: Views, row: tirx.Expr) -> None:
        """Emit the second kernel's block of a row."""
        attention, columns = self.attention, self.attention.columns
        *batch, query = map(T.bind, unravel(row, [*attention.batch, attention.m], is_natural=True))
        with T.launch_thread("threadIdx.x", i64(THREADS)) as thread:
            splits = [T.bind(self.part(row, i64(s))) for s in range(self.tile.splits)]
            maximum, total = registers(1), registers(1)
            weights = registers(self.tile.splits)
            fill(maximum, float("-inf"))
            for s, part in enumerate(splits):
                T.buffer_store(weights, self.sums[part * i64(2)], [s])
            for s in range(self.tile.splits):
                T.buffer_store(maximum, tirx.max(maximum[0], weights[s]), [0])
            reference = T.bind(_reference(maximum[0]))
            fill(total, 0.0)
            for s, part in enumerate(splits):
                T.buffer_store(weights, _weight(attention, weights[s], reference), [s])
                more = weights[s] * self.sums[part * i64(2) + i64(1)]
                T.buffer_store(total, total[0] + more, [0])
            lanes = epilogue_lanes(attention.results, 1)
            with T.serial(i64(0), i64(-(-int(columns) // THREADS))) as turn:
                column = T.bind(turn * i64(THREADS) + thread)
                with when(None if columns % THREADS == 0 else column < i64(columns)):
                    value = registers(1)
                    fill(value, 0.0)
                    for s, part in enumerate(splits):
                        own = self.outputs[part * i64(columns) + column]
                        T.buffer_store(value, value[0] + own * weights[s], [0])
                    place = (attention.results, lanes, views, batch, query, column)
                    store_results(*place, [value[0] / total[0]], row_exists=True)


def write_decode(
    func: tirx.PrimFunc, attention: AttentionFunction, tile: DecodeTile, gpu: GPUInfo
) -> tirx.PrimFunc:
    """Write one kernel, or two where the keys are divided."""
    batch: list[Extent] = list(attention.batch)
    if tile.heads > 1:
        batch[tile.axis] = 1
    queries = tile.heads * int(attention.m)
    grid = [*batch, -(-queries // tile.rows), tile.splits]
    blocks = simplified(volume(grid))

    def body() -> None:
        partials = _Partials.allocate(attention, tile) if tile.splits > 1 else None
        with unless_empty(blocks), T.launch_thread("blockIdx.x", blocks) as block:
            views = Views.declare(func, gpu)
            place = [T.bind(each) for each in unravel(block, grid, is_natural=True)]
            threads = T.launch_thread("threadIdx.x", i64(THREADS))
            with threads as thread, resident_blocks(gpu, tile.resident):
                _Block(attention, tile, gpu, views, place, thread, partials).write()
        if partials is not None:
            rows = simplified(i64(_rows(attention)))
            with unless_empty(rows), T.launch_thread("blockIdx.x", rows) as row:
                partials.combine(Views.declare(func, gpu), row)

    return write_kernels(func, body)


def _rows(attention: AttentionFunction) -> Extent:
    return volume([*attention.batch, attention.m])


def _reference(maximum: tirx.Expr) -> tirx.Expr:
    """The maximum, or zero where it is -inf, so that no infinities are subtracted.

    Of a row that stays so the quotient of zeros is NaN, as the definition has it.
    """
    nothing = tirx.EQ(maximum, tirx.const(float("-inf"), FLOAT))
    return tirx.Select(nothing, tirx.const(0, FLOAT), maximum)


def _weight(attention: AttentionFunction, value: tirx.Expr, reference: tirx.Expr) -> tirx.Expr:
    return tirx.exp((value - reference) * tirx.const(attention.logit.factor, FLOAT))


class _Block:
    """One thread's part of a block: the rows of some heads, and a part of the keys."""

    def __init__(
        self,
        attention: AttentionFunction,
        tile: DecodeTile,
        gpu: GPUInfo,
        views: Views,
        place: Sequence[tirx.Expr],
        thread: tirx.Expr,
        partials: _Partials | None,
    ):
        self.attention, self.tile, self.gpu, self.views = attention, tile, gpu, views
        *self.batch, self.chunk, self.split = place
        self.thread, self.partials = thread, partials
        self.unit = T.bind(thread // i64(tile.lanes))
        self.lane = T.bind(thread % i64(tile.lanes))
        rows, each = tile.rows, tile.vectors * tile.vector
        self.queries = T.alloc_buffer((rows * tile.width,), FLOAT, scope="shared")
        self.output = registers(rows * each)
        self.maximum, self.total = registers(rows), registers(rows)
        self.scores = registers(rows * tile.keys)
        self.scratch = None
        if gpu.warp_size < tile.lanes:
            size = THREADS * rows * tile.keys
            self.scratch = T.alloc_buffer((size,), FLOAT, scope="shared")
        self.key, self.value = (
            operand_lanes(operand, tile.vector) for operand in (attention.key, attention.value)
        )

    def write(self) -> None:
        tile = self.tile
        self._load_queries()
        fill(self.output, 0.0)
        fill(self.total, 0.0)
        fill(self.maximum, float("-inf"))
        n, step = i64(self.attention.n), tile.units * tile.keys
        steps = T.bind(ceildiv(ceildiv(self.attention.n, step), tile.splits))
        begin = T.bind(self.split * steps * i64(step))
        end = T.bind(tirx.min(n, begin + steps * i64(step)))
        sync()
        with T.serial(i64(0), steps) as number:
            first = begin + number * i64(step) + self.unit
            keys = [T.bind(first + i64(u * tile.units)) for u in range(tile.keys)]
            self._visit(keys, end)
        self._combine_units()

    def _row(self, r: int) -> tuple[list[tirx.Expr], tirx.Expr, tirx.Expr]:
        """Batch and query of a row of the block, and whether it exists."""
        queries, total = int(self.attention.m), self.tile.heads * int(self.attention.m)
        flat = self.chunk * i64(self.tile.rows) + i64(r)
        last = tirx.min(flat, i64(total - 1))
        batch = list(self.batch)
        if self.tile.heads > 1:
            axis = self.tile.axis
            batch[axis] = last // i64(queries)
        return batch, last % i64(queries), flat < i64(total)

    def _load_queries(self) -> None:
        """Copy the queries to shared memory, with zeros behind each."""
        width, depth = self.tile.width, i64(self.attention.depth)
        operand, single = self.attention.query, operand_lanes(self.attention.query, 1)
        for r in range(self.tile.rows):
            batch, query, _ = self._row(r)
            with T.serial(i64(0), i64(-(-width // THREADS))) as turn:
                column = T.bind(turn * i64(THREADS) + self.thread)
                with when(column < i64(width)):
                    T.buffer_store(self.queries, tirx.const(0, FLOAT), [i64(r * width) + column])
                with when(column < depth):
                    writer = self._writer(operand, single, batch, query, column)
                    T.buffer_store(
                        self.queries, writer.value(operand.value, 0), [i64(r * width) + column]
                    )

    def _writer(
        self,
        operand: Operand,
        lanes: Lanes,
        batch: Sequence[tirx.Expr],
        row: tirx.Expr,
        at: tirx.Expr,
    ) -> PointWriter:
        """Emit the loads of neighbours in memory, from a place of the operand on."""
        places = []
        for k in range(lanes.vector):
            own = [at, row + i64(k)] if operand.rows_first else [row, at + i64(k)]
            places.append([*batch, *own])
        writer = PointWriter(lanes, self.views, places)
        writer.steps()
        return writer

    def _visit(self, keys: Sequence[tirx.Expr], end: tirx.Expr) -> None:
        """Add some keys, one after the other of the lanes' unit."""
        tile, attention = self.tile, self.attention
        batch = self._row(0)[0]
        last = i64(attention.n) - i64(1)
        places = [T.bind(tirx.min(key, last)) for key in keys]
        key, value = (
            [self._loads(kind, batch, key_place) for key_place in places]
            for kind in ("key", "value")
        )
        for r in range(tile.rows):
            for u in range(tile.keys):
                T.buffer_store(self.scores, self._product(r, key[u]), [r * tile.keys + u])
        self._over_lanes()
        single = logit_lanes(attention, 1)
        for r in range(tile.rows):
            own, query, _ = self._row(r)
            for u, key_place in enumerate(places):
                e = r * tile.keys + u
                where = [*own, query, key_place]
                store_logits(attention, single, self.views, where, self.scores, [e], 1)
                with when(keys[u] >= end):
                    T.buffer_store(self.scores, tirx.const(float("-inf"), FLOAT), [e])
            self._rescale(r)
        for u, loaded in enumerate(value):
            with when(keys[u] < end):  # where there is none, a value read instead may be infinite
                self._add(u, loaded)

    def _loads(
        self, kind: str, batch: Sequence[tirx.Expr], key_place: tirx.Expr
    ) -> list[tuple[PointWriter, tirx.Expr]]:
        """Emit the lane's loads of a key or a value."""
        is_key = kind == "key"
        operand = self.attention.key if is_key else self.attention.value
        lanes = self.key if is_key else self.value
        loads = []
        for v in range(self.tile.vectors):
            inner = self._element(
                v, int(self.attention.depth if is_key else self.attention.columns)
            )
            where = (key_place, inner) if is_key else (inner, key_place)
            loads.append((self._writer(operand, lanes, batch, *where), operand.value))
        return loads

    def _element(self, v: int, length: int) -> tirx.Expr:
        """The first element of one of the lane's vectors; past the end that of the last vector."""
        first = self._first(v)
        if self.tile.width <= length:
            return first
        return T.bind(tirx.min(first, i64(length - self.tile.vector)))

    def _first(self, v: int) -> tirx.Expr:
        tile = self.tile
        return self.lane * i64(tile.vector) + i64(v * tile.lanes * tile.vector)

    def _product(self, r: int, key: Sequence[tuple[PointWriter, tirx.Expr]]) -> tirx.Expr:
        """Part of a score that the lane adds up."""
        total: tirx.Expr = tirx.const(0, FLOAT)
        for v, (writer, value) in enumerate(key):
            part: tirx.Expr = tirx.const(0, FLOAT)
            for k in range(self.tile.vector):
                query = self.queries[i64(r * self.tile.width + k) + self._first(v)]
                part = part + query * writer.value(value, k)
            exists = self._first(v) < i64(self.attention.depth)
            if self.tile.width > int(self.attention.depth):  # zeros times infinities are NaN
                part = tirx.Select(exists, part, tirx.const(0, FLOAT))
            total = total + part
        return total

    def _over_lanes(self) -> None:
        """Add up the scores over the lanes; all of them get the sums."""
        count, width = self.tile.rows * self.tile.keys, self.tile.lanes
        while (width := width // 2) > 0:
            if self.scratch is None:
                for e in range(count):
                    other = shuffle_xor(self.scores[e], width, self.tile.lanes)
                    T.buffer_store(self.scores, self.scores[e] + other, [e])
                continue
            sync()
            for e in range(count):
                T.buffer_store(self.scratch, self.scores[e], [self.thread * i64(count) + i64(e)])
            sync()
            other = T.bind((self.thread ^ i64(width)) * i64(count))
            for e in range(count):
                more = self.scratch[other + i64(e)]
                T.buffer_store(self.scores, self.scores[e] + more, [e])

    def _rescale(self, r: int) -> None:
        """Replace the logits of a row by weights; rescale what was summed up so far."""
        keys, length = self.tile.keys, self.tile.vectors * self.tile.vector
        most, rescaling = registers(1), registers(1)
        T.buffer_store(most, self.maximum[r], [0])
        for e in range(r * keys, (r + 1) * keys):
            T.buffer_store(most, tirx.max(most[0], self.scores[e]), [0])
        reference = registers(1)
        T.buffer_store(reference, _reference(most[0]), [0])
        weight = _weight(self.attention, self.maximum[r], reference[0])
        T.buffer_store(rescaling, weight, [0])
        T.buffer_store(self.maximum, most[0], [r])
        T.buffer_store(self.total, self.total[r] * rescaling[0], [r])
        for e in range(r * keys, (r + 1) * keys):
            T.buffer_store(self.scores, _weight(self.attention, self.scores[e], reference[0]), [e])
            T.buffer_store(self.total, self.total[r] + self.scores[e], [r])
        for e in range(r * length, (r + 1) * length):
            T.buffer_store(self.output, self.output[e] * rescaling[0], [e])

    def _add(self, u: int, loaded: Sequence[tuple[PointWriter, tirx.Expr]]) -> None:
        """Add a weighted value to the sums of all rows."""
        tile = self.tile
        for r in range(tile.rows):
            weight = self.scores[r * tile.keys + u]
            for v, (writer, value) in enumerate(loaded):
                for k in range(tile.vector):
                    e = (r * tile.vectors + v) * tile.vector + k
                    more = weight * writer.value(value, k)
                    T.buffer_store(self.output, self.output[e] + more, [e])

    def _combine_units(self) -> None:
        """Combine the sums of the block's units; store results, or those of the part."""
        tile, columns = self.tile, int(self.attention.columns)
        shared = T.alloc_buffer((tile.units * columns,), FLOAT, scope="shared")
        sums = T.alloc_buffer((tile.units * 2,), FLOAT, scope="shared")
        for r in range(tile.rows):
            sync()
            self._share_sums(r, shared, sums)
            sync()
            self._store_row(r, shared, sums)

    def _share_sums(self, r: int, shared: tirx.Buffer, sums: tirx.Buffer) -> None:
        tile, columns = self.tile, int(self.attention.columns)
        with when(tirx.EQ(self.lane, i64(0))):
            T.buffer_store(sums, self.maximum[r], [self.unit * i64(2)])
            T.buffer_store(sums, self.total[r], [self.unit * i64(2) + i64(1)])
        for v in range(tile.vectors):
            first = self._first(v)
            with when(None if tile.width <= columns else first < i64(columns)):
                for k in range(tile.vector):
                    e = (r * tile.vectors + v) * tile.vector + k
                    place = self.unit * i64(columns) + first + i64(k)
                    T.buffer_store(shared, self.output[e], [place])

    def _store_row(self, r: int, shared: tirx.Buffer, sums: tirx.Buffer) -> None:
        tile, attention, columns = self.tile, self.attention, int(self.attention.columns)
        batch, query, exists = self._row(r)
        maximum, total = registers(1), registers(1)
        weights = registers(tile.units)
        fill(maximum, float("-inf"))
        fill(total, 0.0)
        for unit in range(tile.units):
            T.buffer_store(maximum, tirx.max(maximum[0], sums[unit * 2]), [0])
        reference = T.bind(_reference(maximum[0]))
        for unit in range(tile.units):
            T.buffer_store(weights, _weight(attention, sums[unit * 2], reference), [unit])
            T.buffer_store(total, total[0] + weights[unit] * sums[unit * 2 + 1], [0])
        for start in range(0, columns, THREADS):
            column = self.thread + i64(start)
            with when(exists, None if start + THREADS <= columns else column < i64(columns)):
                value = registers(1)
                fill(value, 0.0)
                for unit in range(tile.units):
                    own = shared[i64(unit * columns) + column]
                    T.buffer_store(value, value[0] + own * weights[unit], [0])
                self._store(batch, query, column, value[0], maximum[0], total[0])

    def _store(
        self,
        batch: Sequence[tirx.Expr],
        query: tirx.Expr,
        column: tirx.Expr,
        value: tirx.Expr,
        maximum: tirx.Expr,
        total: tirx.Expr,
    ) -> None:
        attention, partials = self.attention, self.partials
        if partials is None:
            lanes = epilogue_lanes(attention.results, 1)
            place = (attention.results, lanes, self.views, batch, query, column)
            store_results(*place, [value / total], row_exists=True)
            return
        row = ravel([*batch, query], [*attention.batch, attention.m])
        part = T.bind(partials.part(row, self.split))
        T.buffer_store(partials.outputs, value, [part * i64(attention.columns) + column])
        with when(tirx.EQ(column, i64(0))):
            T.buffer_store(partials.sums, maximum, [part * i64(2)])
            T.buffer_store(partials.sums, total, [part * i64(2) + i64(1)])
