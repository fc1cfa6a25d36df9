# SPDX-License-Identifier: Apache-2.0
"""Tile registers of a CPU (AMX), and loops that compute the same where there are none.

A tile has up to 16 rows of up to 16 words of 32 bits. A product adds to each element of a tile of
sums the products of the channels in a row of words and in a column of words: four of bytes, or two
of bfloat16. The loops add in the order of the instructions, so that both give the same bits: those
of bfloat16 add the first and the second numbers of the words apart, then both to the sum.

The functions here may only be called between the ``with`` statements of an open ``IRBuilder``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .machine import CPUInfo
from .micro_kernel import word_part
from .tiles import Index

TILE_ROWS = 16
TILE_WORDS = 16
TILE_ELEMENTS = TILE_ROWS * TILE_WORDS
_WORD = 4  # bytes
_REGISTERS = 8
_PRODUCTS = {"uint8": "tdpbusd", "bfloat16": "tdpbf16ps"}


class TileShape(NamedTuple):
    """Rows of a tile, and words of 32 bits in each."""

    rows: int
    words: int


class TileUnit(ABC):
    """Tile registers with shapes, in a block of the nest.

    Parameters
    ----------
    shapes : Sequence[TileShape]
        Shapes of the registers in use, in order.
    dtype : str
        Element type of the left factors: ``uint8``, whose right ones are int8, or ``bfloat16``.
    """

    def __init__(self, shapes: Sequence[TileShape], dtype: str) -> None:
        self.shapes = shapes
        self.dtype = dtype

    @abstractmethod
    def open(self) -> None:
        """Give the registers their shapes, for this thread."""

    @abstractmethod
    def close(self) -> None:
        """Give the registers back."""

    @abstractmethod
    def zero(self, tile: int) -> None:
        """Fill a tile with zeros."""

    @abstractmethod
    def load(self, tile: int, words: tirx.Buffer, offset: Index, stride: int) -> None:
        """Load a tile from a buffer of words whose rows are ``stride`` apart."""

    @abstractmethod
    def store(self, tile: int, words: tirx.Buffer, offset: Index) -> None:
        """Store a tile to a buffer of words, its rows ``TILE_WORDS`` apart."""

    @abstractmethod
    def multiply(self, total: int, left: int, right: int) -> None:
        """Add the product of two tiles to a third."""


class TileInstructions(TileUnit):
    """The registers of the CPU."""

    def open(self) -> None:
        """Load the shapes: palette 1, then bytes of a row, and rows, of each tile."""
        config = bytearray(64)
        config[0] = 1
        for number, (rows, words) in enumerate(self.shapes):
            config[16 + 2 * number] = words * _WORD
            config[48 + number] = rows
        words_of = T.sblock_alloc_buffer((16,), "int32")
        for place in range(16):
            word = int.from_bytes(config[4 * place : 4 * place + 4], "little")
            T.buffer_store(words_of, T.int32(word), [place])
        self._call("ldtilecfg", T.address_of(words_of[0]))

    def close(self) -> None:
        """Release the registers, which the system then need not save."""
        self._call("tilerelease")

    def zero(self, tile: int) -> None:
        """Fill a tile with zeros."""
        self._call("tilezero", T.uint8(tile))

    def load(self, tile: int, words: tirx.Buffer, offset: Index, stride: int) -> None:
        """Load a tile."""
        place = T.address_of(words[offset])
        self._call("tileloadd64", T.uint8(tile), place, T.int64(stride * _WORD))

    def store(self, tile: int, words: tirx.Buffer, offset: Index) -> None:
        """Store a tile."""
        place = T.address_of(words[offset])
        self._call("tilestored64", T.uint8(tile), place, T.int64(TILE_WORDS * _WORD))

    def multiply(self, total: int, left: int, right: int) -> None:
        """Add a product."""
        self._call(_PRODUCTS[self.dtype], *map(T.uint8, (total, left, right)))

    def _call(self, name: str, *arguments: tirx.Expr) -> None:
        T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *arguments))


class TileLoops(TileUnit):
    """A buffer in their place, for a CPU without such registers."""

    def open(self) -> None:
        """Allocate the buffer."""
        self._tiles = T.sblock_alloc_buffer((_REGISTERS * TILE_ELEMENTS,), "int32")

    def close(self) -> None:
        """Do nothing: the buffer ends with its block."""

    def zero(self, tile: int) -> None:
        """Fill a tile with zeros."""
        with T.serial(0, self.shapes[tile].rows) as row:
            self._put(tile, row, T.broadcast(T.int32(0), TILE_WORDS))

    def load(self, tile: int, words: tirx.Buffer, offset: Index, stride: int) -> None:
        """Copy to the buffer."""
        rows, width = self.shapes[tile]
        with T.serial(0, rows) as row, T.serial(0, width) as word:
            place = tile * TILE_ELEMENTS + row * TILE_WORDS + word
            T.buffer_store(self._tiles, words[offset + row * stride + word], [place])

    def store(self, tile: int, words: tirx.Buffer, offset: Index) -> None:
        """Copy from the buffer."""
        rows, width = self.shapes[tile]
        with T.serial(0, rows) as row, T.serial(0, width) as word:
            value = self._tiles[tile * TILE_ELEMENTS + row * TILE_WORDS + word]
            T.buffer_store(words, value, [offset + row * TILE_WORDS + word])

    def multiply(self, total: int, left: int, right: int) -> None:
        """Add a product, row by row."""
        rows, depth = self.shapes[left]
        add = self._add_floats if self.dtype == "bfloat16" else self._add_bytes
        with T.serial(0, rows) as row:
            add(total, left, right, row, depth)

    def _add_bytes(self, total: int, left: int, right: int, row: Index, depth: int) -> None:
        with T.serial(0, depth) as word:
            factor, vector = self._factors(left, right, row, word)
            added = self._row(total, row)
            for part in range(_WORD):
                byte = (factor >> _word(8 * part)) & _word(255)
                added = added + byte * ((vector << _word(24 - 8 * part)) >> _word(24))
            self._put(total, row, added)

    def _add_floats(self, total: int, left: int, right: int, row: Index, depth: int) -> None:
        sums = [T.alloc_buffer((TILE_WORDS,), "float32", layout=None) for _ in range(2)]
        whole = T.ramp(0, 1, TILE_WORDS)
        for buffer in sums:
            T.buffer_store(buffer, T.broadcast(T.float32(0), TILE_WORDS), [whole])
        with T.serial(0, depth) as word:
            pair = self._factors(left, right, row, word)
            for part, buffer in enumerate(sums):
                first, second = (word_part(words, part) for words in pair)
                T.buffer_store(buffer, buffer[whole] + first * second, [whole])
        added = sums[0][whole] + sums[1][whole]
        before = T.reinterpret(f"float32x{TILE_WORDS}", self._row(total, row))
        self._put(total, row, T.reinterpret(f"int32x{TILE_WORDS}", before + added))

    def _factors(
        self, left: int, right: int, row: Index, word: Index
    ) -> tuple[tirx.Expr, tirx.Expr]:
        """A word of a row in all lanes, and a row of words."""
        factor = self._tiles[left * TILE_ELEMENTS + row * TILE_WORDS + word]
        return T.broadcast(factor, TILE_WORDS), self._row(right, word)

    def _row(self, tile: int, row: Index) -> tirx.Expr:
        return self._tiles[T.ramp(tile * TILE_ELEMENTS + row * TILE_WORDS, 1, TILE_WORDS)]

    def _put(self, tile: int, row: Index, value: tirx.Expr) -> None:
        place = T.ramp(tile * TILE_ELEMENTS + row * TILE_WORDS, 1, TILE_WORDS)
        T.buffer_store(self._tiles, value, [place])


def _word(value: int) -> tirx.Expr:
    return T.broadcast(T.int32(value), TILE_WORDS)


@contextmanager
def tile_unit(shapes: Sequence[TileShape], dtype: str, cpu: CPUInfo) -> Iterator[TileUnit]:
    """Registers with shapes, for what is built inside; of an ``sblock`` that is open."""
    unit = (TileLoops if cpu.emulates_tiles else TileInstructions)(shapes, dtype)
    unit.open()
    yield unit
    unit.close()
