# SPDX-License-Identifier: Apache-2.0
"""Products of rows in bytes with a constant matrix of 4 bits, summed in integers.

Each block of a row becomes integers from -127 to 127 and a scale; its products with the integers
of the matrix are exact, and the sum of a block is scaled once::

    for columns in T.parallel(128):
        for group in range(128):
            for word in range(4):
                part += dot(weight[...] & 0x0F0F0F0F, x[...]) + dot(weight[...] >> 4 & ..., x[...])
            total += float(part - zero * x_sum[group]) * (scale[group] * x_scale[group])

An instruction multiplies four pairs of bytes in each lane (VNNI, NEON), or two pairs of them,
whose sums of 16 bits hold 32 products of 4 by 8 bits (AVX2, AVX-512).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import mul

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import Extent
from schedules.workload.conv2d import WORD_BYTES

from ...core.machine import CPUInfo
from ...core.micro_kernel import add_word_products
from ..selections import Shapes, cpu_kernel, long, own_extents
from .narrow_matrix import (
    FLOAT,
    GRANULE,
    OFFSET,
    NarrowMatrix,
    Places,
    flat,
    stored_shape,
    work_of,
)

LARGEST = 127
"""Largest magnitude of a row's integers."""
_LANES = 8  # numbers of a row that become bytes at once
_LEAST = 2.0**-119  # largest number of a block below which all of it counts as 0
_MOST = float(np.finfo(np.float32).max)
_WORTH_THREADS = 16  # rows
_RATES = {"vpdpbusd": 1.0, "maddubs": 2.0, "usdot": 1.0, "sdot": 1.0}
"""Products a second of each instruction, by those of words of bytes, or of floats without such."""


def byte_rows(rows: Sequence[Extent], matrix: NarrowMatrix) -> tirx.PrimFunc:
    """Build the kernel that makes bytes of rows.

    Parameters
    ----------
    rows : Sequence
        Extents of ``x`` but the last; they may be symbolic.
    matrix : NarrowMatrix
        The matrix by which they are multiplied.

    Returns
    -------
    tirx.PrimFunc
        ``main(x, integers, scale, total)``: ``x`` float32 [*rows, depth]; ``integers`` int8 of the
        same shape; ``scale`` float32 [*rows, depth / byte_block], the largest magnitude of a block
        by 127, or NaN where it has an infinity or NaN; ``total`` float32, the sum of its integers.
    """
    rows = own_extents(rows)
    size = matrix.byte_block
    blocks = matrix.depth // size
    buffers: Shapes = {
        "x": ((*rows, matrix.depth), FLOAT),
        "integers": ((*rows, matrix.depth), "int8"),
        "scale": ((*rows, blocks), FLOAT),
        "total": ((*rows, blocks), FLOAT),
    }
    count = reduce(mul, rows, long(1))

    def write(*arguments: tirx.Buffer) -> None:
        x, integers, scale, total = map(flat, arguments)

        def row(number: tirx.Expr) -> None:
            with T.serial(long(0), long(blocks)) as block:
                _write_block(x, integers, scale, total, number * long(blocks) + block, size)

        if isinstance(count, tirx.IntImm) and int(count) < _WORTH_THREADS:
            with T.serial(long(0), count) as number:
                row(number)
            return
        with T.If(count < long(_WORTH_THREADS)):
            with T.Then(), T.serial(long(0), count) as number:
                row(number)
            with T.Else(), T.parallel(long(0), count) as number:
                row(number)

    return cpu_kernel("ByteRows", buffers, write)


def _write_block(
    x: tirx.Buffer,
    integers: tirx.Buffer,
    scale: tirx.Buffer,
    total: tirx.Buffer,
    block: tirx.Expr,
    size: int,
) -> None:
    """Write the bytes of a block of a row."""
    with T.sblock("block"):
        T.reads()
        T.writes()
        places = [
            T.ramp(block * long(size) + long(start), 1, _LANES) for start in range(0, size, _LANES)
        ]
        sums_of = {
            name: T.sblock_alloc_buffer((_LANES,), dtype)
            for name, dtype in (("largest", FLOAT), ("sum", FLOAT), ("integers", "int32"))
        }
        every = T.ramp(0, 1, _LANES)

        def keep(name: str, value: tirx.Expr) -> None:
            T.buffer_store(sums_of[name], value, [every])

        sizes = [_absolute(x[place]) for place in places]
        keep("largest", reduce(tirx.max, sizes))
        keep("sum", reduce(lambda a, b: a + b, (one * _all(1 / 64, FLOAT) for one in sizes)))
        largest = T.bind(reduce(tirx.max, (sums_of["largest"][lane] for lane in range(_LANES))))
        sum_of_sizes = reduce(lambda a, b: a + b, (sums_of["sum"][lane] for lane in range(_LANES)))
        nan = T.reinterpret(FLOAT, tirx.const(0x7FC00000, "int32"))
        unit = largest * tirx.const(1 / LARGEST, FLOAT)
        is_finite = sum_of_sizes <= tirx.const(_MOST, FLOAT)
        T.buffer_store(scale, tirx.Select(is_finite, unit, nan), [block])
        zero, most = tirx.const(0, FLOAT), tirx.const(LARGEST, FLOAT)
        factor = T.bind(tirx.Select(largest >= tirx.const(_LEAST, FLOAT), most / largest, zero))
        for number, place in enumerate(places):
            rounded = tirx.nearbyint(x[place] * T.broadcast(factor, _LANES))
            whole = T.Cast(f"int32x{_LANES}", rounded)
            keep("integers", whole if number == 0 else sums_of["integers"][every] + whole)
            T.buffer_store(integers, T.Cast(f"int8x{_LANES}", whole), [place])
        sums = reduce(lambda a, b: a + b, (sums_of["integers"][lane] for lane in range(_LANES)))
        T.buffer_store(total, T.Cast(FLOAT, sums), [block])


def _absolute(x: tirx.Expr) -> tirx.Expr:
    """Magnitudes, by their bits."""
    kind = f"int32x{_LANES}"
    return T.reinterpret(f"{FLOAT}x{_LANES}", T.reinterpret(kind, x) & _all(0x7FFFFFFF, "int32"))


def _all(value: float, dtype: str) -> tirx.Expr:
    return T.broadcast(tirx.const(value, dtype), _LANES)


def narrow_dot(
    rows: Sequence[Extent], matrix: NarrowMatrix, zeros: str, cpu: CPUInfo
) -> tirx.PrimFunc:
    """Build the kernel of the product of rows in bytes with a matrix of 4 bits.

    Parameters
    ----------
    rows : Sequence
        Extents of ``x`` but the last; they may be symbolic.
    matrix : NarrowMatrix
        The matrix, packed for bytes.
    zeros : str
        Type of the zero points, if there are any.
    cpu : CPUInfo
        A CPU with ``byte_dots``.

    Returns
    -------
    tirx.PrimFunc
        ``main(integers, x_scale, x_total, weight, scale, [zero,] out)``: the results of
        :func:`byte_rows`, the matrix as :func:`.narrow_matmul.narrow_matmul` takes it, and ``out``
        float32 [*rows, columns].
    """
    rows = own_extents(rows)
    per_block = (matrix.tiles, matrix.groups, matrix.tile)
    per_row = (*rows, matrix.depth // matrix.byte_block)
    buffers: Shapes = {
        "integers": ((*rows, matrix.depth), "int8"),
        "x_scale": (per_row, FLOAT),
        "x_total": (per_row, FLOAT),
        "weight": stored_shape(matrix),
        "scale": (per_block, FLOAT),
        **({"zero": (per_block, zeros)} if matrix.has_zeros else {}),
        "out": ((*rows, matrix.columns), FLOAT),
    }

    def write(*arguments: tirx.Buffer) -> None:
        integers, x_scale, x_total, weight, scale, *zero, out = map(flat, arguments)
        count = reduce(mul, rows, long(1))
        words = T.decl_buffer((count * long(matrix.depth // 4),), "int32", data=arguments[0].data)
        given = _Arguments(words, x_scale, x_total, weight, scale, zero[0] if zero else None, out)
        with T.parallel(long(0), long(matrix.tiles)) as tile:
            _Writer(matrix, cpu, count, given).write(tile)

    return cpu_kernel("NarrowDot", buffers, write, work_of(rows, matrix, _RATES[cpu.byte_dots]))


@dataclass(frozen=True)
class _Arguments:
    """Flat views of the kernel's arguments; ``x`` are words of four integers."""

    x: tirx.Buffer
    x_scale: tirx.Buffer
    x_total: tirx.Buffer
    weight: tirx.Buffer
    scale: tirx.Buffer
    zero: tirx.Buffer | None
    out: tirx.Buffer


@dataclass(frozen=True)
class _Writer:
    """Writer of the loops of a tile of columns."""

    matrix: NarrowMatrix
    cpu: CPUInfo
    rows: tirx.Expr
    given: _Arguments

    @property
    def _places(self) -> Places:
        return Places(self.matrix, self.cpu.lanes(FLOAT))

    def write(self, tile: tirx.Expr) -> None:
        """Write the products of all rows, some at a time, and of those that are left."""
        height = 4 if self.cpu.num_vector_registers < 32 else 6
        if isinstance(self.rows, tirx.IntImm):
            height = min(height, int(self.rows))
        with T.serial(long(0), tirx.floordiv(self.rows, long(height))) as number:
            self._multiply(tile, number * long(height), height)
        for left in range(1, height):
            if isinstance(self.rows, tirx.IntImm):
                if int(self.rows) % height == left:
                    self._multiply(tile, self.rows - long(left), left)
                continue
            with T.If(tirx.floormod(self.rows, long(height)) == long(left)), T.Then():
                self._multiply(tile, self.rows - long(left), left)

    def _multiply(self, tile: tirx.Expr, row: tirx.Expr, height: int) -> None:
        """Write the products of some rows: two registers a row and vector hold the sums."""
        most = 6 if self.cpu.num_vector_registers < 32 else 12
        width = min(max(1, most // height), self._places.vectors)
        for start in range(0, self._places.vectors, width):
            vectors = range(start, min(start + width, self._places.vectors))
            self._multiply_vectors(tile, row, height, vectors)

    def _multiply_vectors(
        self, tile: tirx.Expr, row: tirx.Expr, height: int, vectors: Sequence[int]
    ) -> None:
        matrix, places, given = self.matrix, self._places, self.given
        lanes, size = places.lanes, matrix.byte_block
        blocks = matrix.depth // size
        cells = list(product(range(height), vectors))
        every = T.ramp(0, 1, lanes)
        with T.sblock("rows"):
            T.reads()
            T.writes()
            sums = {cell: T.sblock_alloc_buffer((lanes,), FLOAT) for cell in cells}
            for total in sums.values():
                T.buffer_store(total, T.broadcast(tirx.const(0, FLOAT), lanes), [every])
            with T.serial(long(0), long(blocks)) as block, T.sblock("block"):
                T.reads()
                T.writes()
                parts = {cell: self._part() for cell in cells}
                for step in range(0, size, GRANULE):
                    first = block * long(size) + long(step)
                    if height == 1:
                        places.prefetch(given.weight, tile, first)
                    self._add_products(tile, row, first, parts)
                group = tirx.floordiv(block * long(size), long(matrix.block))
                for (line, vector), part in parts.items():
                    at = (row + long(line)) * long(blocks) + block
                    number = self._centred(tile, group, vector, part, given.x_total[at])
                    factor = given.scale[places.of_group(tile, group, vector)]
                    factor = factor * T.broadcast(given.x_scale[at], lanes)
                    total = sums[line, vector]
                    T.buffer_store(total, total[every] + number * factor, [every])
            for (line, vector), total in sums.items():
                place = places.result(row + long(line), tile, vector)
                T.buffer_store(given.out, total[every], [place])

    def _add_products(
        self,
        tile: tirx.Expr,
        row: tirx.Expr,
        first: tirx.Expr,
        parts: dict[tuple[int, int], tirx.Buffer],
    ) -> None:
        """Add the products of ``GRANULE`` rows of the matrix."""
        lanes, given = self._places.lanes, self.given
        four = T.broadcast(tirx.const(4, "int32"), lanes)
        mask = T.broadcast(tirx.const(0x0F0F0F0F, "int32"), lanes)
        for vector in sorted({vector for _, vector in parts}):
            word = T.bind(given.weight[self._places.stored(tile, first, vector)])
            halves = [T.bind(word & mask), T.bind((word >> four) & mask)]
            for (line, own), part in parts.items():
                if own != vector:
                    continue
                place = (row + long(line)) * long(self.matrix.depth // 4) + tirx.floordiv(
                    first, long(4)
                )
                factors = [T.broadcast(given.x[place + long(half)], lanes) for half in range(2)]
                self._accumulate(part, list(zip(halves, factors, strict=True)))

    @property
    def _is_short(self) -> bool:
        """Whether sums of a block have 16 bits."""
        return self.cpu.byte_dots == "maddubs"

    def _part(self) -> tirx.Buffer:
        """Zeros for the sums of a block."""
        lanes = self._places.lanes * (2 if self._is_short else 1)
        dtype = "int16" if self._is_short else "int32"
        part = T.sblock_alloc_buffer((lanes,), dtype)
        T.buffer_store(part, T.broadcast(tirx.const(0, dtype), lanes), [T.ramp(0, 1, lanes)])
        return part

    def _accumulate(self, part: tirx.Buffer, pairs: Sequence[tuple[tirx.Expr, tirx.Expr]]) -> None:
        """Add the products of the bytes of pairs: unsigned ones, and signed ones."""
        lanes = self._places.lanes
        count = int(part.shape[0])
        every = T.ramp(0, 1, count)
        bits = 32 * lanes
        total = part[every]
        if self._is_short:
            name = {256: "llvm.x86.avx2.pmadd.ub.sw", 512: "llvm.x86.avx512.pmaddubs.w.512"}[bits]
            products = [
                T.call_llvm_pure_intrin(f"int16x{count}", name, *map(self._bytes, pair))
                for pair in pairs
            ]
            T.buffer_store(part, total + (products[0] + products[1]), [every])
            return
        for weight, x in pairs:
            signed = self.cpu.byte_dots == "sdot"  # the weight's are small
            summed = add_word_products(part[every], weight, x, lanes, WORD_BYTES, signed=signed)
            T.buffer_store(part, summed, [every])

    def _bytes(self, words: tirx.Expr) -> tirx.Expr:
        return T.reinterpret(f"int8x{4 * self._places.lanes}", words)

    def _centred(
        self,
        tile: tirx.Expr,
        group: tirx.Expr,
        vector: int,
        part: tirx.Buffer,
        x_total: tirx.Expr,
    ) -> tirx.Expr:
        """The sums of a block as floats, less what the integers are above their zero points."""
        lanes, given = self._places.lanes, self.given
        total = part[T.ramp(0, 1, int(part.shape[0]))]
        if self._is_short:
            bits = 32 * lanes
            name = {256: "llvm.x86.avx2.pmadd.wd", 512: "llvm.x86.avx512.pmaddw.d.512"}[bits]
            ones = T.broadcast(tirx.const(1, "int16"), 2 * lanes)
            total = T.call_llvm_pure_intrin(f"int32x{lanes}", name, total, ones)
        number = T.Cast(f"{FLOAT}x{lanes}", total)
        if given.zero is None:
            return number - T.broadcast(x_total * tirx.const(OFFSET, FLOAT), lanes)
        zero = self._places.zeros(given.zero, tile, group, vector)
        zero = zero + T.broadcast(tirx.const(OFFSET, FLOAT), lanes)
        return number - zero * T.broadcast(x_total, lanes)
