# SPDX-License-Identifier: Apache-2.0
"""The main loop of a convolution as a product of matrices, for one block of threads.

::

    fetch step 0 into registers; keep it in shared memory; barrier
    for step:
        fetch step + 1 into registers          # 16 bytes each; zeros in the padding
        for each quad of the step:             # from shared memory, 16 bytes each
            accumulators += 4 weights x blocks, times pixels x 4 data
        keep step + 1 in the other half; barrier

Both operands lie in shared memory as in global memory, in vectors of four: the weights as
``[block][row][4 outputs]``, the data as ``[quad][pixel][4 inputs]``. Lanes of a warp hold 8
neighbouring pixels and up to 4 blocks, so that reads of 8 lanes are 128 bytes in a row; one vector
of padding behind the weights of a block keeps blocks out of each other's banks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..branch import when
from .conv_memory import at_once, copy4, zero4
from .conv_shape import LANES, ConvShape, Index, Window, inside
from .conv_tiles import ConvTile
from .device_ops import sync


@dataclass(frozen=True)
class ThreadPlace:
    """Which part of the block's tile a thread computes.

    Parameters
    ----------
    part : tirx.Expr
        Which share of each step's quads it sums over.
    block, pixel : tirx.Expr
        Its first block of channels and pixel, in the tile.
    """

    part: tirx.Expr
    block: tirx.Expr
    pixel: tirx.Expr

    @classmethod
    def of(cls, tile: ConvTile, thread: tirx.Expr) -> ThreadPlace:
        """Warps are 8 pixels wide and 4 blocks high where the tile has that many."""
        across, down = tile.pixel_threads, tile.block_threads
        part, rest = thread // (across * down), thread % (across * down)
        if across % 8 or down % 4:
            return cls(part, rest // across, rest % across)
        warp, lane = rest // 32, rest % 32
        return cls(
            part,
            warp // (across // 8) * 4 + lane // 8,
            warp % (across // 8) * 8 + lane % 8,
        )


@dataclass(frozen=True)
class GemmBlock:
    """What one block of threads multiplies.

    Parameters
    ----------
    shape : ConvShape
        The convolution.
    tile : ConvTile
        Extents of the block's part.
    thread : tirx.Expr
        Number of the thread in the block.
    group, block : tirx.Expr
        The group of channels, and the first block of channels in it.
    weight : tirx.Buffer
        A flat view.
    split : tirx.Expr
        Which share of the steps it has.
    """

    shape: ConvShape
    tile: ConvTile
    thread: tirx.Expr
    group: Index
    block: Index
    weight: tirx.Buffer
    split: Index = 0

    @property
    def place(self) -> ThreadPlace:
        """The part of the tile that the thread computes."""
        return ThreadPlace.of(self.tile, self.thread)

    @property
    def steps(self) -> int:
        """Steps of each split; the last ones of all may be empty."""
        return -(-self.shape.quads // (self.tile.quads * self.tile.splits))

    @property
    def rows(self) -> int | None:
        """Rows of weights beyond which there are zeros; None if no step reaches beyond them."""
        reached = self.steps * self.tile.splits * self.tile.quads * LANES
        return None if reached == self.shape.rows else self.shape.rows

    def exists(self, block: Index) -> tirx.Expr | None:
        """Whether the group has a block; None where it has all that the tiles reach."""
        whole = self.shape.out_blocks % self.tile.blocks == 0
        return None if whole else block < self.shape.out_blocks


class WeightStage:
    """The weights of one step on their way from global to shared memory."""

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
        """Store what was loaded into a half of the shared memory."""
        for turn in range(self.turns):
            item = self.gemm.thread + turn * self.gemm.tile.threads
            with when(self._has(item, turn)):
                at = item // self.row_count * self.stride + item % self.row_count
                copy4(self.shared[half], at, self.registers, turn)

    def _has(self, item: tirx.Expr, turn: int) -> tirx.Expr | None:
        whole = (turn + 1) * self.gemm.tile.threads <= self.items
        return None if whole else item < self.items


class DataStage:
    """The data of one step on their way from global to shared memory.

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
        """Load a step; what lies in the padding is zero."""
        tile = self.gemm.tile
        for turn, window in enumerate(self.windows):
            if tile.pixels % tile.threads == 0:  # the same for all threads
                quad = step * tile.quads + turn * tile.threads // tile.pixels
            else:
                item = self.gemm.thread + turn * tile.threads
                quad = T.bind(step * tile.quads + item // tile.pixels)
            if self.gemm.shape.plain_data:
                self._fetch_plain(turn, quad, window)
            else:
                self._fetch_packed(turn, quad, window)

    def _fetch_packed(self, turn: int, quad: Index, window: Window) -> None:
        shape = self.gemm.shape
        first = self.gemm.group * shape.in_blocks
        place, conditions = tap_place(shape, window, quad, first)
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
            if self.gemm.rows is not None:
                conditions.append(row < self.gemm.rows)
            with when(at_once(conditions)):
                T.buffer_store(self.registers, self.data[place], [turn * LANES + lane])

    def keep(self, half: int) -> None:
        """Store what was loaded into a half of the shared memory."""
        for turn in range(self.turns):
            item = self.gemm.thread + turn * self.gemm.tile.threads
            whole = (turn + 1) * self.gemm.tile.threads <= self.items
            with when(None if whole else item < self.items):
                copy4(self.shared[half], item, self.registers, turn)


def _halves(size: int) -> list[tirx.Buffer]:
    """Shared memory for two steps; two buffers, which TVM needs to see that they are apart."""
    return [T.alloc_buffer((size,), "float32", scope="shared") for _ in range(2)]


def tap_place(
    shape: ConvShape, window: Window, number: Index, first_plane: Index
) -> tuple[tirx.Expr, list[tirx.Expr]]:
    """Where a window has a plane at a tap, in pixels of planes, and what must hold to read it.

    Parameters
    ----------
    shape : ConvShape
        The convolution.
    window : Window
        The window.
    number : Index
        Plane and tap as one number, in the order plane, kernel row, kernel column.
    first_plane : Index
        What is added to the plane.
    """
    width = shape.layer.kernel[1]
    plane, tap = number // shape.taps, number % shape.taps
    row = window.row + tap // width * shape.layer.dilation[0]
    column = window.column + tap % width * shape.layer.dilation[1]
    place = ((first_plane + plane) * shape.size[0] + row) * shape.size[1] + column
    return window.base + place, inside(shape, row, column)


def clear_sums(tile: ConvTile) -> tirx.Buffer:
    """Registers ``[block][pixel][4]`` of zeros, for a thread's share of the tile."""
    count = tile.thread_blocks * tile.thread_pixels
    sums = T.alloc_buffer((count * LANES,), "float32", scope="local")
    for number in range(count):
        zero4(sums, number)
    return sums


def multiply(gemm: GemmBlock, weights: WeightStage, data: DataStage) -> tirx.Buffer:
    """Emit the whole main loop.

    Returns
    -------
    tirx.Buffer
        Registers ``[block][pixel][4]`` of the thread with its part of the sums.
    """
    tile, sums = gemm.tile, clear_sums(gemm.tile)
    pixels = [gemm.place.pixel + j * tile.pixel_threads for j in range(tile.thread_pixels)]

    def add(_: Index, half: int) -> None:
        def read(quad: Index) -> list[tuple[tirx.Buffer, Index]]:
            return [(data.shared[half], quad * tile.pixels + pixel) for pixel in pixels]

        add_step(gemm, sums, weights, half, read)

    run_steps([weights, data], gemm.split * gemm.steps, gemm.steps, add)
    return sums


def run_steps(
    stages: Sequence[WeightStage | DataStage],
    first: Index,
    steps: int,
    add: Callable[[Index, int], None],
    fetched: bool = False,
) -> None:
    """Emit the loop over steps: each is on its way while the one before is added.

    Parameters
    ----------
    stages : Sequence
        What each step needs.
    first : Index
        Number of the first step.
    steps : int
        How many there are.
    add : Callable
        Adds a step, counted from the first, that lies in a half of the shared memory.
    fetched : bool
        Whether the first step is in the stages' registers.
    """

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
    if steps > 2:
        with T.serial(0, (steps - 1) // 2) as pair:
            advance(pair * 2, 0)
            advance(pair * 2 + 1, 1)
    if steps % 2 == 0:
        advance(steps - 2, 0)
    add(steps - 1, (steps - 1) % 2)


def add_step(
    gemm: GemmBlock,
    sums: tirx.Buffer,
    weights: WeightStage,
    half: int,
    read: Callable[[Index], list[tuple[tirx.Buffer, Index]]],
) -> None:
    """Add the thread's quads of a step to its sums.

    Parameters
    ----------
    gemm : GemmBlock
        The block.
    sums : tirx.Buffer
        Registers.
    weights : WeightStage
        The weights.
    half : int
        Where the step's weights are.
    read : Callable
        From a quad of the step to where each pixel of the thread has its four inputs.
    """
    tile, place = gemm.tile, gemm.place
    inputs = T.alloc_buffer((tile.thread_pixels * LANES,), "float32", scope="local")
    outputs = T.alloc_buffer((tile.thread_blocks * LANES,), "float32", scope="local")
    share = tile.quads // tile.parts
    with T.unroll(share) as number:
        quad = place.part * share + number
        for j, (source, at) in enumerate(read(quad)):
            copy4(inputs, j, source, at)
        with T.unroll(LANES) as k:
            with T.unroll(tile.thread_blocks) as i:
                block = place.block + i * tile.block_threads
                at = block * weights.stride + quad * LANES + k
                copy4(outputs, i, weights.shared[half], at)
            _add_products(tile, sums, outputs, inputs, k)


def _add_products(
    tile: ConvTile, sums: tirx.Buffer, outputs: tirx.Buffer, inputs: tirx.Buffer, k: Index
) -> None:
    """Multiply one input lane of all pixels with all blocks."""
    with T.unroll(tile.thread_blocks) as i:
        with T.unroll(tile.thread_pixels) as j:
            with T.unroll(LANES) as lane:
                at = (i * tile.thread_pixels + j) * LANES + lane
                product = outputs[i * LANES + lane] * inputs[j * LANES + k]
                T.buffer_store(sums, sums[at] + product, [at])
