# SPDX-License-Identifier: Apache-2.0
"""Kernels of products of two matrices of bytes that are both known only at run time.

Loop nest::

    parallel image, panel of columns, chunk of rows
      columns of the panel as vectors of words, and their sums
      for tile of rows
        the rows as words, and their sums
        for group of vectors of the panel
          sums of products in registers over all words
          less what zero points add, scaled, rounded, to the output

A word holds neighbours of the reduced axis, zeros beyond its end: four bytes, or two numbers of 16
bits, from which the zero points are subtracted as they are packed. Their products cannot saturate.
Of words of bytes one instruction takes unsigned left and signed right ones, the other signed ones
alone: bytes of the other kind have their top bits flipped, which moves their zero point by 128.
AArch64's ``usmmla`` multiplies two words of two rows by those of two columns, which are interleaved
for it. What zero points add to the products follows from the sums of rows and of columns. The last
tile of rows begins so early that it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from operator import add, or_

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.compute.conv2d import activate_to_bytes
from schedules.tir.extents import unravel
from schedules.workload.conv2d import WORD_BYTES, Activation

from ...core.machine import CPUInfo
from ...core.micro_kernel import (
    LANES_OF_128_BITS,
    Index,
    add_block_products,
    add_word_products,
    bound,
    packed_bytes,
    word_functions,
)
from ...core.tiles import chunk
from ..selections import Shapes, cpu_kernel
from .byte_product import STEPS, VECTORS, ByteFactor, ByteProduct, Tiles
from .narrow_matrix import flat

_FLOAT = "float32"
# Elements of two vectors: words of two columns or of two rows for usmmla, or rows of its sums.
_COLUMN_PAIRS = (0, 4, 1, 5), (2, 6, 3, 7)
_ROW_PAIRS = (0, 1, 4, 5), (2, 3, 6, 7)


def byte_matmul(product: ByteProduct, cpu: CPUInfo) -> tirx.PrimFunc:
    """Build the kernel of a product of matrices of bytes.

    Parameters
    ----------
    product : ByteProduct
        Factors and result, which fit.
    cpu : CPUInfo
        A CPU that multiplies bytes.

    Returns
    -------
    tirx.PrimFunc
        ``main(left, right, [left_zero,] [right_zero,] [factor,] [added,] out)``: the factors; their
        zero points, scalars of the same types; the factor, a scalar; the tensor that is added; and
        the output.
    """
    left, right, result = product.left, product.right, product.result
    buffers: Shapes = {
        "left": (left.shape, left.dtype),
        "right": (right.shape, right.dtype),
        **({"left_zero": ((), left.dtype)} if left.has_zero else {}),
        **({"right_zero": ((), right.dtype)} if right.has_zero else {}),
        **({"factor": ((), _FLOAT)} if result.has_factor else {}),
        **({} if result.added is None else {"added": (result.added, _FLOAT)}),
        "out": (tuple(product.extents[axis] for axis in result.axes), result.dtype),
    }

    def write(*arguments: tirx.Buffer) -> None:
        _Kernel(product, cpu, dict(zip(buffers, arguments, strict=True))).write()

    attrs: dict[str, object] = {
        attributes.TITLE: product.title,
        attributes.OPERATIONS: 2.0 * prod(product.extents) * product.depth,
        attributes.RATE: 1.0,
        attributes.CYCLES: round(product.cycles(cpu)),
    }
    return cpu_kernel("ByteMatmul", buffers, write, attrs)


class _Factor:
    """Views of a factor by lines (rows of the left, columns of the right one) and their bytes."""

    def __init__(
        self, factor: ByteFactor, data: tirx.Buffer, zero: tirx.Buffer | None, is_signed: bool
    ) -> None:
        left, right = factor.strides[-2:]
        is_left = data.name == "left"
        self.line_step, self.step = (left, right) if is_left else (right, left)
        self.lines = factor.extents[-2] if is_left else factor.extents[-1]
        self._factor, self._zero = factor, zero
        size = prod(factor.shape)
        self.bytes = T.decl_buffer((size,), "uint8", data=data.data)
        self._words = T.decl_buffer((size // WORD_BYTES,), "int32", data=data.data)
        self.is_flipped = (factor.dtype == "int8") != is_signed
        moved = (-128 if is_signed else 128) if self.is_flipped else 0
        self._moved = moved - factor.offset
        self.short: Index = self._moved  # what is to be subtracted from stored bytes
        self._start: Index = 0

    @property
    def is_exact(self) -> bool:
        """Whether the stored bytes are the numbers themselves."""
        return self._zero is None and not self._moved

    @property
    def in_words(self) -> bool:
        """Whether bytes of a line are neighbours, and words of them begin at multiples of four."""
        batch = zip(self._factor.strides[:-2], self._factor.extents[:-2], strict=True)
        steps = [self.line_step, *(step for step, extent in batch if extent > 1)]
        return self.step == 1 and all(step % WORD_BYTES == 0 for step in steps)

    def place(self, image: Sequence[Index]) -> None:
        """Choose the matrix of an image, in a task."""
        extents, strides = self._factor.extents[:-2], self._factor.strides[:-2]
        places = zip(image[len(image) - len(extents) :], extents, strides, strict=True)
        self._start = bound(reduce(add, (at * step for at, n, step in places if n > 1), 0))
        if self._zero is not None:
            self.short = bound(T.Cast("int32", self._zero[()]) + T.int32(self._moved))

    def at(self, line: Index, k: Index) -> Index:
        """Place of a byte."""
        return self._start + line * self.line_step + k * self.step

    def words(self, line: Index, k: Index, lanes: int) -> tirx.Expr:
        """Words of four bytes from ``k`` on of neighbouring lines."""
        first = tirx.floordiv(self.at(line, k), WORD_BYTES)
        return self._words[T.ramp(first, self.line_step // WORD_BYTES, lanes)]


class _Kernel(Tiles):
    """Writes the nest."""

    def __init__(self, product: ByteProduct, cpu: CPUInfo, given: dict[str, tirx.Buffer]) -> None:
        super().__init__(product, cpu)
        self.product, self._signed_alone = product, cpu.shifts_bytes
        self.in_pairs = self.word != WORD_BYTES
        # Bytes that are widened to pairs are unsigned, so that none has a sign in the other's half.
        signed = cpu.shifts_bytes, not self.in_pairs
        self.left, self.right = (
            _Factor(getattr(product, side), given[side], given.get(f"{side}_zero"), is_signed)
            for side, is_signed in zip(("left", "right"), signed, strict=True)
        )
        self._factor, self._added = given.get("factor"), given.get("added")
        self._out = flat(given["out"])
        self._all = T.ramp(0, 1, self.lanes)
        self._has_sums = [
            not self.in_pairs and not other.is_exact for other in (self.right, self.left)
        ]

    def write(self) -> None:
        """Write all tasks."""
        batch = self.product.batch
        count = prod(batch) * self.panels * self.pieces
        with word_functions(self.in_pairs), T.parallel(0, count) as task, T.sblock("task"):
            T.reads()
            T.writes()
            *image, panel, piece = map(bound, unravel(task, [*batch, self.panels, self.pieces]))
            self.left.place(image)
            self.right.place(image)
            self._rows = T.sblock_alloc_buffer((self.rows * self.words,), "int32")
            size = self.panel * self.words * self.lanes
            self._columns = T.sblock_alloc_buffer((size,), "int32")
            self._row_sums = T.sblock_alloc_buffer((self.rows,), "int32")
            self._column_sums = T.sblock_alloc_buffer((self.panel * self.lanes,), "int32")
            first = bound(panel * self.panel)
            vectors = bound(tirx.min(self.vectors - first, self.panel))
            self._pack_columns(first, vectors)
            start, stop = chunk(self.row_tiles, piece, self.pieces)
            with T.serial(0, stop - start) as number:
                last = self.left.lines - self.rows
                row = bound(tirx.min((start + number) * self.rows, last))
                self._pack_rows(row)
                with T.serial(0, tirx.floordiv(vectors, VECTORS)) as group:
                    self._multiply(image, row, first, group * VECTORS)

    # Packing

    def _pack_columns(self, first: Index, vectors: Index) -> None:
        """Write vectors of words of a panel, and the sums of its columns."""
        right, lanes = self.right, self.lanes
        together = 1 if right.line_step == 1 else 2 if right.in_words else 0
        whole = self.product.depth // (self.word * together) if together else 0
        with T.serial(0, vectors) as vector, T.sblock("columns"):
            T.reads()
            T.writes()
            column = bound((first + vector) * lanes)
            base = bound(vector * (self.words * lanes))
            sums = self._zeros() if self._has_sums[1] else None

            def end(number: Index) -> None:
                if sums is not None:
                    words = self._columns[T.ramp(base + number * lanes, 1, lanes)]
                    self._add(sums, self._ints(0x01010101), words)

            def scattered(start: int) -> None:
                with T.serial(0, self.words - start) as rest:
                    place = base + (start + rest) * lanes
                    with T.serial(0, lanes) as lane:
                        value = self._word(right, column + lane, start + rest)
                        T.buffer_store(self._columns, value, [place + lane])
                    end(start + rest)

            def quick() -> None:
                with T.serial(0, whole) as step:
                    for at, words in enumerate(self._across(column, step * together)):
                        number = step * together + at
                        place = T.ramp(base + number * lanes, 1, lanes)
                        T.buffer_store(self._columns, words, [place])
                        end(number)
                if whole * together < self.words:
                    scattered(whole * together)

            if not whole or right.lines < lanes:
                scattered(0)
            elif right.lines % (lanes * VECTORS) == 0:
                quick()
            else:
                with T.If(column + lanes <= right.lines):
                    with T.Then():
                        quick()
                    with T.Else():
                        scattered(0)
            if self.in_blocks:
                with T.serial(0, self.words // 2) as pair:
                    self._interleave(self._columns, base + pair * (2 * lanes), lanes, _COLUMN_PAIRS)
            if sums is not None:
                place = T.ramp(vector * lanes, 1, lanes)
                T.buffer_store(self._column_sums, sums[self._all], [place])

    def _across(self, column: Index, word: Index) -> list[tirx.Expr]:
        """Vectors of a word, or of two if these are read from words, of neighbouring columns."""
        right, lanes, bits = self.right, self.lanes, 32 // self.word
        if right.line_step == 1:
            places = [right.at(column, word * self.word + part) for part in range(self.word)]
            bytes_ = [right.bytes[T.ramp(place, 1, lanes)] for place in places]
            wide = [T.Cast(f"int32x{lanes}", each) for each in bytes_]
            parts = [each << self._ints(bits * part) for part, each in enumerate(wide[1:], 1)]
            return [self._packed(right, reduce(or_, parts, wide[0]))]
        if not self.in_pairs:
            found = [right.words(column, (word + at) * WORD_BYTES, lanes) for at in range(2)]
            return [self._packed(right, words) for words in found]
        four = T.bind(right.words(column, word * self.word, lanes))
        low, high = self._ints(0xFF), self._ints(0xFF0000)
        first = (four & low) | ((four << self._ints(8)) & high)
        second = ((four >> self._ints(16)) & low) | ((four >> self._ints(8)) & high)
        return [self._packed(right, pairs) for pairs in (first, second)]

    def _pack_rows(self, row: Index) -> None:
        """Write the words of a tile of rows, and their sums."""
        left, lanes = self.left, self.lanes
        whole = self.product.depth // (self.word * lanes) if left.step == 1 else 0
        with T.serial(0, self.rows) as line, T.sblock("rows"):
            T.reads()
            T.writes()
            base = bound(line * self.words)
            sums = self._zeros() if self._has_sums[0] else None
            with T.serial(0, whole) as step:
                place = T.ramp(base + step * lanes, 1, lanes)
                words = self._along(row + line, step * (lanes * self.word))
                T.buffer_store(self._rows, words, [place])
                if sums is not None:
                    self._add(sums, self._rows[place], self._ints(0x01010101))
            with T.serial(0, self.words - whole * lanes) as rest:
                number = whole * lanes + rest
                T.buffer_store(self._rows, self._word(left, row + line, number), [base + number])
            if sums is not None:
                self._sum_row(line, base, sums, whole * lanes)
        if self.in_blocks:
            with T.serial(0, self.rows // 2) as pair, T.serial(0, self.words // STEPS) as part:
                first = pair * (2 * self.words) + part * STEPS
                self._interleave(self._rows, first, self.words, _ROW_PAIRS)

    def _interleave(
        self, words: tirx.Buffer, first: Index, stride: int, orders: Sequence[Sequence[int]]
    ) -> None:
        """Replace two vectors, ``stride`` words apart, by elements of both."""
        places = [T.ramp(first + at, 1, self.lanes) for at in (0, stride)]
        pair = [T.bind(words[place]) for place in places]
        for place, order in zip(places, orders, strict=True):
            T.buffer_store(words, tirx.Shuffle(pair, order), [place])

    def _along(self, line: Index, k: Index) -> tirx.Expr:
        """A vector of words of a row."""
        lanes = self.lanes
        found = self.left.bytes[T.ramp(self.left.at(line, k), 1, self.word * lanes)]
        if self.in_pairs:
            found = T.Cast(f"int16x{2 * lanes}", found)
        return self._packed(self.left, T.reinterpret(f"int32x{lanes}", found))

    def _sum_row(self, line: Index, base: Index, sums: tirx.Buffer, start: int) -> None:
        """Write the sum of a row: that of the lanes, and of the words from ``start`` on."""
        total = reduce(add, (sums[lane] for lane in range(self.lanes)))
        T.buffer_store(self._row_sums, total, [line])
        with T.serial(0, self.words - start) as rest, T.serial(0, WORD_BYTES) as part:
            byte = (self._rows[base + start + rest] >> (part * 8)) & T.int32(255)
            if self._signed_alone:
                byte = (byte ^ T.int32(128)) - T.int32(128)
            T.buffer_store(self._row_sums, self._row_sums[line] + byte, [line])

    def _word(self, factor: _Factor, line: Index, word: Index) -> tirx.Expr:
        """A word of single bytes; zeros beyond the last line and the end of the reduced axis."""
        bits, result = 32 // self.word, T.int32(0)
        for part in range(self.word):
            k = word * self.word + part
            byte = T.Cast("int32", factor.bytes[factor.at(line, k)])
            if factor.is_flipped:
                byte = byte ^ T.int32(128)
            if self.in_pairs:
                byte = byte - factor.short
            inside = tirx.all(line < factor.lines, k < self.product.depth)
            byte = tirx.if_then_else(inside, byte, T.int32(0)) & T.int32((1 << bits) - 1)
            result = result | (byte << T.int32(bits * part))
        return result

    def _packed(self, factor: _Factor, words: tirx.Expr) -> tirx.Expr:
        """Words of bytes with the sign that they need, or pairs less their zero point."""
        if factor.is_flipped:
            words = words ^ self._ints(0x00800080 if self.in_pairs else -0x7F7F7F80)
        if not self.in_pairs or factor.is_exact:
            return words
        pairs = T.reinterpret(f"int16x{2 * self.lanes}", words)
        short = T.broadcast(T.Cast("int16", factor.short), 2 * self.lanes)
        return T.reinterpret(f"int32x{self.lanes}", pairs - short)

    # Products

    def _ints(self, value: Index) -> tirx.Expr:
        return T.broadcast(T.int32(value) if isinstance(value, int) else value, self.lanes)

    def _zeros(self) -> tirx.Buffer:
        sums = T.sblock_alloc_buffer((self.lanes,), "int32")
        T.buffer_store(sums, self._ints(0), [self._all])
        return sums

    def _add(self, sums: tirx.Buffer, left: tirx.Expr, right: tirx.Expr) -> None:
        """Add the products of words."""
        form = self.lanes, self.word, False, self._signed_alone
        T.buffer_store(sums, add_word_products(sums[self._all], left, right, *form), [self._all])

    def _multiply(self, image: Sequence[Index], row: Index, first: Index, vector: Index) -> None:
        """Write the results of a register tile."""
        lanes = self.lanes
        with T.sblock("tile"):
            T.reads()
            T.writes()
            sums = [[self._zeros() for _ in range(VECTORS)] for _ in range(self.rows)]
            starts = [bound((vector + v) * (self.words * lanes)) for v in range(VECTORS)]
            if self.in_blocks:
                self._add_blocks(starts, sums)
            else:
                self._add_words(starts, sums)
            self._finish(image, row, first, vector, sums)

    def _add_words(self, starts: Sequence[Index], sums: Sequence[Sequence[tirx.Buffer]]) -> None:
        """Add the products of all words."""
        lanes = self.lanes
        with T.serial(0, self.words // STEPS) as part:
            factor = self._row_words(part * STEPS)
            for step in range(STEPS):
                places = [start + (part * STEPS + step) * lanes for start in starts]
                columns = [T.bind(self._columns[T.ramp(at, 1, lanes)]) for at in places]
                for line in range(self.rows):
                    word = T.bind(factor(line, step))
                    for v, words in enumerate(columns):
                        self._add(sums[line][v], word, words)

    def _add_blocks(self, starts: Sequence[Index], sums: Sequence[Sequence[tirx.Buffer]]) -> None:
        """Add the products of all words, of two rows and two columns at a time."""
        lanes, pairs = self.lanes, self.rows // 2
        with T.serial(0, self.words // STEPS) as part:
            for step in range(0, STEPS, 2):
                places = [start + (part * STEPS + step) * lanes for start in starts]
                places = [place + half * lanes for place in places for half in range(2)]
                columns = [T.bind(self._columns[T.ramp(place, 1, lanes)]) for place in places]
                for pair in range(pairs):
                    at = (2 * pair + step // 2) * self.words + part * STEPS
                    rows = T.bind(self._rows[T.ramp(at, 1, lanes)])
                    for number, words in enumerate(columns):
                        total = sums[2 * pair + number % 2][number // 2]
                        value = add_block_products(total[self._all], rows, words)
                        T.buffer_store(total, value, [self._all])
        for pair in range(pairs):
            for blocks in zip(sums[2 * pair], sums[2 * pair + 1], strict=True):
                found = [T.bind(block[self._all]) for block in blocks]
                for block, order in zip(blocks, _ROW_PAIRS, strict=True):
                    T.buffer_store(block, tirx.Shuffle(found, order), [self._all])

    def _row_words(self, begin: Index) -> Callable[[int, int], tirx.Expr]:
        """A function that gives a word of a row in all lanes, by its number from ``begin`` on."""
        places = [line * self.words + begin for line in range(self.rows)]
        if self.lanes != LANES_OF_128_BITS:
            return lambda line, step: self._ints(self._rows[places[line] + step])
        rows = [T.bind(self._rows[T.ramp(place, 1, self.lanes)]) for place in places]
        return lambda line, step: tirx.Shuffle([rows[line]], [step] * self.lanes)

    # Results

    def _finish(
        self,
        image: Sequence[Index],
        row: Index,
        first: Index,
        vector: Index,
        sums: Sequence[Sequence[tirx.Buffer]],
    ) -> None:
        """Write a tile's sums to the output."""
        result, lanes, extents = self.product.result, self.lanes, self.product.extents
        strides = [0] * len(extents)
        for place, axis in enumerate(result.axes):
            strides[axis] = prod(extents[other] for other in result.axes[place + 1 :])
        column = bound((first + vector) * lanes)
        start = _offset(image, row, column, strides)
        scale = None if result.scale == 1 else tirx.const(result.scale, _FLOAT)
        if self._factor is not None:
            scale = self._factor[()] if scale is None else scale * self._factor[()]
        for line in range(self.rows):
            at = [(line, v * lanes) for v in range(VECTORS)]
            values = [self._value(line, vector + v, sums[line][v], scale) for v in range(VECTORS)]
            places = [start + line * strides[-2] + offset for _, offset in at]
            if extents[-1] % (lanes * VECTORS) == 0:
                values = [
                    self._moved(value, image, row + line, column + offset)
                    for value, (_, offset) in zip(values, at, strict=True)
                ]
                self._store(values, places)
                continue
            for value, place, (_, offset) in zip(values, places, at, strict=True):
                self._store_columns(value, place, image, row + line, column + offset)

    def _value(
        self, line: int, vector: Index, sums: tirx.Buffer, scale: tirx.Expr | None
    ) -> tirx.Expr:
        """Sums of a row, without what zero points add, and scaled."""
        total, lanes = sums[self._all], self.lanes
        left, right = self.left.short, self.right.short
        if self._has_sums[1]:
            columns = self._column_sums[T.ramp(vector * lanes, 1, lanes)]
            total = total - columns * self._ints(left)
        if self._has_sums[0]:
            row = self._row_sums[line] - (self.product.depth * left if self._has_sums[1] else 0)
            total = total - self._ints(row * right)
        if self.product.result.dtype == "int32":
            return total
        value = T.Cast(f"{_FLOAT}x{lanes}", total)
        return value if scale is None else value * T.broadcast(scale, lanes)

    def _moved(
        self, value: tirx.Expr, image: Sequence[Index], row: Index, column: Index, count: int = 0
    ) -> tirx.Expr:
        """Floats that are rounded, rescaled and added to, ``count`` of them if not a vector."""
        result, lanes = self.product.result, self.lanes

        def floats(number: float) -> tirx.Expr:
            return T.broadcast(tirx.const(number, _FLOAT), lanes)

        if result.dtype != _FLOAT:
            return value
        if result.bounds is not None:
            low, high = map(floats, result.bounds)
            value = tirx.min(tirx.max(tirx.nearbyint(value), low), high)
        if result.rescale != 1:
            value = value * floats(result.rescale)
        shape = result.added
        if self._added is None or shape is None:
            return value
        strides = [prod(shape[axis + 1 :]) * (extent > 1) for axis, extent in enumerate(shape)]
        place, added = _offset(image, row, column, strides), flat(self._added)
        if not strides[-1]:
            return value + T.broadcast(added[place], lanes)
        if not count:
            return value + added[T.ramp(place, 1, lanes)]
        few = T.sblock_alloc_buffer((lanes,), _FLOAT)
        T.buffer_store(few, floats(0), [self._all])
        for lane in range(count):
            T.buffer_store(few, added[place + lane], [lane])
        return value + few[self._all]

    def _store(self, values: Sequence[tirx.Expr], places: Sequence[Index]) -> None:
        """Store neighbouring vectors."""
        bounds, lanes = self._byte_bounds, self.lanes
        if bounds is None or lanes == LANES_OF_128_BITS:
            for value, place in zip(values, places, strict=True):
                T.buffer_store(self._out, self._stored(value), [T.ramp(place, 1, lanes)])
            return
        data = packed_bytes(values, bounds)
        place = T.ramp(places[0], 1, lanes * len(values))
        T.buffer_store(self._out, self._with_sign(data), [place])

    def _store_columns(
        self, value: tirx.Expr, place: Index, image: Sequence[Index], row: Index, column: Index
    ) -> None:
        """Store those elements of a vector that are columns."""
        lanes, width = self.lanes, self.product.extents[-1]
        if width >= lanes:
            with T.If(column + lanes <= width), T.Then():
                whole = self._stored(self._moved(value, image, row, column))
                T.buffer_store(self._out, whole, [T.ramp(place, 1, lanes)])
        if width % lanes == 0:
            return
        with T.If(column == width - width % lanes), T.Then(), T.sblock("rest"):
            T.reads()
            T.writes()
            kept = T.sblock_alloc_buffer((lanes,), self.product.result.dtype)
            rest = self._stored(self._moved(value, image, row, column, width % lanes))
            T.buffer_store(kept, rest, [self._all])
            for lane in range(width % lanes):
                T.buffer_store(self._out, kept[lane], [place + lane])

    def _stored(self, value: tirx.Expr) -> tirx.Expr:
        """A vector in the type of the output."""
        bounds = self._byte_bounds
        if bounds is None:
            return value
        return self._with_sign(activate_to_bytes(value, bounds, _FLOAT))

    @property
    def _byte_bounds(self) -> Activation | None:
        """The rounding to bytes, if the output has such."""
        result = self.product.result
        if result.bounds is None or result.dtype == _FLOAT:
            return None
        return Activation("round_clip", *result.bounds)

    def _with_sign(self, data: tirx.Expr) -> tirx.Expr:
        """Bytes from the lowest number on, in the type of the output."""
        if self.product.result.dtype == "uint8":
            return data
        lanes = int(str(data.ty.dtype).partition("x")[2])
        return T.reinterpret(f"int8x{lanes}", data ^ T.broadcast(tirx.const(128, "uint8"), lanes))


def _offset(image: Sequence[Index], row: Index, column: Index, strides: Sequence[int]) -> Index:
    """Place of an element of the product in a tensor."""
    places = zip((*image, row, column), strides, strict=True)
    return bound(reduce(add, (at * step for at, step in places if step), 0))
