# SPDX-License-Identifier: Apache-2.0
"""Products with a constant matrix of 16, 8 or 4 bits, which is widened in registers.

Few rows are bound by the bytes of the matrix. Each thread reads blocks of columns from one end to
the other, and multiplies what it widens::

    for columns in T.parallel(128):
        for group in range(128):
            for word in range(4):
                for place in T.unroll(8):
                    for lane in T.vectorized(32):
                        part[lane] += x[...] * float(word[lane] << (28 - 4 * place) >> 28)
            total[lane] += part[lane] * scale[columns, group, lane]

More rows are bound by arithmetic. Some rows of a block of columns are widened to a panel in the
first-level cache, by which all rows of ``x`` are multiplied in register tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import mul

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import Extent

from ...core.machine import CPUInfo
from ..selections import Shapes, cpu_kernel, long, own_extents
from .narrow_matrix import (
    FLOAT,
    GRANULE,
    NarrowMatrix,
    Places,
    flat,
    lowest_bit,
    stored_shape,
    work_of,
)

_FEW_ROWS = 2
"""Rows up to which each is multiplied by itself."""
_PANEL_BYTES = 16 * 1024
_UNROLLED = 4  # steps of a loop over the rows of a panel


def narrow_matmul(
    rows: Sequence[Extent], matrix: NarrowMatrix, zeros: str, cpu: CPUInfo
) -> tirx.PrimFunc:
    """Build the kernel of ``out[m, n] = sum_k x[m, k] * (weight[k, n] - zero) * scale``.

    Parameters
    ----------
    rows : Sequence
        Extents of ``x`` but the last; they may be symbolic.
    matrix : NarrowMatrix
        The matrix.
    zeros : str
        Type of the zero points, if there are any.
    cpu : CPUInfo
        The CPU, whose registers hold the sums.

    Returns
    -------
    tirx.PrimFunc
        ``main(x, weight, [scale, [zero,]] out)``: ``x`` float32 [*rows, depth]; ``weight`` as
        :func:`.narrow_matrix.pack_matrix` stores it; ``scale`` float32 and ``zero`` [tiles, groups,
        tile], the former not of floats; ``out`` float32 [*rows, columns].
    """
    rows = own_extents(rows)
    per_block = (matrix.tiles, matrix.groups, matrix.tile)
    buffers: Shapes = {
        "x": ((*rows, matrix.depth), FLOAT),
        "weight": stored_shape(matrix),
        **({"scale": (per_block, FLOAT)} if matrix.is_scaled else {}),
        **({"zero": (per_block, zeros)} if matrix.has_zeros else {}),
        "out": ((*rows, matrix.columns), FLOAT),
    }

    def write(*arguments: tirx.Buffer) -> None:
        x, weight, *given, out = map(flat, arguments)
        scale, zero, *_ = (*given, None, None)
        writer = _Writer(matrix, cpu, reduce(mul, rows, long(1)), x, weight, scale, zero, out)
        # The last tile may overlap the one before, whose task computes it, too: sums of a part of
        # the depth lie in the result until the next part adds to them.
        tasks = matrix.columns // matrix.tile
        with T.parallel(long(0), long(tasks)) as task:
            last = long(matrix.tiles - tasks + 1)
            count = tirx.if_then_else(task < long(tasks - 1), long(1), last)
            with T.serial(long(0), count) as number, T.sblock("tile"):
                T.reads()
                T.writes()
                writer.write(task + number)

    return cpu_kernel("NarrowMatmul", buffers, write, work_of(rows, matrix))


@dataclass(frozen=True)
class _Writer:
    """Writer of the loops; its fields are those of the kernel, and flat views of its arguments."""

    matrix: NarrowMatrix
    cpu: CPUInfo
    rows: tirx.Expr
    x: tirx.Buffer
    weight: tirx.Buffer
    scale: tirx.Buffer | None
    zero: tirx.Buffer | None
    out: tirx.Buffer

    @property
    def places(self) -> Places:
        """Places in the arguments."""
        return Places(self.matrix, self.cpu.lanes(FLOAT))

    @property
    def lanes(self) -> int:
        """Columns of a vector."""
        return self.places.lanes

    def write(self, tile: tirx.Expr) -> None:
        """Write the product of all rows and a tile of columns."""
        if isinstance(self.rows, tirx.IntImm):
            few = int(self.rows) <= _FEW_ROWS
            self._row_by_row(tile) if few else self._by_panels(tile)
            return
        with T.If(self.rows <= long(_FEW_ROWS)):
            with T.Then():
                self._row_by_row(tile)
            with T.Else():
                self._by_panels(tile)

    def _row_by_row(self, tile: tirx.Expr) -> None:
        matrix = self.matrix
        with T.serial(long(0), self.rows) as row, T.sblock("row"):
            T.reads()
            T.writes()
            totals = self._sums(self.places.vectors)
            with T.serial(long(0), long(matrix.groups)) as group, T.sblock("group"):
                T.reads()
                T.writes()
                parts = self._sums(self.places.vectors)
                with T.serial(long(0), long(matrix.block // GRANULE)) as step:
                    first = group * long(matrix.block) + step * long(GRANULE)
                    self.places.prefetch(self.weight, tile, first)
                    for place in range(GRANULE):
                        factor = self._factor(row, first + long(place))
                        for vector, part in enumerate(parts):
                            number = self._number(tile, group, first, place, vector)
                            self._add(part, factor * number)
                for vector, (total, part) in enumerate(zip(totals, parts, strict=True)):
                    self._add(total, self._scaled(part[self._all], tile, group, vector))
            for vector, total in enumerate(totals):
                T.buffer_store(self.out, total[self._all], [self.places.result(row, tile, vector)])

    def _by_panels(self, tile: tirx.Expr) -> None:
        matrix, depth = self.matrix, self._panel_depth()
        panel = T.sblock_alloc_buffer((depth * matrix.tile,), FLOAT)
        height, width = self._register_tile()
        with T.serial(long(0), long(matrix.depth // depth)) as part:
            start = part * long(depth)
            with T.serial(long(0), long(depth // GRANULE)) as step:
                first = start + step * long(GRANULE)
                group = tirx.floordiv(first, long(matrix.block))
                for place, vector in product(range(GRANULE), range(self.places.vectors)):
                    number = self._number(tile, group, first, place, vector)
                    number = self._scaled(number, tile, group, vector)
                    at = self.places.vector(
                        (step * long(GRANULE) + long(place)) * long(matrix.tile), vector
                    )
                    T.buffer_store(panel, number, [at])
            for left in range(0, self.places.vectors, width):
                vectors = range(left, min(left + width, self.places.vectors))
                self._multiply(_Panel(tile, panel, start, depth, vectors), height)

    def _multiply(self, panel: _Panel, height: int) -> None:
        """Write the products of all rows by a panel, in register tiles of at most ``height``."""
        whole = tirx.floordiv(self.rows, long(height))
        with T.serial(long(0), whole) as number:
            self._multiply_rows(panel, number * long(height), height)
        if isinstance(self.rows, tirx.IntImm):
            left = int(self.rows) % height
            if left:
                self._multiply_rows(panel, self.rows - long(left), left)
            return
        for left in range(1, height):
            with T.If(tirx.floormod(self.rows, long(height)) == long(left)), T.Then():
                self._multiply_rows(panel, self.rows - long(left), left)

    def _multiply_rows(self, panel: _Panel, row: tirx.Expr, height: int) -> None:
        """Write the product of ``height`` rows by a panel."""
        with T.sblock("product"):
            T.reads()
            T.writes()
            cells = list(product(range(height), panel.vectors))
            sums = dict(zip(cells, self._sums(len(cells)), strict=True))
            places = {
                (line, vector): self.places.result(row + long(line), panel.tile, vector)
                for line, vector in cells
            }
            with T.If(panel.start > long(0)), T.Then():
                for cell, total in sums.items():
                    T.buffer_store(total, self.out[places[cell]], [self._all])
            with T.serial(long(0), long(panel.depth // _UNROLLED)) as step:
                for turn, line in product(range(_UNROLLED), range(height)):
                    k = step * long(_UNROLLED) + long(turn)
                    factor = self._factor(row + long(line), panel.start + k)
                    for vector in panel.vectors:
                        number = panel.numbers[
                            self.places.vector(k * long(self.matrix.tile), vector)
                        ]
                        self._add(sums[line, vector], factor * number)
            for cell, total in sums.items():
                T.buffer_store(self.out, total[self._all], [places[cell]])

    def _panel_depth(self) -> int:
        """Rows of a panel: a divisor of the depth and a multiple of ``GRANULE``."""
        most = max(GRANULE, _PANEL_BYTES // (4 * self.matrix.tile))
        choices = range(GRANULE, min(most, self.matrix.depth) + 1, GRANULE)
        return max(size for size in choices if self.matrix.depth % size == 0)

    def _register_tile(self) -> tuple[int, int]:
        """Rows, and vectors of columns, whose sums the registers hold."""
        sums = 12 if self.cpu.num_vector_registers < 32 else 24
        width = min(self.places.vectors, 2)
        return sums // width, width

    @property
    def _all(self) -> tirx.Expr:
        """All lanes of a sum."""
        return T.ramp(0, 1, self.lanes)

    def _sums(self, count: int) -> list[tirx.Buffer]:
        """Registers that begin with zeros."""
        sums = [T.sblock_alloc_buffer((self.lanes,), FLOAT) for _ in range(count)]
        for total in sums:
            T.buffer_store(total, T.broadcast(tirx.const(0, FLOAT), self.lanes), [self._all])
        return sums

    def _add(self, total: tirx.Buffer, term: tirx.Expr) -> None:
        T.buffer_store(total, total[self._all] + term, [self._all])

    def _factor(self, row: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
        """An element of ``x`` in all lanes."""
        return T.broadcast(self.x[row * long(self.matrix.depth) + k], self.lanes)

    def _scaled(
        self, number: tirx.Expr, tile: tirx.Expr, group: tirx.Expr, vector: int
    ) -> tirx.Expr:
        """Integers, or a sum of their products, times their scale; floats have none."""
        if self.scale is None:
            return number
        return number * self.scale[self.places.of_group(tile, group, vector)]

    def _number(
        self, tile: tirx.Expr, group: tirx.Expr, first: tirx.Expr, place: int, vector: int
    ) -> tirx.Expr:
        """Numbers of row ``first + place`` and a vector of columns, less zero points, as floats.

        ``first`` is a multiple of ``GRANULE``.
        """
        wide, real = f"int32x{self.lanes}", f"{FLOAT}x{self.lanes}"
        if not self.matrix.is_scaled:
            stored = self.weight[self.places.stored(tile, first + long(place), vector)]
            if self.matrix.dtype == "float16":
                return T.Cast(real, T.reinterpret(f"float16x{self.lanes}", stored))
            sixteen = T.broadcast(tirx.const(16, "int32"), self.lanes)
            return T.reinterpret(real, T.Cast(wide, stored) << sixteen)
        if self.matrix.bits == 8:
            integers = T.Cast(
                wide, self.weight[self.places.stored(tile, first + long(place), vector)]
            )
        else:
            word = self.weight[self.places.stored(tile, first, vector)]
            up, down = (
                T.broadcast(tirx.const(count, "int32"), self.lanes)
                for count in (28 - lowest_bit(place), 28)
            )
            integers = (word << up) >> down
        number = T.Cast(real, integers)
        if self.zero is None:
            return number
        return number - self.places.zeros(self.zero, tile, group, vector)


@dataclass(frozen=True)
class _Panel:
    """Numbers of ``depth`` rows of a tile from ``start`` on, and the vectors to multiply by."""

    tile: tirx.Expr
    numbers: tirx.Buffer
    start: tirx.Expr
    depth: int
    vectors: Sequence[int]
