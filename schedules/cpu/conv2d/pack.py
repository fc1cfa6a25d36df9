# SPDX-License-Identifier: Apache-2.0
"""Schedule rule of the layout changes between NCHW and NCHW[x]c: transposes in registers."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.schedule_rule import KernelFacts

from ..core.kernel_builder import KernelBuilder, buffers
from ..core.machine import CPUInfo
from ..core.micro_kernel import loop
from ..core.rule import CPURule
from ..core.tiles import Index, chunk
from .register_transpose import BlockedPixels, Planes, move_pixels

# Elements below which one core does all.
SERIAL_ELEMENTS = 16_384


class Pack(CPURule):
    """Rule for functions that legalization marked as ``pack`` or ``unpack``.

    Takes static images of at least ``x`` pixels with a power of two of lanes (the batch may be
    symbolic); returns None for everything else.
    """

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a marked function for a CPU."""
        func = facts.func
        kind = str(func.attrs.get(attributes.OP, "")) if func.attrs else ""
        if kind not in ("pack", "unpack"):
            return None
        plain, packed = buffers(func) if kind == "pack" else reversed(buffers(func))
        extents = [*plain.shape[1:], *packed.shape[1:]]
        if not all(isinstance(extent, tirx.IntImm) for extent in extents):
            return None
        channels, height, width = (int(extent) for extent in plain.shape[1:])
        lanes = int(packed.shape[4])
        if lanes < 2 or lanes & (lanes - 1) or height * width < lanes:
            return None
        cores = CPUInfo.from_target(facts.target).num_cores
        pieces = cores if channels * height * width >= SERIAL_ELEMENTS else 1
        return _template(func, kind == "pack", channels, height * width, lanes, pieces)


def _template(
    func: tirx.PrimFunc, packing: bool, channels: int, pixels: int, lanes: int, pieces: int
) -> s_tir.Schedule:
    """Distribute blocks of channels, or groups of ``lanes`` pixels, over ``pieces`` cores."""
    builder = KernelBuilder(func)
    groups, full, rest = pixels // lanes, channels // lanes, channels % lanes
    blocks = full + (rest > 0)
    # A core then writes whole planes, and neighbouring layers of small images split channels too:
    # lines that another core has changed are slow to get. Few blocks would leave cores idle.
    split_blocks = blocks % pieces == 0 or blocks >= 4 * pieces
    if not split_blocks:
        pieces = min(pieces, groups)
    with builder.body():
        with T.parallel(0, builder.batch * pieces) as index:
            image, piece = tirx.floordiv(index, pieces), tirx.floormod(index, pieces)
            start: Index = 0
            stop: Index = pixels
            first_block, last_block = chunk(blocks, piece, pieces) if split_blocks else (0, blocks)
            if pieces > 1 and not split_blocks:
                first, last = chunk(groups, piece, pieces)
                start = first * lanes
                # The piece with the last group also takes the pixels after it.
                end: tirx.Expr = last * lanes
                stop = tirx.Select(last == groups, tirx.const(pixels, end.ty.dtype), end)
            both = builder.bits(0), builder.bits(1)
            plain, packed = both if packing else reversed(both)

            def move(block: Index, used: int) -> None:
                planes = Planes(plain, (image * channels + block * lanes) * pixels + start, pixels)
                block_lanes = BlockedPixels(
                    packed, ((image * blocks + block) * pixels + start) * lanes
                )
                source, target = (planes, block_lanes) if packing else (block_lanes, planes)
                move_pixels(source, target, stop - start, lanes, used)

            if full:
                whole = full if isinstance(last_block, int) else tirx.min(last_block, full)
                with loop(first_block, whole) as block:
                    move(block, lanes)
            if rest and isinstance(last_block, int):
                move(full, rest)
            elif rest:
                with T.If(last_block == blocks), T.Then():
                    move(full, rest)
    return builder.schedule()
