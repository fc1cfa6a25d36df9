# SPDX-License-Identifier: Apache-2.0
"""Epilogue of a convolution: bias, residual, activation, the store of 16 bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.compute.conv2d import activate
from schedules.tir.statements import when

from ..core.intrinsics import sync
from .float4 import copy4
from .implicit_gemm import LANES, ConvShape, Index
from .thread_block_tile import GemmBlock


@dataclass(frozen=True)
class LayerEpilogue:
    """Epilogue and output of a layer.

    Parameters
    ----------
    shape : ConvShape
        The convolution.
    bias, output : tirx.Buffer
        Flat views.
    residual : tirx.Buffer | None
        A flat view of the tensor added before the activation.
    """

    shape: ConvShape
    bias: tirx.Buffer
    output: tirx.Buffer
    residual: tirx.Buffer | None

    def load_bias(self, block: Index) -> tirx.Buffer:
        """Registers with the bias of a block of channels, counted over all groups."""
        register = T.alloc_buffer((LANES,), "float32", scope="local")
        copy4(register, 0, self.bias, block)
        return register

    def finish(self, place: Index, bias: tirx.Buffer, value: Callable[[Index], tirx.Expr]) -> None:
        """Store four channels of a pixel.

        Parameters
        ----------
        place : Index
            Their place in the output, in fours; see :meth:`ConvShape.out_place`.
        bias : tirx.Buffer
            Result of :meth:`load_bias`.
        value : Callable
            From a lane to its sum.
        """
        result = T.alloc_buffer((LANES,), "float32", scope="local")
        if self.residual is not None:
            copy4(result, 0, self.residual, place)
        with T.unroll(LANES) as lane:
            total = value(lane) + bias[lane]
            if self.residual is not None:
                total = total + result[lane]
            final = activate(T.bind(total), self.shape.layer.activation, "float32")
            T.buffer_store(result, final, [lane])
        copy4(self.output, place, result, 0)


@dataclass(frozen=True)
class Partial:
    """The sums of one split, on their way to the kernel that adds all of them.

    Parameters
    ----------
    output : tirx.Buffer
        Memory for the sums of all splits, each in the order of the output.
    first : Index
        First of those of this split, in fours.
    """

    output: tirx.Buffer
    first: Index

    def load_bias(self, _: Index) -> None:
        """Load nothing: the bias is added after the splits."""

    def finish(self, place: Index, _: None, value: Callable[[Index], tirx.Expr]) -> None:
        """Store four sums."""
        result = T.alloc_buffer((LANES,), "float32", scope="local")
        with T.unroll(LANES) as lane:
            T.buffer_store(result, value(lane), [lane])
        copy4(self.output, self.first + place, result, 0)


Ending: TypeAlias = "LayerEpilogue | Partial"
Locate = Callable[[Index, Index], "tuple[Index, tirx.Expr | None]"]
"""Function from a block of channels, counted over all groups, and a pixel of the tile to the place
in the output, in fours, and the condition for it to exist; None where it always does."""


def finish_tile(gemm: GemmBlock, sums: tirx.Buffer, epilogue: Ending, locate: Locate) -> None:
    """Emit the code after the main loop: the sums of all parts, then the epilogue."""
    if gemm.tile.parts == 1:
        _finish_registers(gemm, sums, epilogue, locate)
    else:
        _finish_parts(gemm, sums, epilogue, locate)


def _finish_registers(gemm: GemmBlock, sums: tirx.Buffer, epilogue: Ending, locate: Locate) -> None:
    """Finish the sums of each thread."""
    tile, place, shape = gemm.tile, gemm.place, gemm.shape
    for i in range(tile.thread_blocks):
        block = gemm.block + place.block + i * tile.block_threads
        with when(gemm.exists(block)):
            of_all = gemm.group * shape.out_blocks + block
            bias = epilogue.load_bias(of_all)
            for j in range(tile.thread_pixels):
                at, exists = locate(of_all, place.pixel + j * tile.pixel_threads)
                first = (i * tile.thread_pixels + j) * LANES
                with when(exists):
                    epilogue.finish(at, bias, lanes_at(sums, first))


def lanes_at(sums: tirx.Buffer, first: int) -> Callable[[Index], tirx.Expr]:
    """Function from a lane to its element of four, the first of which is at ``first``."""
    return lambda lane: sums[first + lane]


def _finish_parts(gemm: GemmBlock, sums: tirx.Buffer, epilogue: Ending, locate: Locate) -> None:
    """Distribute the tile over the threads again, each of which sums up all parts of its share."""
    tile, place, shape = gemm.tile, gemm.place, gemm.shape
    items = tile.blocks * tile.pixels
    shared = T.alloc_buffer((tile.parts * items * LANES,), "float32", scope="shared")
    sync()  # TVM may give the memory that was just read to the new buffer
    for i in range(tile.thread_blocks):
        for j in range(tile.thread_pixels):
            block = place.block + i * tile.block_threads
            pixel = place.pixel + j * tile.pixel_threads
            at = place.part * items + block * tile.pixels + pixel
            copy4(shared, at, sums, i * tile.thread_pixels + j)
    sync()
    for turn in range(-(-items // tile.threads)):
        item = gemm.thread + turn * tile.threads
        whole = (turn + 1) * tile.threads <= items
        block = gemm.block + item // tile.pixels
        of_all = gemm.group * shape.out_blocks + block
        at, exists = locate(of_all, item % tile.pixels)
        with when(None if whole else item < items, gemm.exists(block), exists):
            total = sum_parts(shared, tile.parts, items, item)
            epilogue.finish(at, epilogue.load_bias(of_all), lanes_at(total, 0))


def sum_parts(memory: tirx.Buffer, parts: int, items: int, item: Index) -> tirx.Buffer:
    """Registers with the sum of four elements over all parts, in the order of the parts."""
    total = T.alloc_buffer((LANES,), "float32", scope="local")
    other = T.alloc_buffer((LANES,), "float32", scope="local")
    copy4(total, 0, memory, item)
    for part in range(1, parts):
        copy4(other, 0, memory, part * items + item)
        with T.unroll(LANES) as lane:
            T.buffer_store(total, total[lane] + other[lane], [lane])
    return total
