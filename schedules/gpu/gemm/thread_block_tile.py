# SPDX-License-Identifier: Apache-2.0
"""Part of a matrix product that a block computes, and the thread's part of that.

Lanes of a warp hold 8 neighbouring pixels and up to 4 blocks of channels, so that reads of 8 lanes
from shared memory are 128 bytes in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from .conv_tiles import ConvTile
from .implicit_gemm import LANES, ConvShape, Index


@dataclass(frozen=True)
class ThreadPlace:
    """Part of the block's tile that a thread computes.

    Parameters
    ----------
    part : tirx.Expr
        Its share of each step's quads.
    block, pixel : tirx.Expr
        Its first block of channels and pixel, in the tile.
    """

    part: tirx.Expr
    block: tirx.Expr
    pixel: tirx.Expr

    @classmethod
    def of(cls, tile: ConvTile, thread: tirx.Expr) -> ThreadPlace:
        """The place of a thread; warps are 8 pixels wide and 4 blocks high where the tile is."""
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
    """Product of one block of threads.

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
        Its share of the steps.
    covered : int | None
        Quads of all steps together, if more than the splits' steps need.
    """

    shape: ConvShape
    tile: ConvTile
    thread: tirx.Expr
    group: Index
    block: Index
    weight: tirx.Buffer
    split: Index = 0
    covered: int | None = None

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
        """Number of rows of weights; further ones are zeros. None if no step reads past them."""
        covered = self.covered or self.steps * self.tile.splits * self.tile.quads
        return None if covered * LANES == self.shape.rows else self.shape.rows

    def exists(self, block: Index) -> tirx.Expr | None:
        """Condition for the group to have a block; None where it always holds."""
        whole = self.shape.out_blocks % self.tile.blocks == 0
        return None if whole else block < self.shape.out_blocks
