# SPDX-License-Identifier: Apache-2.0
"""Constant matrices of 16, 8 or 4 bits, and the order in which kernels read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul

import numpy as np
from tvm import te, tirx
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.errors import OpError
from schedules.tir.extents import Extent

from ...core.machine import CPUInfo
from ...core.prefetch import CACHE_LINE_BYTES, prefetch
from ..selections import long

FLOAT = "float32"
STORED = {"int4": "int32", "int8": "int8", "bfloat16": "uint16", "float16": "uint16"}
"""Types of the stored elements, by those of the numbers."""
_BITS = {"int4": 4, "int8": 8, "bfloat16": 16, "float16": 16}
GRANULE = 8
"""Rows of a block of scales are a multiple of this many."""
OFFSET = 8
"""Offset that makes integers of 4 bits unsigned, as products of bytes take them."""
_VECTORS = 4  # Vectors of a tile.
_AHEAD_BYTES = 8192  # Distance of prefetches.
_MOST_PRODUCTS = 32  # Products of 4 by 8 bits that an int16 holds: 32 * 15 * 127 / 2 pairs.


@dataclass(frozen=True)
class NarrowMatrix:
    """A constant matrix ``[depth, columns]`` of integers with scales.

    Parameters
    ----------
    depth, columns : int
        Its shape.
    dtype : str
        Type of its numbers: ``int4``, ``int8``, ``bfloat16`` or ``float16``.
    block : int
        Rows that share a scale in each column; a multiple of 8 that divides ``depth``. Floats have
        no scales, and are one block.
    tile : int
        Columns that are stored together: whole vectors, at most ``columns``.
    has_zeros : bool
        Whether there is a zero point beside each scale.
    in_bytes : bool
        Whether it is multiplied by bytes; only of 4 bits.
    """

    depth: int
    columns: int
    dtype: str
    block: int
    tile: int
    has_zeros: bool
    in_bytes: bool = False

    def __post_init__(self) -> None:
        fits = self.block % GRANULE == 0 and self.depth % self.block == 0
        if self.dtype not in STORED or not fits or not 0 < self.tile <= self.columns:
            raise OpError(
                f"{self}: expected a type of {', '.join(STORED)}, blocks of a multiple of "
                f"{GRANULE} rows that divide the depth, and a tile of at most all columns"
            )

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return _BITS[self.dtype]

    @property
    def is_scaled(self) -> bool:
        """Whether its numbers are integers."""
        return self.dtype in ("int4", "int8")

    @property
    def per_element(self) -> int:
        """Rows whose numbers share a stored element."""
        return 8 if self.dtype == "int4" else 1

    @property
    def tiles(self) -> int:
        """Number of tiles; the last one may overlap the one before."""
        return -(-self.columns // self.tile)

    @property
    def groups(self) -> int:
        """Blocks of rows."""
        return self.depth // self.block

    @property
    def byte_block(self) -> int:
        """Numbers of a row of ``x`` that share a scale where they become bytes."""
        return math.gcd(self.block, _MOST_PRODUCTS)


def work_of(
    rows: Sequence[Extent], matrix: NarrowMatrix, rate: float = 0.0
) -> dict[str, str | float]:
    """Attributes that tell the work of a product; of an open number of rows, that of one."""
    count = math.prod(int(row) for row in rows if isinstance(row, int | tirx.IntImm))
    by = "bytes by " if matrix.in_bytes else ""
    blocks = f" in blocks of {matrix.block}" if matrix.is_scaled else ""
    shape = f"{count}x{matrix.depth} by {matrix.depth}x{matrix.columns}"
    return {
        attributes.TITLE: f"matmul, {by}{matrix.dtype}{blocks}, {shape}",
        attributes.OPERATIONS: 2.0 * count * matrix.depth * matrix.columns,
        attributes.RATE: rate,
    }


def tile_columns(columns: int, cpu: CPUInfo) -> int:
    """Columns that are stored together: at most four vectors of the CPU, and none without one."""
    lanes = cpu.lanes(FLOAT)
    return min(_VECTORS, columns // lanes) * lanes


def pack_matrix(matrix: NarrowMatrix, numbers: np.ndarray) -> np.ndarray:
    """Numbers ``[depth, columns]`` in the order in which kernels read them.

    Parameters
    ----------
    matrix : NarrowMatrix
        The matrix.
    numbers : np.ndarray
        int8; of 4 bits they lie between -8 and 7. Floats of 16 bits as their bits, uint16.

    Returns
    -------
    np.ndarray
        [tiles, depth, tile] of the same type, or int32 [tiles, depth / 8, tile] of eight integers
        of 4 bits each: in the low halves of its bytes the first four.
    """
    tiles = _in_tiles(matrix, numbers)
    if matrix.per_element == 1:
        return tiles
    tiles = tiles + np.int8(OFFSET if matrix.in_bytes else 0)
    nibbles = (tiles & 15).astype(np.uint32).reshape(matrix.tiles, -1, 8, matrix.tile)
    words = np.zeros(nibbles[:, :, 0].shape, np.uint32)
    for place in range(8):
        words |= nibbles[:, :, place] << np.uint32(lowest_bit(place))
    return words.view(np.int32)


def stored_shape(matrix: NarrowMatrix) -> tuple[tuple[int, int, int], str]:
    """Shape and type of the stored elements."""
    rows = matrix.depth // matrix.per_element
    return (matrix.tiles, rows, matrix.tile), STORED[matrix.dtype]


def lowest_bit(place: int) -> int:
    """Bit of a stored word at which the integer of one of its eight rows begins."""
    return 8 * (place % 4) + 4 * (place // 4)


def pack_scales(matrix: NarrowMatrix, scales: np.ndarray) -> np.ndarray:
    """Scales or zero points ``[groups, columns]`` as ``[tiles, groups, tile]``."""
    return _in_tiles(matrix, scales)


def number_at(
    matrix: NarrowMatrix,
    row: tirx.Expr,
    column: tirx.Expr,
    weight: te.Tensor,
    scale: te.Tensor,
    zero: te.Tensor | None = None,
) -> tirx.Expr:
    """A number of a matrix of integers, float32, from what :func:`pack_matrix` stores.

    ``row``, ``column``: its place, int64. ``scale``, ``zero``: as :func:`pack_scales` stores them.
    """
    tile = tirx.floordiv(column, long(matrix.tile))
    lane = column - tirx.min(tile * long(matrix.tile), long(matrix.columns - matrix.tile))
    number = weight(tile, tirx.floordiv(row, long(matrix.per_element)), lane)
    if matrix.bits == 4:
        place = tirx.floormod(row, long(8)).astype("int32")
        half = tirx.floordiv(place, 4)
        number = (number >> (8 * (place - 4 * half) + 4 * half)) & 15
        number = number - OFFSET if matrix.in_bytes else (number ^ 8) - 8
    group = tirx.floordiv(row, long(matrix.block))
    value = number.astype(FLOAT)
    if zero is not None:
        value = value - zero(tile, group, lane).astype(FLOAT)
    return value * scale(tile, group, lane)


def _in_tiles(matrix: NarrowMatrix, values: np.ndarray) -> np.ndarray:
    starts = np.minimum(np.arange(matrix.tiles) * matrix.tile, matrix.columns - matrix.tile)
    places = starts[:, None] + np.arange(matrix.tile)
    return np.ascontiguousarray(values[:, places].transpose(1, 0, 2))


def flat(buffer: tirx.Buffer) -> tirx.Buffer:
    """A view of a kernel's argument in one dimension."""
    size = reduce(mul, buffer.shape, long(1))
    return T.decl_buffer((size,), buffer.dtype, data=buffer.data)


@dataclass(frozen=True)
class Places:
    """Places of vectors of ``lanes`` columns in flat arguments of a kernel."""

    matrix: NarrowMatrix
    lanes: int

    @property
    def vectors(self) -> int:
        """Vectors of a tile."""
        return self.matrix.tile // self.lanes

    def stored(self, tile: tirx.Expr, row: tirx.Expr, vector: int) -> tirx.Expr:
        """Stored elements that hold a row of the matrix."""
        return self.vector(self._line(tile, row), vector)

    def of_group(self, tile: tirx.Expr, group: tirx.Expr, vector: int) -> tirx.Expr:
        """Scales or zero points."""
        line = tile * long(self.matrix.groups) + group
        return self.vector(line * long(self.matrix.tile), vector)

    def zeros(
        self, points: tirx.Buffer, tile: tirx.Expr, group: tirx.Expr, vector: int
    ) -> tirx.Expr:
        """Zero points as floats."""
        found = points[self.of_group(tile, group, vector)]
        if str(points.dtype) == FLOAT:
            return found
        return T.Cast(f"{FLOAT}x{self.lanes}", T.Cast(f"int32x{self.lanes}", found))

    def result(self, row: tirx.Expr, tile: tirx.Expr, vector: int) -> tirx.Expr:
        """Results of a row; the last tile overlaps the one before where it would leave the row."""
        last = self.matrix.columns - self.matrix.tile
        column = tirx.min(tile * long(self.matrix.tile), long(last))
        return self.vector(row * long(self.matrix.columns) + column, vector)

    def vector(self, first: tirx.Expr, vector: int) -> tirx.Expr:
        """Elements of a vector of a tile, of which the first is known."""
        return T.ramp(first + long(vector * self.lanes), 1, self.lanes)

    def prefetch(self, weight: tirx.Buffer, tile: tirx.Expr, row: tirx.Expr) -> None:
        """Prefetch what lies some way behind the ``GRANULE`` rows from ``row`` on."""
        size = np.dtype(STORED[self.matrix.dtype]).itemsize
        for byte in range(0, GRANULE * self.matrix.tile * self.matrix.bits // 8, CACHE_LINE_BYTES):
            place = self._line(tile, row) + long((_AHEAD_BYTES + byte) // size)
            prefetch(weight, place, level=2)

    def _line(self, tile: tirx.Expr, row: tirx.Expr) -> tirx.Expr:
        per_element = self.matrix.per_element
        line = tile * long(self.matrix.depth // per_element) + tirx.floordiv(row, long(per_element))
        return line * long(self.matrix.tile)
