# SPDX-License-Identifier: Apache-2.0
"""Moving pixels between NCHW and NCHW[x]c by transposes in registers.

``x`` channels of ``x`` neighbouring pixels are loaded as vectors, transposed by log2(x) rounds of
two-operand shuffles, and stored as vectors, so that both sides are touched in whole cache lines.
The functions here may only be called between the ``with`` statements of an open ``IRBuilder``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..core.micro_kernel import bound, loop
from ..core.prefetch import prefetch
from ..core.tiles import Index


@dataclass(frozen=True)
class Planes:
    """Pixels in NCHW: ``buffer[offset + channel * plane + pixel]``."""

    buffer: tirx.Buffer
    offset: Index
    plane: int


@dataclass(frozen=True)
class BlockedPixels:
    """Pixels of one channel block in NCHW[x]c: ``buffer[offset + pixel * lanes + lane]``.

    Of a buffer of the nest, ``is_local``, TVM takes seconds to find which part is used where it
    cannot follow an index.
    """

    buffer: tirx.Buffer
    offset: Index
    is_local: bool = False


def move_pixels(
    source: Planes | BlockedPixels,
    target: Planes | BlockedPixels,
    pixels: Index,
    lanes: int,
    channels: int,
    ahead: int = 0,
) -> None:
    """Copy one channel block from one layout to the other.

    Parameters
    ----------
    source, target : Planes | BlockedPixels
        One of each.
    pixels : Index
        Number of neighbouring pixels. A number known to be below ``lanes`` is moved element by
        element; an expression must not be below it.
    lanes : int
        Channels of a block, a power of two.
    channels : int
        Channels of this block that exist; the others are written as zero, and not read.
    ahead : int
        Distance in elements from what is read to what is prefetched; 0 for no prefetch.
    """
    if isinstance(pixels, int) and pixels < lanes:
        _move_elements(source, target, pixels, lanes, channels)
        return
    exact = isinstance(pixels, int) and pixels % lanes == 0
    count = pixels // lanes if exact else tirx.ceildiv(tirx.convert(pixels), lanes)
    with loop(0, count) as group:
        # The last group ends with the last pixel, and may overlap the one before.
        start = group * lanes if exact else tirx.min(group * lanes, pixels - lanes)
        reads = _rows(source, start, lanes, channels)
        for row in reads if ahead else ():
            prefetch(source.buffer, row + ahead)
        zero = T.broadcast(tirx.const(0, source.buffer.dtype), lanes)
        vectors = [
            T.bind(source.buffer[T.ramp(reads[row], 1, lanes)]) if row < len(reads) else zero
            for row in range(lanes)
        ]
        vectors = _transposed(vectors, lanes)
        writes = _rows(target, start, lanes, channels)
        for at, vector in zip(writes, vectors, strict=False):
            T.buffer_store(target.buffer, vector, [T.ramp(at, 1, lanes)])


def _rows(side: Planes | BlockedPixels, start: Index, lanes: int, channels: int) -> Sequence[Index]:
    """First elements of the vectors of a group: channels of the planes, or pixels of the block."""
    if isinstance(side, Planes):
        first = bound(side.offset + start)
        return [first + channel * side.plane for channel in range(channels)]
    first = side.offset + start * lanes
    first = first if side.is_local else bound(first)
    return [first + pixel * lanes for pixel in range(lanes)]


def _move_elements(
    source: Planes | BlockedPixels,
    target: Planes | BlockedPixels,
    pixels: int,
    lanes: int,
    channels: int,
) -> None:
    with T.serial(0, pixels) as pixel:
        for lane in range(lanes if isinstance(target, BlockedPixels) else channels):
            value = (
                source.buffer[_element(source, pixel, lane, lanes)]
                if lane < channels
                else tirx.const(0, source.buffer.dtype)
            )
            T.buffer_store(target.buffer, value, [_element(target, pixel, lane, lanes)])


def _element(side: Planes | BlockedPixels, pixel: Index, lane: int, lanes: int) -> Index:
    if isinstance(side, Planes):
        return side.offset + lane * side.plane + pixel
    return side.offset + pixel * lanes + lane


def _transposed(rows: list[tirx.Expr], lanes: int) -> list[tirx.Expr]:
    """Transpose ``lanes`` vectors of ``lanes`` elements.

    First every four rows within their quarters of four elements, by the interleaving shuffles that
    x86 and NEON have as one instruction; then whole quarters are exchanged.
    """
    if lanes > 2:
        for distance in (1, 2):
            rows = _round(rows, distance, _interleaved)
        # Interleaving leaves the middle two columns of each four in each other's place.
        rows = [rows[row - row % 4 + (0, 2, 1, 3)[row % 4]] for row in range(lanes)]
    distance = 4 if lanes > 2 else 1
    while distance < lanes:
        rows = _round(rows, distance, _exchanged)
        distance *= 2
    return rows


def _round(
    rows: list[tirx.Expr], distance: int, pick: Callable[[int, int, int], tuple[int, int]]
) -> list[tirx.Expr]:
    """Shuffle each two rows that lie ``distance`` apart into two others."""
    lanes = len(rows)
    after = list(rows)
    for low in range(lanes):
        if not low & distance:
            pair = [rows[low], rows[low + distance]]
            for half in (0, 1):
                picked = [pick(lane, distance, lanes)[half] for lane in range(lanes)]
                after[low + half * distance] = T.bind(tirx.Shuffle(pair, picked))
    return after


def _interleaved(lane: int, unit: int, lanes: int) -> tuple[int, int]:
    """Source of ``lane`` when units of a quarter's lower, or upper, half alternate."""
    quarter, position = lane - lane % 4, lane % 4
    turn, within = divmod(position, unit)
    source = (turn % 2) * lanes + quarter + (turn // 2) * unit + within
    return source, source + 2


def _exchanged(lane: int, distance: int, lanes: int) -> tuple[int, int]:
    """Source of ``lane`` when blocks of ``distance`` swap across the diagonal."""
    source = lanes + lane - distance if lane & distance else lane
    return source, source + distance
