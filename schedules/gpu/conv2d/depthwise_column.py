# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolution of four channels of several outputs in a column, by one thread.

The thread moves down the rows of the data that its outputs see: the taps of a row are loaded once,
16 bytes each, and serve all outputs that reach the row.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.statements import when

from ..gemm.float4 import at_once, copy4, zero4
from ..gemm.implicit_gemm import LANES, ConvShape, Index, inside

HELD_TAPS = 25  # weights that a thread can keep in registers


@dataclass(frozen=True)
class Column:
    """Four channels of several outputs in a column.

    Parameters
    ----------
    shape : ConvShape
        The convolution.
    rows : int
        Number of outputs.
    plane, channel : tirx.Expr
        Block of channels, counted over all images and in its own.
    row, column : tirx.Expr
        Place of the first output.
    data, weight : tirx.Buffer
        Flat views.
    anywhere : bool
        Whether all outputs may lie outside the image; otherwise only some below the last row.
    """

    shape: ConvShape
    rows: int
    plane: tirx.Expr
    channel: tirx.Expr
    row: tirx.Expr
    column: tirx.Expr
    data: tirx.Buffer
    weight: tirx.Buffer
    anywhere: bool = False

    def add_all(self) -> tirx.Buffer:
        """Emit all rows of the data; returns registers ``[output][4]``."""
        layer = self.shape.layer
        sums = T.alloc_buffer((self.rows * LANES,), "float32", scope="local")
        for number in range(self.rows):
            zero4(sums, number)
        held = self._hold_weights()
        reach = (self.rows - 1) * layer.strides[0] + (layer.kernel[0] - 1) * layer.dilation[0] + 1
        for offset in range(reach):
            reached = self._reached(offset)
            if reached:
                self._add_row(sums, held, offset, reached)
        return sums

    def _reached(self, offset: int) -> list[tuple[int, int]]:
        """Outputs that see a row, ``offset`` below the first row, with the kernel row."""
        layer, found = self.shape.layer, []
        for number in range(self.rows):
            tap, rest = divmod(offset - number * layer.strides[0], layer.dilation[0])
            if rest == 0 and 0 <= tap < layer.kernel[0]:
                found.append((number, tap))
        return found

    def _hold_weights(self) -> tirx.Buffer | None:
        """Registers with all weights, or None where they are too many."""
        taps = self.shape.taps
        if taps > HELD_TAPS:
            return None
        held = T.alloc_buffer((taps * LANES,), "float32", scope="local")
        for tap in range(taps):
            copy4(held, tap, self.weight, self.channel * taps + tap)
        return held

    def _add_row(
        self,
        sums: tirx.Buffer,
        held: tirx.Buffer | None,
        offset: int,
        reached: list[tuple[int, int]],
    ) -> None:
        """Load the taps of one row of the data, and add them to the outputs that see it."""
        layer, across = self.shape.layer, self.shape.layer.kernel[1]
        seen = T.alloc_buffer((across * LANES,), "float32", scope="local")
        row = self.row * layer.strides[0] + (offset - layer.padding[0])
        for kw in range(across):
            column = self.column * layer.strides[1] + (kw * layer.dilation[1] - layer.padding[1])
            place = (self.plane * self.shape.size[0] + row) * self.shape.size[1] + column
            conditions = inside(self.shape, row, column, self.anywhere)
            conditions += self._has_row(row)
            if conditions:
                zero4(seen, kw)
            with when(at_once(conditions)):
                copy4(seen, kw, self.data, place)
        for number, kh in reached:
            for kw in range(across):
                tap = kh * across + kw
                source, at = self._weight(held, tap)
                with T.unroll(LANES) as lane:
                    product = seen[kw * LANES + lane] * source[at * LANES + lane]
                    to = number * LANES + lane
                    T.buffer_store(sums, sums[to] + product, [to])

    def _has_row(self, row: tirx.Expr) -> list[tirx.Expr]:
        """Outputs below the last row, which are not stored, may see data that do not exist."""
        height = self.shape.out_size[0]
        sure = self.anywhere or height % self.rows == 0
        return [] if sure else [row < self.shape.size[0]]

    def _weight(self, held: tirx.Buffer | None, tap: int) -> tuple[tirx.Buffer, Index]:
        """Place of the weights of a tap, in fours."""
        if held is not None:
            return held, tap
        loaded = T.alloc_buffer((LANES,), "float32", scope="local")
        copy4(loaded, 0, self.weight, self.channel * self.shape.taps + tap)
        return loaded, 0
