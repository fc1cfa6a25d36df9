# SPDX-License-Identifier: Apache-2.0
"""Attention in tile registers (AMX): products of bfloat16, and softmax of float32 between them.

Loop nest of one head::

    parallel batch, head, chunk of rows
      keys as words of two elements, keys along a row; values as words of two keys
      for tile of rows
        for group of tiles of keys
          scores of 16 rows by 64 keys, summed over the elements of a key
        for row
          scale, mask and maximum; then exponentials, their sum, and their roundings as words
        for group of tiles of columns
          sums over all keys
          rows of the sums, divided by those of the exponentials, to the output

A word of values and of exponentials holds keys that are 16 apart, so that two vectors make a vector
of words without moving lanes. Keys beyond the last one have a score of minus infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.tir.float_bits import round_to_bits
from schedules.tir.vector_math import vectorize_math

from ...core.machine import CPUInfo
from ...core.micro_kernel import Index, bound, loop
from ...core.tile_unit import TILE_ELEMENTS, TILE_ROWS, TILE_WORDS, TileShape, TileUnit, tile_unit
from ...core.tiles import chunk
from ...cost.tile_conv2d_knobs import LEAST_ROWS, SLOWDOWN, STORED
from ..selections import Shapes, cpu_kernel
from .narrow_matrix import flat

_HALF, _FLOAT = "bfloat16", "float32"
_WORD = 2  # elements of bfloat16
_PAIR = 2 * TILE_WORDS  # keys of a row of words
_SUMS, _QUERIES, _WEIGHTS, _KEYS, _VALUES = 4, 4, 5, 6, 7  # registers; those of sums come first
_LEAST_ROWS = 8
# Cycles of vectors of 16: those of keys and of values as they are packed; of scores (scaled,
# masked, compared; then exponentials, sums and roundings); the ends of a row; and those of the
# output, which are divided. By llvm-mca's model of Sapphire Rapids; nothing was measured.
_KEY, _VALUE, _SCORE, _ROW, _RESULT = 15.0, 4.0, 28.0, 60.0, 22.0
_PIECES = 4  # tasks of a core, where heads are few
_FLOATS = f"float32x{TILE_WORDS}"
_INTEGERS = f"int32x{TILE_WORDS}"


@dataclass(frozen=True)
class AttentionShape:
    """Products of queries, keys and values.

    Parameters
    ----------
    batch, heads : int
        Independent ones.
    rows, keys : int
        Queries, and keys that each is multiplied by.
    depth, columns : int
        Elements of a key, and of a value.
    scale : float
        Factor of the scores.
    mask : tuple[int, ...] | None
        Shape of what is added to the scaled scores; its extents are 1 or those of the scores.
    out_dtype : str
        ``bfloat16`` or ``float32``.
    """

    batch: int
    heads: int
    rows: int
    keys: int
    depth: int
    columns: int
    scale: float
    mask: tuple[int, ...] | None
    out_dtype: str

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """Shape of the scores."""
        return self.batch, self.heads, self.rows, self.keys

    def fits_tiles(self, cpu: CPUInfo) -> bool:
        """Return whether tile registers can compute it, and rows fill half of them."""
        whole = self.depth % _WORD == self.columns % TILE_WORDS == 0
        return _HALF in cpu.tiles and whole and self.rows >= _LEAST_ROWS

    @property
    def title(self) -> str:
        """The operation in a few words."""
        heads = self.batch * self.heads
        return f"attention, {self.rows}x{self.keys}, {heads} heads of {self.depth}"

    def cycles(self, cpu: CPUInfo) -> float:
        """Predict the clock cycles of the kernel: those of its busiest core, without its fork."""
        tiles, columns = _Tiles(self), self.columns // TILE_WORDS
        pieces = tiles.pieces(cpu.num_cores)
        packing = tiles.key_tiles * tiles.words * _KEY + columns * tiles.pairs * TILE_WORDS * _VALUE
        products = tiles.key_tiles * (tiles.words // tiles.step) + columns * tiles.pairs
        row = 2 * tiles.pairs * _SCORE + _ROW + columns * _RESULT
        row += (tiles.key_tiles + columns) * STORED
        tile = products * max(tiles.rows, LEAST_ROWS) * SLOWDOWN + tiles.rows * row
        tasks = self.batch * self.heads * pieces
        return -(-tasks // cpu.num_cores) * (packing + -(-tiles.row_tiles // pieces) * tile)

    def separate_cycles(self, cpu: CPUInfo) -> float:
        """Predict those of two products of float32 and a softmax, with two forks more.

        Cores share the same tiles of rows.
        """
        found = _Tiles(self)
        products = self.keys * (self.depth + self.columns)
        row = products / (cpu.lanes(_FLOAT) * cpu.fma_per_cycle)
        row += -(-self.keys // TILE_WORDS) * _SCORE + _ROW
        tiles = self.batch * self.heads * found.row_tiles
        return -(-tiles // cpu.num_cores) * found.rows * row + 2 * cpu.costs.fork


def tile_attention(shape: AttentionShape, cpu: CPUInfo) -> tirx.PrimFunc:
    """Build the kernel of ``out = softmax(scale * query key^T + mask) value`` of each head.

    Parameters
    ----------
    shape : AttentionShape
        Extents, which fit tiles.
    cpu : CPUInfo
        The CPU.

    Returns
    -------
    tirx.PrimFunc
        ``main(query, key, value, [mask,] out)``: ``query`` bfloat16 [batch, rows, heads, depth];
        ``key`` bfloat16 [batch, keys, heads, depth]; ``value`` bfloat16 [batch, keys, heads,
        columns]; ``mask`` float32; ``out`` [batch, rows, heads, columns]. Exponentials are rounded
        to bfloat16, their sums are not.
    """
    batch, heads = shape.batch, shape.heads
    buffers: Shapes = {
        "query": ((batch, shape.rows, heads, shape.depth), _HALF),
        "key": ((batch, shape.keys, heads, shape.depth), _HALF),
        "value": ((batch, shape.keys, heads, shape.columns), _HALF),
        **({} if shape.mask is None else {"mask": (shape.mask, _FLOAT)}),
        "out": ((batch, shape.rows, heads, shape.columns), shape.out_dtype),
    }

    def write(*arguments: tirx.Buffer) -> None:
        query, key, value, *mask, out = arguments
        views = _viewed(query, "int32"), _viewed(key, "int32"), _viewed(value, "uint16")
        stored = _viewed(out, "uint16") if shape.out_dtype == _HALF else flat(out)
        kernel = _Kernel(shape, *views, stored, *map(flat, mask))
        pieces = kernel.pieces(cpu.num_cores)
        with T.parallel(0, batch * heads * pieces) as task:
            head, piece = tirx.floordiv(task, pieces), tirx.floormod(task, pieces)
            with T.sblock("tiles"):
                T.reads()
                T.writes()
                with tile_unit(kernel.registers, _HALF, cpu) as unit:
                    place = tirx.floordiv(head, heads), tirx.floormod(head, heads)
                    _Head(kernel, unit, *map(bound, place)).write(piece, pieces)

    products = prod(shape.scores) * (shape.depth + shape.columns)
    attrs: dict[str, object] = {
        attributes.TITLE: shape.title,
        attributes.OPERATIONS: 2.0 * products,
        attributes.RATE: 0.0,
        attributes.NUMBERS: _HALF,
        attributes.CYCLES: round(shape.cycles(cpu)),
    }
    if not cpu.emulates_tiles:
        attrs[attributes.TILES] = _HALF
    return vectorize_math(cpu_kernel("TileAttention", buffers, write, attrs))


def _viewed(buffer: tirx.Buffer, dtype: str) -> tirx.Buffer:
    """The bits of bfloat16 in one dimension: each as uint16, or two as a word."""
    each = _WORD if dtype == "int32" else 1
    return T.decl_buffer((prod(map(int, buffer.shape)) // each,), dtype, data=buffer.data)


@dataclass(frozen=True)
class _Tiles:
    """Tiles that a head is cut into."""

    shape: AttentionShape

    @property
    def rows(self) -> int:
        """Rows of a tile: tiles of equal height."""
        return -(-self.shape.rows // self.row_tiles)

    @property
    def row_tiles(self) -> int:
        """Tiles of rows; the last one reaches back."""
        return -(-self.shape.rows // TILE_ROWS)

    @property
    def pairs(self) -> int:
        """Rows of words that hold all keys."""
        return -(-self.shape.keys // _PAIR)

    @property
    def key_tiles(self) -> int:
        """Tiles of scores with keys."""
        return -(-self.shape.keys // TILE_WORDS)

    @property
    def words(self) -> int:
        """Words of a key."""
        return self.shape.depth // _WORD

    @property
    def step(self) -> int:
        """Words of a key in a tile: the most that divide it."""
        return next(step for step in range(TILE_WORDS, 0, -1) if self.words % step == 0)

    @property
    def registers(self) -> list[TileShape]:
        """Shapes of the tile registers."""
        sums = [TileShape(self.rows, TILE_WORDS)] * _SUMS
        left = [TileShape(self.rows, self.step), TileShape(self.rows, TILE_WORDS)]
        return [*sums, *left, *(TileShape(words, TILE_WORDS) for words in (self.step, TILE_WORDS))]

    def pieces(self, cores: int) -> int:
        """Parts of the rows of a head: one where heads are enough for all cores."""
        heads = self.shape.batch * self.shape.heads
        if heads % cores == 0 or heads >= _PIECES * cores:
            return 1
        return min(self.row_tiles, -(-_PIECES * cores // heads))


@dataclass(frozen=True)
class _Kernel(_Tiles):
    """Extents and flat views of the arguments."""

    query: tirx.Buffer
    key: tirx.Buffer
    value: tirx.Buffer
    out: tirx.Buffer
    mask: tirx.Buffer | None = None


class _Head:
    """Writes the loops of some rows of one head."""

    def __init__(self, kernel: _Kernel, unit: TileUnit, image: Index, head: Index) -> None:
        self.kernel, self.unit, self.shape = kernel, unit, kernel.shape
        self.image, self.head = image, head
        rows, pairs = kernel.rows, kernel.pairs

        def scratch(size: int) -> tirx.Buffer:
            return T.sblock_alloc_buffer((size,), "int32")

        self._keys = scratch(kernel.key_tiles * kernel.words * TILE_WORDS)
        self._values = scratch(self.shape.columns * pairs * TILE_WORDS)
        self._scores = scratch(2 * pairs * rows * TILE_WORDS)
        self._weights = scratch(rows * pairs * TILE_WORDS)
        self._sums = scratch(_SUMS * TILE_ELEMENTS)
        self._totals = T.sblock_alloc_buffer((rows,), _FLOAT)
        self._row = T.sblock_alloc_buffer((TILE_WORDS,), _FLOAT)

    def write(self, piece: Index, pieces: int) -> None:
        """Write one part of the rows."""
        kernel = self.kernel
        self._pack_keys()
        self._pack_values()
        with loop(*chunk(kernel.row_tiles, piece, pieces)) as tile:
            first = bound(tirx.min(tile * kernel.rows, self.shape.rows - kernel.rows))
            self._multiply_keys(first)
            with T.serial(0, kernel.rows) as row:
                self._weigh(first, row)
            self._multiply_values(first)

    def _pack_keys(self) -> None:
        """Tiles of keys: words of elements down, keys across."""
        shape, words = self.shape, self.kernel.words
        stride = shape.heads * words
        start = (self.image * shape.keys * shape.heads + self.head) * words
        whole, rest = divmod(shape.keys, TILE_WORDS)

        def pack(tile: Index, word: Index, keys: int) -> None:
            vector = self.kernel.key[_ramp(start + tile * TILE_WORDS * stride + word, keys, stride)]
            place = (tile * words + word) * TILE_WORDS
            T.buffer_store(self._keys, vector, [_ramp(place, keys)])

        with T.serial(0, whole) as tile, T.serial(0, words) as word:
            pack(tile, word, TILE_WORDS)
        if rest:
            with T.serial(0, words) as word:
                place = (whole * words + word) * TILE_WORDS
                T.buffer_store(self._keys, _zeros(), [_ramp(place, TILE_WORDS)])
                pack(whole, word, rest)

    def _pack_values(self) -> None:
        """Tiles of values: words of two keys, 16 apart, down, columns across."""
        shape, pairs = self.shape, self.kernel.pairs
        stride = shape.heads * shape.columns
        start = (self.image * shape.keys * shape.heads + self.head) * shape.columns

        def half(key: Index, tile: Index) -> tirx.Expr:
            place = start + key * stride + tile * TILE_WORDS
            return T.Cast(_INTEGERS, self.kernel.value[_ramp(place, TILE_WORDS)])

        def pack(tile: Index, pair: Index, row: Index, halves: int) -> None:
            key = pair * _PAIR + row
            word = half(key, tile) if halves else _zeros()
            if halves > 1:
                word = word | half(key + TILE_WORDS, tile) << T.broadcast(T.int32(16), TILE_WORDS)
            place = ((tile * pairs + pair) * TILE_WORDS + row) * TILE_WORDS
            T.buffer_store(self._values, word, [_ramp(place, TILE_WORDS)])

        whole, rest = divmod(shape.keys, _PAIR)
        with T.serial(0, shape.columns // TILE_WORDS) as tile:
            with T.serial(0, whole) as pair, T.serial(0, TILE_WORDS) as row:
                pack(tile, pair, row, 2)
            ends = max(0, rest - TILE_WORDS), min(rest, TILE_WORDS), TILE_WORDS if rest else 0
            for halves, start_row, stop in zip((2, 1, 0), (0, *ends), ends, strict=False):
                if start_row < stop:
                    with loop(start_row, stop) as row:
                        pack(tile, whole, row, halves)

    def _multiply_keys(self, first: Index) -> None:
        """Scores of a tile of rows, as tiles one after the other."""
        kernel, shape = self.kernel, self.shape
        stride = shape.heads * kernel.words
        row = self.image * shape.rows + first
        query = bound((row * shape.heads + self.head) * kernel.words)

        def step(number: Index, tiles: Sequence[Index]) -> None:
            word = number * kernel.step
            self.unit.load(_QUERIES, kernel.query, query + word, stride)
            for register, tile in enumerate(tiles):
                place = (tile * kernel.words + word) * TILE_WORDS
                self.unit.load(_KEYS, self._keys, place, TILE_WORDS)
                self.unit.multiply(register, _QUERIES, _KEYS)

        size = kernel.rows * TILE_WORDS

        def store(register: int, tile: Index) -> None:
            self.unit.store(register, self._scores, tile * size)

        self._sum_up(kernel.key_tiles, kernel.words // kernel.step, step, store)

    def _multiply_values(self, first: Index) -> None:
        """Rows of the output."""
        kernel, shape = self.kernel, self.shape

        def step(number: Index, tiles: Sequence[Index]) -> None:
            place, stride = number * TILE_WORDS, kernel.pairs * TILE_WORDS
            self.unit.load(_WEIGHTS, self._weights, place, stride)
            for register, tile in enumerate(tiles):
                place = (tile * kernel.pairs + number) * TILE_ELEMENTS
                self.unit.load(_VALUES, self._values, place, TILE_WORDS)
                self.unit.multiply(register, _WEIGHTS, _VALUES)

        def store(register: int, tile: Index) -> None:
            self.unit.store(register, self._sums, register * TILE_ELEMENTS)
            start = ((self.image * shape.rows + first) * shape.heads + self.head) * shape.columns
            place = bound(start + tile * TILE_WORDS)
            with T.serial(0, kernel.rows) as row:
                sums = self._sums[_ramp(register * TILE_ELEMENTS + row * TILE_WORDS, TILE_WORDS)]
                total = T.broadcast(self._totals[row], TILE_WORDS)
                value = T.reinterpret(_FLOATS, sums) / total
                value = round_to_bits(value) if shape.out_dtype == _HALF else value
                at_row = place + row * (shape.heads * shape.columns)
                T.buffer_store(kernel.out, value, [_ramp(at_row, TILE_WORDS)])

        self._sum_up(shape.columns // TILE_WORDS, kernel.pairs, step, store)

    def _sum_up(
        self,
        tiles: int,
        steps: int,
        step: Callable[[Index, Sequence[Index]], None],
        store: Callable[[int, Index], None],
    ) -> None:
        """All tiles of sums, as many at a time as registers hold."""
        whole, rest = divmod(tiles, _SUMS)
        for start, count, size in ((0, whole, _SUMS), (whole * _SUMS, int(rest > 0), rest)):
            if not count:
                continue
            with loop(0, count) as group:
                numbers = [start + group * size + register for register in range(size)]
                for register in range(size):
                    self.unit.zero(register)
                with loop(0, steps) as number:
                    step(number, numbers)
                for register, tile in enumerate(numbers):
                    store(register, tile)

    def _weigh(self, first: Index, row: Index) -> None:
        """Exponentials of a row of scores as words, and their sum."""
        kernel, keys = self.kernel, self.shape.keys
        size, whole = kernel.rows * TILE_WORDS, keys // TILE_WORDS
        least = T.broadcast(T.float32(float("-inf")), TILE_WORDS)
        lanes = _ramp(0, TILE_WORDS)

        def place(tile: Index) -> tirx.Expr:
            return _ramp(tile * size + row * TILE_WORDS, TILE_WORDS)

        def put(tile: Index, value: tirx.Expr) -> None:
            T.buffer_store(self._scores, T.reinterpret(_INTEGERS, value), [place(tile)])

        def floats(tile: Index) -> tirx.Expr:
            return T.reinterpret(_FLOATS, self._scores[place(tile)])

        def masked(tile: Index, count: int) -> tirx.Expr:
            value = floats(tile) * T.broadcast(T.float32(self.shape.scale), TILE_WORDS)
            return value if kernel.mask is None else value + self._addend(first + row, tile, count)

        T.buffer_store(self._row, least, [lanes])
        with T.serial(0, whole) as tile:
            put(tile, masked(tile, TILE_WORDS))
            T.buffer_store(self._row, _larger(self._row[lanes], floats(tile)), [lanes])
        for tile in range(whole, 2 * kernel.pairs):
            value, count = least, keys - tile * TILE_WORDS
            if count > 0:
                numbers = T.ramp(T.int32(0), 1, TILE_WORDS)
                inside = numbers < T.broadcast(T.int32(count), TILE_WORDS)
                value = tirx.Select(inside, masked(tile, count), least)
            put(tile, value)
            T.buffer_store(self._row, _larger(self._row[lanes], floats(tile)), [lanes])
        greatest = T.alloc_buffer((TILE_WORDS,), _FLOAT, layout=None)
        T.buffer_store(greatest, _across(self._row[lanes], _larger), [lanes])
        T.buffer_store(self._row, T.broadcast(T.float32(0), TILE_WORDS), [lanes])
        with T.serial(0, kernel.pairs) as pair:
            for half in range(2):
                put(2 * pair + half, tirx.exp(floats(2 * pair + half) - greatest[lanes]))
            pieces = [floats(2 * pair + half) for half in range(2)]
            T.buffer_store(self._row, self._row[lanes] + (pieces[0] + pieces[1]), [lanes])
            low, high = (T.Cast(_INTEGERS, round_to_bits(piece)) for piece in pieces)
            word = low | high << T.broadcast(T.int32(16), TILE_WORDS)
            at = (row * kernel.pairs + pair) * TILE_WORDS
            T.buffer_store(self._weights, word, [_ramp(at, TILE_WORDS)])
        added = _across(self._row[lanes], lambda a, b: a + b)
        T.buffer_store(self._row, added, [lanes])
        T.buffer_store(self._totals, self._row[0], [row])

    def _addend(self, row: Index, tile: Index, count: int) -> tirx.Expr:
        """Addend of the scores of a tile, of which ``count`` are keys."""
        mask, shape = self.kernel.mask, self.shape.mask
        assert mask is not None and shape is not None
        places = [self.image, self.head, row]
        place: Index = 0
        for extent, at in zip(shape, places, strict=False):
            place = place * extent + (at if extent > 1 else 0)
        if shape[3] == 1:
            return T.broadcast(mask[place], TILE_WORDS)
        place = place * shape[3] + tile * TILE_WORDS
        if count >= TILE_WORDS:
            return mask[_ramp(place, TILE_WORDS)]
        tail, lanes = T.alloc_buffer((TILE_WORDS,), _FLOAT, layout=None), _ramp(0, TILE_WORDS)
        T.buffer_store(tail, T.broadcast(T.float32(0), TILE_WORDS), [lanes])
        T.buffer_store(tail, mask[_ramp(place, count)], [_ramp(0, count)])
        return tail[lanes]


def _ramp(start: Index, lanes: int, stride: int = 1) -> Index:
    return T.ramp(start, stride, lanes) if lanes > 1 else start


def _zeros() -> tirx.Expr:
    return T.broadcast(T.int32(0), TILE_WORDS)


def _larger(left: tirx.Expr, right: tirx.Expr) -> tirx.Expr:
    return tirx.max(left, right)


def _across(value: tirx.Expr, join: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]) -> tirx.Expr:
    """Join all lanes of a vector, in each of them."""

    def halved(vector: tirx.Expr, distance: int) -> tirx.Expr:
        shared = T.alloc_buffer((TILE_WORDS,), _FLOAT, layout=None)
        T.buffer_store(shared, vector, [_ramp(0, TILE_WORDS)])
        found = shared[_ramp(0, TILE_WORDS)]
        order = [lane ^ distance for lane in range(TILE_WORDS)]
        return join(found, tirx.Shuffle([found], order))

    return reduce(halved, (8, 4, 2, 1), value)
