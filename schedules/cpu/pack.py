# SPDX-License-Identifier: Apache-2.0
"""Schedule rule of the layout changes between NCHW and NCHW[x]c: transposes in registers.

``x`` channels of ``x`` neighbouring pixels are loaded as vectors, transposed by log2(x) rounds of
two-operand shuffles, and stored as vectors, so that both sides are touched in whole cache lines.
The last pixels of an image are done by a group that overlaps the one before.
"""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from .kernel_builder import KernelBuilder
from .machine import CPUInfo
from .micro_kernel import loop
from .tiles import Index, Span, chunk

# Elements below which one core does all.
SERIAL_ELEMENTS = 16_384


class Pack(ScheduleRule):
    """Rule for functions that legalization marked as ``pack`` or ``unpack``.

    Takes static images of at least ``x`` pixels with a power of two of lanes (the batch may be
    symbolic); returns None for everything else.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule ``func`` for a CPU target."""
        kind = str(func.attrs.get("tvm_fusion.op", "")) if func.attrs else ""
        if target.kind.name != "llvm" or kind not in ("pack", "unpack"):
            return None
        plain, packed = func.params if kind == "pack" else reversed(func.params)
        extents = [*plain.shape[1:], *packed.shape[1:]]
        if not all(isinstance(extent, tirx.IntImm) for extent in extents):
            return None
        channels, height, width = (int(extent) for extent in plain.shape[1:])
        lanes = int(packed.shape[4])
        if lanes < 2 or lanes & (lanes - 1) or height * width < lanes:
            return None
        cores = CPUInfo.from_target(target).num_cores
        pieces = cores if channels * height * width >= SERIAL_ELEMENTS else 1
        return _template(func, kind == "pack", channels, height * width, lanes, pieces)


def _template(
    func: tirx.PrimFunc, packing: bool, channels: int, pixels: int, lanes: int, pieces: int
) -> s_tir.Schedule:
    """Share groups of ``lanes`` pixels out to ``pieces`` cores."""
    builder = KernelBuilder(func)
    groups, full_blocks = pixels // lanes, channels // lanes
    blocks = -(-channels // lanes)
    pieces = min(pieces, groups)
    with builder.body():
        with T.parallel(0, builder.batch * pieces) as index:
            image, piece = tirx.floordiv(index, pieces), tirx.floormod(index, pieces)
            source, target = builder.flat
            plain = (source if packing else target, image * (channels * pixels))
            packed = (target if packing else source, image * (blocks * lanes * pixels))
            move = _Transpose(packing, plain, packed, pixels, lanes)
            if full_blocks:
                with loop(0, full_blocks) as block:
                    _groups(move, block, lanes, chunk(groups, piece, pieces), pixels, lanes)
            if channels % lanes:
                rest = channels % lanes
                _groups(move, full_blocks, rest, chunk(groups, piece, pieces), pixels, lanes)
    return builder.schedule()


def _groups(
    move: _Transpose, block: Index, used: int, span: Span, pixels: int, lanes: int
) -> None:
    """All groups of ``span``; the piece that holds the last group also does the remaining pixels."""
    with loop(*span) as group:
        move(block, used, group * lanes)
    if pixels % lanes:
        stop = span[1]
        if isinstance(stop, int):
            move(block, used, pixels - lanes)
            return
        with T.If(stop == pixels // lanes), T.Then():
            move(block, used, pixels - lanes)


class _Transpose:
    """Moves ``lanes`` channels x ``lanes`` pixels from one layout to the other."""

    def __init__(
        self,
        packing: bool,
        plain: tuple[tirx.Buffer, Index],
        packed: tuple[tirx.Buffer, Index],
        pixels: int,
        lanes: int,
    ):
        self.packing, self.plain, self.packed = packing, plain, packed
        self.pixels, self.lanes = pixels, lanes

    def __call__(self, block: Index, used: int, pixel: Index) -> None:
        """Move the pixels from ``pixel`` on of a block of which ``used`` channels exist."""
        lanes = self.lanes
        plain, plain_start = self.plain
        packed, packed_start = self.packed
        channel_at = [
            plain_start + (block * lanes + lane) * self.pixels + pixel for lane in range(used)
        ]
        pixel_at = [
            packed_start + (block * self.pixels + pixel + lane) * lanes for lane in range(lanes)
        ]
        source, source_at = (plain, channel_at) if self.packing else (packed, pixel_at)
        target, target_at = (packed, pixel_at) if self.packing else (plain, channel_at)
        with T.sblock("transpose"):
            T.reads()
            T.writes()
            rows = T.sblock_alloc_buffer((lanes * lanes,), plain.dtype, scope="local")
            for lane in range(lanes):
                value = (
                    source[T.ramp(source_at[lane], 1, lanes)]
                    if lane < len(source_at)
                    else T.broadcast(tirx.const(0, plain.dtype), lanes)
                )
                T.buffer_store(rows, value, [T.ramp(lane * lanes, 1, lanes)])
            rows = self._rounds(rows)
            for lane, at in enumerate(target_at):
                row = rows[T.ramp(lane * lanes, 1, lanes)]
                T.buffer_store(target, row, [T.ramp(at, 1, lanes)])

    def _rounds(self, rows: tirx.Buffer) -> tirx.Buffer:
        """Transpose ``lanes`` rows: each round swaps the off-diagonal blocks of one size."""
        lanes = self.lanes
        distance = 1
        while distance < lanes:
            after = T.sblock_alloc_buffer((lanes * lanes,), rows.dtype, scope="local")
            for low in range(lanes):
                if low & distance:
                    continue
                high = low + distance
                pair = [rows[T.ramp(row * lanes, 1, lanes)] for row in (low, high)]
                for row, first in ((low, 0), (high, distance)):
                    # Positions without this bit come from `low`, the others from `high`.
                    picked = [
                        (lane + first if not lane & distance else lanes + lane - distance + first)
                        for lane in range(lanes)
                    ]
                    T.buffer_store(
                        after, tirx.Shuffle(pair, picked), [T.ramp(row * lanes, 1, lanes)]
                    )
            rows, distance = after, 2 * distance
        return rows
