# SPDX-License-Identifier: Apache-2.0
"""Products of two matrices of bytes that are both known only at run time: forms, tiles, costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ...core.machine import WORDS, CPUInfo
from ...core.micro_kernel import LANES_OF_128_BITS

STEPS = 4
"""Words of the reduced axis that are unrolled; NEON loads so many of a row at once."""
VECTORS = 2
"""Vectors of columns of a register tile."""
_ROWS = {8: 6, 16: 12, LANES_OF_128_BITS: 8}  # Rows of a register tile, by the lanes of a vector.
_PANEL_SHARE = 0.5  # Share of the second-level cache.
_PIECES = 4  # tasks of a core, where products are few
# Cycles of a vector of words: of columns, whose bytes lie along the columns or along the reduced
# axis, and of rows; of a vector of results; and of a word of single bytes. Measured on Zen 3.
_ACROSS, _GATHERED, _ALONG, _RESULT, _SCATTERED = 4.0, 10.0, 2.0, 6.0, 8.0
_BLOCKS = 2.0  # products of a usmmla by those of a usdot; on Neoverse N2 both start as often
_EFFICIENCY = 0.8  # share of the peak that products in registers reach
_LARGEST_SUM = 2**31 - 1
_LARGEST_SHORT = 2**15 - 1
_BYTE = 255


@dataclass(frozen=True)
class ByteFactor:
    """A factor ``data + offset - zero``: matrices of bytes.

    Parameters
    ----------
    shape : tuple[int, ...]
        Shape of ``data``.
    axes : tuple[int, ...]
        Its axes in the order of the product's: batch, rows, then columns.
    dtype : str
        ``uint8`` or ``int8``.
    offset : int
        A constant.
    has_zero : bool
        Whether there is a zero point, which is of the same type and known at run time.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str
    offset: int = 0
    has_zero: bool = False

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents in the order of the product's axes."""
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along the product's axes."""
        return tuple(prod(self.shape[axis + 1 :]) for axis in self.axes)

    @property
    def largest(self) -> int:
        """Largest magnitude of an element."""
        low = self.offset - (128 if self.dtype == "int8" else 0)
        return abs(self.offset) + _BYTE if self.has_zero else max(abs(low), abs(low + _BYTE))


@dataclass(frozen=True)
class ByteResult:
    """What becomes of the sums of a product.

    ::

        value = sums * scale * factor
        value = min(max(round(value), low), high)           with bounds
        out = value * rescale + added                       float32
        out = value - low, or value - low - 128             uint8, int8

    Parameters
    ----------
    axes : tuple[int, ...]
        Axes of the product in the order in which the output stores them; the last one stays.
    dtype : str
        Type of the output; ``int32`` for the sums.
    scale : float
        A constant.
    has_factor : bool
        Whether there is a factor of float32, which is known at run time.
    bounds : tuple[float, float] | None
        Lowest and highest of the rounded numbers; None if they are not rounded.
    rescale : float
        A constant.
    added : tuple[int, ...] | None
        Shape of a tensor of float32 of as many dimensions, which is broadcast; None without one.
    """

    axes: tuple[int, ...]
    dtype: str = "float32"
    scale: float = 1.0
    has_factor: bool = False
    bounds: tuple[float, float] | None = None
    rescale: float = 1.0
    added: tuple[int, ...] | None = None

    def misfit(self) -> str | None:
        """Reason why no kernel ends so; None where one does."""
        is_scaled = self.scale != 1 or self.has_factor or self.bounds is not None
        is_moved = self.rescale != 1 or self.added is not None
        if self.dtype == "int32" and is_scaled:
            return "sums in int32 are scaled or rounded; expected another type of output"
        if self.dtype in ("uint8", "int8") and self.bounds is None:
            return f"the output is {self.dtype} without bounds; expected low and high"
        if self.dtype != "float32" and is_moved:
            return f"the output is {self.dtype}, rescaled or added to; expected float32"
        return None


@dataclass(frozen=True)
class ByteProduct:
    """Two factors, whose batches are broadcast, and the result of their product."""

    left: ByteFactor
    right: ByteFactor
    result: ByteResult

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """Extents of the batch."""
        shapes = [each.extents[:-2] for each in (self.left, self.right)]
        rank = max(map(len, shapes))
        whole = [[1] * (rank - len(shape)) + [*shape] for shape in shapes]
        return tuple(b if a == 1 else a for a, b in zip(*whole, strict=True))

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the product: batch, rows, columns."""
        return (*self.batch, self.left.extents[-2], self.right.extents[-1])

    @property
    def depth(self) -> int:
        """Products of a sum."""
        return self.left.extents[-1]

    def misfit(self, cpu: CPUInfo | None = None) -> str | None:
        """Reason why no kernel, or none for a CPU, computes the product; None where one does."""
        left, right = (each.extents[:-2] for each in (self.left, self.right))
        if not all(a == b or 1 in (a, b) for a, b in _aligned(left, right)):
            return f"batches of {left} and {right} cannot be broadcast"
        added = self.result.added or ()
        if not all(extent in (1, size) for extent, size in _aligned(added, self.extents)):
            return f"a tensor of {added} cannot be broadcast to {self.extents}"
        if cpu is not None and not cpu.word_channels:
            return f"{cpu.family} multiplies no bytes"
        widest = max(self.left.largest, self.right.largest)
        if cpu is not None and cpu.word_channels == WORDS["int16"] and widest > _LARGEST_SHORT:
            return f"elements reach {widest}; {cpu.family} multiplies up to {_LARGEST_SHORT}"
        largest = self.depth * self.left.largest * self.right.largest
        sizes = [prod(shape) for shape in (self.left.shape, self.right.shape, self.extents)]
        if largest > _LARGEST_SUM:
            return f"sums reach {largest}; expected at most {_LARGEST_SUM}"
        if not 0 < min(sizes) or max(sizes) > _LARGEST_SUM:
            return f"factors and result have {sizes} elements; expected 1 to {_LARGEST_SUM}"
        return self.result.misfit()

    @property
    def title(self) -> str:
        """The operation in a few words."""
        rows, columns = self.extents[-2:]
        count = prod(self.batch)
        times = f", {count} times" if count > 1 else ""
        return f"matmul, bytes by bytes, {rows}x{self.depth} by {self.depth}x{columns}{times}"

    def cycles(self, cpu: CPUInfo) -> float:
        """Predict the clock cycles of the kernel: those of its busiest core, without its fork."""
        tiles = Tiles(self, cpu)
        tasks = prod(self.batch) * tiles.panels * tiles.pieces
        height = tiles.row_tiles * tiles.rows
        vectors, words = tiles.vectors, tiles.words
        scattered = _SCATTERED * tiles.lanes
        line, step = self.right.strides[-1], self.right.strides[-2]
        columns = _ACROSS if line == 1 else _GATHERED if step == 1 else scattered
        rows = _ALONG if self.left.strides[-1] == 1 else scattered
        rate = cpu.fma_per_cycle * _EFFICIENCY * (_BLOCKS if tiles.in_blocks else 1)
        total = height * words * vectors / rate + (
            tiles.pieces * vectors * words * columns
            + tiles.panels * height * words / tiles.lanes * rows
            + height * vectors * _RESULT
        )
        return -(-tasks // cpu.num_cores) / tasks * prod(self.batch) * total

    def separate_cycles(self, cpu: CPUInfo) -> float:
        """Predict those of the product in float32, whose factors are made of bytes by others."""
        lanes = cpu.lanes("float32")
        rows, columns = self.extents[-2:]
        vectors = -(-columns // lanes)
        total = rows * vectors * (self.depth / (cpu.fma_per_cycle * _EFFICIENCY) + _RESULT)
        total += (rows + columns) * self.depth / lanes * 2 * _ALONG
        return prod(self.batch) * total / cpu.num_cores


def _aligned(first: Sequence[int], second: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Extents of two shapes from the last ones on, as far as the shorter goes."""
    return zip(reversed(first), reversed(second), strict=False)


class Tiles:
    """Tasks and register tiles that a product is cut into.

    Attributes
    ----------
    lanes, word : int
        Sums of a vector, and products that are added to each of them at once.
    rows, row_tiles : int
        Rows of a register tile, and tiles that hold all rows; the last one reaches back.
    words, vectors : int
        Words of the reduced axis, and vectors of columns: whole steps, and whole tiles.
    panel, panels : int
        Vectors of the columns that a task packs, and tasks that hold all of them.
    pieces : int
        Parts of the rows: one where panels are enough for all cores.
    in_blocks : bool
        Whether an instruction multiplies two rows by two columns (``usmmla``).
    """

    def __init__(self, product: ByteProduct, cpu: CPUInfo) -> None:
        height, width = product.extents[-2:]
        self.lanes, self.word = cpu.lanes("int32"), cpu.word_channels
        self.row_tiles = -(-height // _ROWS[self.lanes])
        self.rows = -(-height // self.row_tiles)
        even = self.rows + self.rows % 2
        self.in_blocks = cpu.byte_dots == "usdot" and even <= height
        self.rows = even if self.in_blocks else self.rows
        self.words = -(-product.depth // (self.word * STEPS)) * STEPS
        groups = -(-width // (self.lanes * VECTORS))
        self.vectors = groups * VECTORS
        fitting = int(_PANEL_SHARE * cpu.l2_bytes) // (4 * self.words * self.lanes * VECTORS)
        self.panels = -(-groups // max(1, fitting))
        self.panel = -(-groups // self.panels) * VECTORS
        self.panels = -(-self.vectors // self.panel)
        tasks, cores = prod(product.batch) * self.panels, cpu.num_cores
        self.pieces = 1
        if tasks % cores and tasks < _PIECES * cores:
            self.pieces = max(1, min(self.row_tiles // 2, -(-_PIECES * cores // tasks)))
