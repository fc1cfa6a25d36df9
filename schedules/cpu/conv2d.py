# SPDX-License-Identifier: Apache-2.0
"""Schedule rule of a single packed convolution: dense, grouped or depthwise.

Loop nest (``units`` are rows, or pixel tiles where the layer is flat)::

    parallel image, chunk of units, chunk of block tiles
      for group of units that fits L2
        for block tile            # or inside the pixel loops, when the weights fit L1
          for part of the input blocks
            for unit, pixel tile
              micro-kernel, which goes on from the sums of the part before
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from ..conv2d_workload import ITEM_BYTES, Conv2DKernel, ConvLayer, from_json
from ..errors import OpError
from .conv_nest import (
    block_runs,
    compute_tile,
    flatten,
    for_each_block_tile,
    is_flat,
    pixel_nest,
    weight_turns,
)
from .kernel_builder import KernelBuilder
from .machine import CPUInfo
from .micro_kernel import Index, LayerOperands, Reduction, loop
from .register_tile import register_tile
from .tiles import Run, Span, chunk, split_evenly

# Under this many multiply-add vectors a parallel region costs more than it saves.
SERIAL_VECTORS = 20_000


@dataclass(frozen=True)
class Conv2DKnobs:
    """What the template leaves open.

    Parameters
    ----------
    pixels, blocks : int
        The register tile: pixels x channel blocks.
    unit_chunks, block_chunks : int
        Parallel pieces of the units and of the block tiles.
    unit_group : int
        Units whose input stays in L2 while all block tiles pass over it.
    blocks_inside : bool
        Whether the loop over block tiles runs inside the pixel loops.
    ic_o : int
        Parts of the reduction, a divisor of the input blocks: the weights of one part and block
        tile stay in L1 while all pixels pass over them. 1 where ``blocks_inside``.
    prefetch : bool
        Whether the micro-kernel asks for the weights that come next. Of no use to depthwise layers
        and NCHW data.
    """

    pixels: int
    blocks: int
    unit_chunks: int
    block_chunks: int
    unit_group: int
    blocks_inside: bool
    ic_o: int = 1
    prefetch: bool = False


class Conv2D(ScheduleRule):
    """Rule for functions that legalization marked as one packed convolution.

    Takes static image sizes (the batch may be symbolic) in ``NCHW[x]c``, or NCHW data with a packed
    output; returns None for everything else.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule ``func`` for a CPU target with the default knobs."""
        kernel = packed_kernel(func, target, layers=1)
        if kernel is None:
            return None
        return conv2d_template(func, kernel, default_knobs(kernel, CPUInfo.from_target(target)))


def packed_kernel(
    func: tirx.PrimFunc, target: Target, layers: int, winograd: bool = False
) -> Conv2DKernel | None:
    """The workload of a marked function, or None if the packed templates cannot take it."""
    text = func.attrs.get("tvm_fusion.workload") if func.attrs else None
    if target.kind.name != "llvm" or text is None:
        return None
    kernel = from_json(str(text))
    packed = kernel.out_layout != "NCHW" and None not in (kernel.height, kernel.width)
    mine = len(kernel.layers) == layers and bool(kernel.winograd) == winograd
    return kernel if packed and mine else None


def operands(
    builder: KernelBuilder, kernel: Conv2DKernel, image: Index, position: int = 0
) -> LayerOperands:
    """The operands of a function with parameters data, weight, bias[, residual], output."""
    layer = kernel.layers[position]
    weight = builder.buffers[1 + 2 * position]
    return LayerOperands(
        layer=layer,
        source=builder.feature_map(0, image),
        output=builder.feature_map(-1, image),
        weight=builder.flat[1 + 2 * position],
        bias=builder.flat[2 + 2 * position],
        residual=builder.feature_map(-2, image) if kernel.residual else None,
        lanes=int(weight.shape[-1]),
        in_blocks=1 if layer.is_depthwise else int(weight.shape[1]),
        out_blocks=int(weight.shape[0]),
        dtype=kernel.dtype,
    )


def conv2d_template(
    func: tirx.PrimFunc, kernel: Conv2DKernel, knobs: Conv2DKnobs
) -> s_tir.Schedule:
    """Write the loop nest of the module's docstring.

    Raises
    ------
    OpError
        If ``ic_o`` does not divide the input blocks, or comes with ``blocks_inside``.
    """
    builder = KernelBuilder(func)
    with builder.body():
        pieces = knobs.unit_chunks * knobs.block_chunks
        with T.parallel(0, builder.batch * pieces) as index:
            image, piece = tirx.floordiv(index, pieces), tirx.floormod(index, pieces)
            ops = operands(builder, kernel, image)
            if ops.in_blocks % knobs.ic_o or (knobs.blocks_inside and knobs.ic_o > 1):
                raise OpError(
                    f"ic_o is {knobs.ic_o}; expected a divisor of the {ops.in_blocks} input "
                    "blocks, and 1 with blocks_inside"
                )
            if is_flat(ops):
                ops = flatten(ops, 0, ops.output.height)
            runs = block_runs(ops, knobs.blocks)
            tiles = sum(count for _, count, _ in runs)
            units = chunk(
                count_units(ops, knobs.pixels),
                tirx.floordiv(piece, knobs.block_chunks),
                knobs.unit_chunks,
            )
            blocks = chunk(tiles, tirx.floormod(piece, knobs.block_chunks), knobs.block_chunks)
            longest = -(-count_units(ops, knobs.pixels) // knobs.unit_chunks)
            if knobs.unit_group >= longest:
                _nest(ops, units, runs, blocks, knobs)
            else:
                with T.serial(0, -(-longest // knobs.unit_group)) as group:
                    start = units[0] + group * knobs.unit_group
                    stop = tirx.min(units[1], start + knobs.unit_group)
                    _nest(ops, (start, stop), runs, blocks, knobs)
    return builder.schedule()


def count_units(ops: LayerOperands, pixels: int) -> int:
    """How many pieces the pixels can be shared out in: tiles of a flat layer, else rows."""
    return len(split_evenly(ops.output.width, pixels)) if is_flat(ops) else ops.output.height


def _nest(
    ops: LayerOperands,
    units: Span,
    runs: list[tuple[int, int, int]],
    blocks: Span,
    knobs: Conv2DKnobs,
) -> None:
    """Both orders of block tiles and pixels over one group of units."""
    flat = is_flat(ops)
    rows, tiles = ((0, 1), units) if flat else (units, None)
    if knobs.blocks_inside:

        def over_blocks(row: Index, run: Run, column: Index) -> None:
            for block, size in for_each_block_tile(runs, blocks):
                compute_tile(ops, block, size, row, run, column)

        pixel_nest(ops, rows, knobs.pixels, over_blocks, tiles)
        return
    count = ops.in_blocks // knobs.ic_o
    turns = weight_turns(ops, knobs.pixels) if knobs.prefetch else 0
    for block, size in for_each_block_tile(runs, blocks):
        with loop(0, knobs.ic_o) as part:
            reduction = Reduction(part * count, count, part == 0, part == knobs.ic_o - 1)
            tile = functools.partial(
                compute_tile, ops, block, size, reduction=reduction, turns=turns
            )
            pixel_nest(ops, rows, knobs.pixels, tile, tiles)


def default_knobs(kernel: Conv2DKernel, cpu: CPUInfo) -> Conv2DKnobs:
    """Knobs by counting cycles (:mod:`.register_tile`), cache sizes and even shares for all cores.

    All cores share the rows, as in the neighbouring layers, so that each finds its input in its own
    cache; they share the channels where rows do not divide well or the weights outweigh the input.
    """
    layer = kernel.layers[0]
    height, width = int(kernel.height or 1), int(kernel.width or 1)
    out_h, out_w = layer.output_size(height, width)
    out_blocks = -(-layer.out_channels // kernel.lanes)
    flat = layer.is_pointwise and kernel.data_layout != "NCHW"
    row = out_h * out_w if flat else out_w
    pixels, blocks = register_tile(layer, row, kernel.lanes, cpu)
    units = len(split_evenly(row, pixels)) if flat else out_h
    block_tiles = -(-out_blocks // blocks)
    item = ITEM_BYTES[kernel.dtype]
    weight_bytes = layer.weight_elements() * item
    rows_read = min(layer.strides[0], layer.kernel[0])
    unit_bytes = layer.in_channels * item * (pixels if flat else width * rows_read)
    inside = not layer.is_depthwise and weight_bytes <= cpu.l1d_bytes // 2
    chunks = _share_out(kernel, cpu, units, block_tiles, weight_bytes > units * unit_bytes)
    share = _Share(-(-units // chunks[0]), -(-block_tiles // chunks[1]))
    packed = not layer.is_depthwise and kernel.data_layout != "NCHW"
    return Conv2DKnobs(
        pixels=pixels,
        blocks=blocks,
        unit_chunks=chunks[0],
        block_chunks=chunks[1],
        unit_group=_unit_group(layer, share, unit_bytes, weight_bytes // chunks[1], cpu),
        blocks_inside=inside,
        ic_o=_reduction_parts(kernel, blocks, cpu) if packed and not inside else 1,
        prefetch=packed and not inside,
    )


@dataclass(frozen=True)
class _Share:
    """What one core gets."""

    units: int
    block_tiles: int


def _unit_group(
    layer: ConvLayer, share: _Share, unit_bytes: int, weight_bytes: int, cpu: CPUInfo
) -> int:
    """Units in a group: all, or what half of the L2 holds, whichever moves fewer bytes into it.

    Several groups read the weights several times; one that the L2 does not hold is read again for
    every block tile.
    """
    if layer.is_depthwise:
        return share.units
    group = max(1, cpu.l2_bytes // 2 // unit_bytes)
    data = share.units * unit_bytes
    passes = 1 if data <= cpu.l2_bytes else share.block_tiles
    whole = passes * data + weight_bytes
    parts = data + -(-share.units // group) * weight_bytes
    return share.units if whole <= parts else group


def _reduction_parts(kernel: Conv2DKernel, blocks: int, cpu: CPUInfo) -> int:
    """Parts of the reduction: several where the weights of a block tile crowd the L2.

    Two block tiles' weights, of this one and of the next, should share it with the data.
    """
    layer = kernel.layers[0]
    in_blocks = -(-(layer.in_channels // layer.groups) // kernel.lanes)
    block_bytes = math.prod(layer.kernel) * blocks * kernel.lanes**2 * ITEM_BYTES[kernel.dtype]
    if in_blocks * block_bytes <= cpu.l2_bytes // 4:
        return 1
    parts = (p for p in range(1, in_blocks + 1) if in_blocks % p == 0)
    return next((p for p in parts if in_blocks // p * block_bytes <= cpu.l1d_bytes), in_blocks)


def _share_out(
    kernel: Conv2DKernel, cpu: CPUInfo, units: int, block_tiles: int, heavy_weights: bool
) -> tuple[int, int]:
    """Parallel chunks of units and of block tiles."""
    cores = cpu.num_cores
    work = kernel.layers[0].flops(int(kernel.height or 1), int(kernel.width or 1)) // 2
    batch = kernel.batch or 1
    if cores == 1 or batch % cores == 0 or work * batch < SERIAL_VECTORS * kernel.lanes:
        return 1, 1

    def idle(pieces: int) -> float:
        return -(-pieces // cores) * cores / pieces

    by_units, by_blocks = idle(units), idle(block_tiles)
    if by_blocks < by_units * (1.0 if heavy_weights else 0.95):
        return 1, min(cores, block_tiles)
    return min(cores, units), 1
