# SPDX-License-Identifier: Apache-2.0
"""Copies of the rows that a group of units reads, as the words that are multiplied.

Each element is multiplied by many weights, so that to widen or to round it once costs little. A
copy stays in the cache of its task. The functions may only be called within an open ``T.sblock``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.compute.conv2d import activate_to_bytes
from schedules.tir.float_bits import widen_bits
from schedules.workload.conv2d import WORD_BYTES, ConvLayer

from ..core.micro_kernel import FeatureMap, Index, LayerOperands, loop
from ..core.tiles import Span, split_evenly, tile_start
from ..cost.conv2d_knobs import Conv2DKnobs
from .register_tile_nest import is_flat, source_span

_SHIFT = -0x7F7F7F80
"""Bits of a word of bytes that change where 128 is subtracted from each."""


def widened(ops: LayerOperands, units: Span, knobs: Conv2DKnobs) -> LayerOperands:
    """Copy bytes to 16 bits each, in words of two, or less 128, and bfloat16 to float32."""
    source, width = ops.source, ops.source.width
    if is_flat(ops):
        sizes = split_evenly(width, knobs.pixels)
        first, last = (tile_start(width, knobs.pixels, unit) for unit in units)
        first_row, most = 0, min(width, knobs.unit_group * sizes[0])
    else:
        first_row, stop = source_span(units, ops.layer, source.height, axis=0)
        first, last = first_row * width, stop * width
        most = width * _rows_read(ops.layer, source.height, knobs.unit_group)
    words, each = source.lanes, ops.word if ops.pairs else 1
    if not (ops.pairs or ops.shifted):
        words //= ops.word
    dtype = ops.dtype if ops.pairs else "int32"
    blocks = ops.in_blocks if ops.layer.groups == 1 else -(-ops.layer.in_channels // words)
    stored = FeatureMap(
        buffer=T.sblock_alloc_buffer((blocks * most * words * each,), dtype),
        offset=-first * words,
        block_stride=most * words,
        row_stride=width * words,
        lanes=words,
        height=source.height,
        width=width,
        is_local=True,
    )
    with loop(0, blocks) as block, T.serial(0, last - first) as pixel:
        at = source.offset + block * source.block_stride + (first + pixel) * source.step
        loaded = source.buffer[_range(at, source.lanes)]
        if ops.shifted:
            wide = tirx.bitwise_xor(loaded, _vector(T.int32(_SHIFT), words))
        elif ops.pairs:
            wide = widen_bits(T.reinterpret(f"uint16x{words * each}", loaded))
        else:
            wide = T.reinterpret(f"int32x{words}", T.Cast(f"int16x{source.lanes}", loaded))
        place = _range((block * stored.block_stride + pixel * words) * each, words * each)
        T.buffer_store(stored.buffer, wide, [place])
    return replace(ops, source=stored)


def _rows_read(layer: ConvLayer, height: int, rows: int) -> int:
    """Most rows of an image that so many rows of the output read."""
    reach = (layer.kernel[0] - 1) * layer.dilation[0] + 1
    return min(height, (rows - 1) * layer.strides[0] + reach)


def rounded(ops: LayerOperands, rows: Span, count: int) -> LayerOperands:
    """Round an image of floats to bytes, in words of four, or of two in 16 bits.

    The copy contains what the layer pads, which need not be zero bytes.

    Parameters
    ----------
    ops : LayerOperands
        The layer.
    rows : Span
        Rows of its output for which the image is read.
    count : int
        Most rows that these can be.
    """
    rounding, source, words = ops.rounding, ops.source, WORD_BYTES // ops.word
    assert rounding is not None
    top, left, bottom, right = ops.layer.padding
    channels = -(-ops.layer.in_channels // ops.word)
    layer = replace(ops.layer, padding=(0, 0, 0, 0), in_channels=channels)
    height, width = source.height + top + bottom, source.width + left + right
    first, stop = source_span(rows, layer, height, axis=0)
    most = width * words * _rows_read(layer, height, count)
    stored = FeatureMap(
        buffer=T.sblock_alloc_buffer((most,), "int32"),
        offset=-first * (width * words),
        block_stride=most,
        row_stride=width * words,
        lanes=words,
        height=height,
        width=width,
        is_local=True,
    )

    zero = sum(rounding.zero << (32 // ops.word * part) for part in range(ops.word))
    zero -= zero >> 31 << 32  # The word is signed.
    zero ^= _SHIFT if ops.shifted else 0

    def fill(place: Index, pixels: int) -> None:
        with T.serial(0, pixels * words) as word:
            T.buffer_store(stored.buffer, T.int32(zero), [place + word])

    with T.serial(0, stop - first) as number:
        row, place = first + number - top, number * (width * words)
        with T.If(tirx.all(row >= 0, row < source.height)):
            with T.Then():
                fill(place, left)
                _round_row(ops, row, stored.buffer, place + left * words)
                fill(place + (left + source.width) * words, right)
            with T.Else():
                fill(place, width)
    return replace(ops, layer=layer, source=stored)


def _round_row(ops: LayerOperands, row: Index, buffer: tirx.Buffer, place: Index) -> None:
    """Round a row of an image to words, by vectors of pixels; the last one ends with the row."""
    source, width = ops.source, ops.source.width
    words, channels = WORD_BYTES // ops.word, ops.layer.in_channels
    lanes = ops.lanes if width >= ops.lanes else 1
    with T.serial(0, -(-width // lanes)) as number:
        column = tirx.min(number * lanes, width - lanes)
        integers = [
            _byte(ops, source.at(channel, row, column), lanes) for channel in range(channels)
        ]
        integers += [_vector(tirx.const(0, "int32"), lanes)] * (WORD_BYTES - channels)
        parts = [_word(integers[k : k + ops.word]) for k in range(0, WORD_BYTES, ops.word)]
        order = [k * lanes + lane for lane in range(lanes) for k in range(words)]
        pixels = tirx.Shuffle(parts, order) if len(order) > 1 else parts[0]
        if ops.shifted:
            pixels = tirx.bitwise_xor(pixels, _vector(T.int32(_SHIFT), len(order)))
        place = place + column * words
        T.buffer_store(buffer, pixels, [_range(place, len(order))])


def _byte(ops: LayerOperands, at: Index, lanes: int) -> tirx.Expr:
    """Neighbouring floats of a plane, rounded to integers from 0 to 255."""
    rounding, buffer = ops.rounding, ops.source.buffer
    assert rounding is not None
    quotient = buffer[_range(at, lanes)] / _vector(tirx.const(rounding.divisor, "float32"), lanes)
    byte = activate_to_bytes(quotient, rounding.activation, "float32")
    return T.Cast(f"int32x{lanes}" if lanes > 1 else "int32", byte)


def _word(integers: Sequence[tirx.Expr]) -> tirx.Expr:
    """Integers side by side in 32 bits, the first one in the lowest."""
    value, bits = integers[0], 32 // len(integers)
    for part, integer in enumerate(integers[1:], 1):
        lanes = tvm.DataType(str(integer.ty.dtype)).lanes
        shifted = tirx.shift_left(integer, _vector(T.int32(bits * part), lanes))
        value = tirx.bitwise_or(value, shifted)
    return value


def _range(start: Index, count: int) -> Index:
    return T.ramp(start, 1, count) if count > 1 else start


def _vector(number: tirx.Expr, lanes: int) -> tirx.Expr:
    return T.broadcast(number, lanes) if lanes > 1 else number
