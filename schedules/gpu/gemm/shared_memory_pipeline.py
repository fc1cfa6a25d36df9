# SPDX-License-Identifier: Apache-2.0
"""Transfer of the operands of a product from global to shared memory, one step at a time.

Both lie in shared memory as in global memory, in vectors of four: the weights as
``[block][row][4 outputs]``, the data as ``[quad][pixel][4 inputs]``. One vector of padding behind
the weights of a block keeps the blocks in different banks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import Extent, constant
from schedules.tir.index_math import i64, simplified
from schedules.tir.statements import when

from ..core.intrinsics import sync
from .float4 import at_once, copy4, zero4
from .implicit_gemm import LANES, ConvShape, Index, Window, inside
from .thread_block_tile import GemmBlock


class OperandStage(Protocol):
    """Transfer of an operand, or of several, to shared memory."""

    def fetch(self, step: Index) -> None:
        """Load a step to registers."""

    def keep(self, half: int) -> None:
        """Store the loaded step to a half of the shared memory."""


def run_steps(
    stages: Sequence[OperandStage],
    first: Index,
    steps: Extent,
    add: Callable[[Index, int], None],
    fetched: bool = False,
) -> None:
    """Emit the loop over steps: each is loaded while the previous one is added.

    Two steps are an iteration, so that halves of the shared memory are compile-time constants. Of
    an unknown number of steps one too many may be added, of zeros.

    Parameters
    ----------
    stages : Sequence
        Operands of each step.
    first : Index
        Number of the first step.
    steps : Extent
        Number of steps.
    add : Callable
        Adds a step, counted from the first, that lies in a half of the shared memory.
    fetched : bool
        Whether the first step is in the stages' registers.
    """
    known = constant(steps)

    def advance(step: Index, half: int) -> None:
        for stage in stages:
            stage.fetch(first + step + 1)
        add(step, half)
        for stage in stages:
            stage.keep(1 - half)
        sync()

    for stage in stages:
        if not fetched:
            stage.fetch(first)
        stage.keep(0)
    sync()
    if known is None or known > 2:
        pairs = simplified(steps // 2) if known is None else (known - 1) // 2
        with T.serial(0 if known is not None else i64(0), pairs) as pair:
            advance(pair * 2, 0)
            advance(pair * 2 + 1, 1)
    if known is not None and known % 2 == 0:
        advance(known - 2, 0)
        add(known - 1, 1)
    else:
        add(steps - 1, 0)


class WeightStage:
    """Transfer of the weights of one step from global to shared memory."""

    def __init__(self, gemm: GemmBlock) -> None:
        tile = gemm.tile
        self.gemm = gemm
        self.row_count = LANES * tile.quads
        self.stride = self.row_count + 1  # of a block, in fours
        self.items = tile.blocks * self.row_count
        self.turns = -(-self.items // tile.threads)
        self.registers = T.alloc_buffer((self.turns * LANES,), "float32", scope="local")
        self.shared = _halves(tile.blocks * self.stride * LANES)

    def moved(self, block: Index) -> WeightStage:
        """The same memory for other blocks of channels."""
        stage = copy.copy(self)
        stage.gemm = replace(self.gemm, block=block)
        return stage

    def fetch(self, step: Index) -> None:
        """Load a step; rows and blocks that do not exist are zeros."""
        gemm, shape = self.gemm, self.gemm.shape
        for turn in range(self.turns):
            item = gemm.thread + turn * gemm.tile.threads
            block = gemm.block + item // self.row_count
            row = step * self.row_count + item % self.row_count
            conditions = [gemm.exists(block), None if gemm.rows is None else row < gemm.rows]
            conditions.append(self._has(item, turn))
            if any(condition is not None for condition in conditions):
                zero4(self.registers, turn)
            with when(*conditions):
                at = (gemm.group * shape.out_blocks + block) * shape.rows + row
                copy4(self.registers, turn, gemm.weight, at)

    def keep(self, half: int) -> None:
        """Store the loaded step into a half of the shared memory."""
        for turn in range(self.turns):
            item = self.gemm.thread + turn * self.gemm.tile.threads
            with when(self._has(item, turn)):
                at = item // self.row_count * self.stride + item % self.row_count
                copy4(self.shared[half], at, self.registers, turn)

    def _has(self, item: tirx.Expr, turn: int) -> tirx.Expr | None:
        whole = (turn + 1) * self.gemm.tile.threads <= self.items
        return None if whole else item < self.items


class DataStage:
    """Transfer of the data of one step from global to shared memory.

    Parameters
    ----------
    gemm : GemmBlock
        The block.
    data : tirx.Buffer
        A flat view.
    window : Callable
        From a pixel of the tile to its window, which must lie in an image.
    """

    def __init__(
        self, gemm: GemmBlock, data: tirx.Buffer, window: Callable[[tirx.Expr], Window]
    ) -> None:
        tile = gemm.tile
        self.gemm, self.data = gemm, data
        self.items = tile.pixels * tile.quads
        self.turns = -(-self.items // tile.threads)
        self.registers = T.alloc_buffer((self.turns * LANES,), "float32", scope="local")
        self.shared = _halves(self.items * LANES)
        period = tile.pixels // math.gcd(tile.pixels, tile.threads)
        found = [
            window((gemm.thread + turn * tile.threads) % tile.pixels)
            for turn in range(min(period, self.turns))
        ]
        self.windows = [found[turn % period] for turn in range(self.turns)]

    def fetch(self, step: Index) -> None:
        """Load a step; elements in the padding are zero."""
        tile = self.gemm.tile
        for turn, window in enumerate(self.windows):
            if tile.pixels % tile.threads == 0:  # the same for all threads
                quad = step * tile.quads + turn * tile.threads // tile.pixels
            else:
                item = self.gemm.thread + turn * tile.threads
                quad = T.bind(step * tile.quads + item // tile.pixels)
            fetch = self._fetch_plain if self.gemm.shape.plain_data else self._fetch_packed
            fetch(turn, quad, window)

    def _fetch_packed(self, turn: int, quad: Index, window: Window) -> None:
        shape = self.gemm.shape
        first = self.gemm.group * shape.in_blocks
        place, conditions = tap_place(shape, window, quad, first)
        conditions += self._has(turn)
        if self.gemm.rows is not None:
            conditions.append(quad < shape.quads)
        if conditions:
            zero4(self.registers, turn)
        with when(at_once(conditions)):
            copy4(self.registers, turn, self.data, place)

    def _fetch_plain(self, turn: int, quad: Index, window: Window) -> None:
        shape = self.gemm.shape
        zero4(self.registers, turn)
        for lane in range(LANES):
            row = quad * LANES + lane
            place, conditions = tap_place(shape, window, row, 0)
            conditions += self._has(turn)
            if self.gemm.rows is not None:
                conditions.append(row < self.gemm.rows)
            with when(at_once(conditions)):
                T.buffer_store(self.registers, self.data[place], [turn * LANES + lane])

    def keep(self, half: int) -> None:
        """Store the loaded step into a half of the shared memory."""
        for turn in range(self.turns):
            item = self.gemm.thread + turn * self.gemm.tile.threads
            with when(*self._has(turn)):
                copy4(self.shared[half], item, self.registers, turn)

    def _has(self, turn: int) -> list[tirx.Expr]:
        """Condition for the thread to have something to load in a turn."""
        item, threads = self.gemm.thread + turn * self.gemm.tile.threads, self.gemm.tile.threads
        return [] if (turn + 1) * threads <= self.items else [item < self.items]


def _halves(size: int) -> list[tirx.Buffer]:
    """Shared memory for two steps, as two buffers, so that TVM sees that they are disjoint."""
    return [T.alloc_buffer((size,), "float32", scope="shared") for _ in range(2)]


def tap_place(
    shape: ConvShape, window: Window, number: Index, first_plane: Index
) -> tuple[tirx.Expr, list[tirx.Expr]]:
    """Place of a plane at a tap of a window, in pixels of planes, and the condition to read it.

    Parameters
    ----------
    shape : ConvShape
        The convolution.
    window : Window
        The window.
    number : Index
        Plane and tap as one number, in the order plane, kernel row, kernel column.
    first_plane : Index
        Offset of the plane.
    """
    width = shape.layer.kernel[1]
    plane, tap = number // shape.taps, number % shape.taps
    row = window.row + tap // width * shape.layer.dilation[0]
    column = window.column + tap % width * shape.layer.dilation[1]
    place = ((first_plane + plane) * shape.size[0] + row) * shape.size[1] + column
    return window.base + place, inside(shape, row, column)
