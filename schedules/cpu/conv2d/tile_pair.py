# SPDX-License-Identifier: Apache-2.0
"""Schedule rule of two packed convolutions in tile registers (AMX), the second of which is 1x1.

Loop nest::

    parallel image, piece of the rows
      rows of the first layer, by tiles or, of a depthwise one, by vectors
        -> words in a buffer of the task, as the second layer's tiles read them
      the same rows of the second layer, as one long row of pixels

Both layers are the nests of :mod:`.tile_conv2d` and :mod:`.register_tile_nest` on a part of the
rows. Where pieces do not divide these, the last one reaches back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import numpy as np
from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from schedules import attributes
from schedules.workload.conv2d import WORDS, Conv2DKernel

from ..core.kernel_builder import KernelBuilder
from ..core.machine import CPUInfo
from ..core.micro_kernel import FeatureMap, Index, LayerOperands, cancelled
from ..core.tiles import Run
from ..cost.conv2d_knobs import in_vectors
from ..cost.tile_conv2d_knobs import TileConv2DKnobs, TileGeometry
from ..cost.tile_pair_knobs import (
    TilePairKnobs,
    default_pair_knobs,
    rows_of,
    takes_pair,
    tile_pair_cycles,
    tile_pair_space,
)
from .conv2d import PackedRule, PackedTemplate, by_vectors, operands, packed_kernel
from .register_tile_nest import (
    block_runs,
    compute_tile,
    flatten,
    for_each_block_tile,
    is_flat,
    pixel_nest,
)
from .tile_conv2d import bordered, write_tiles


class TilePairTemplate(PackedTemplate[TilePairKnobs]):
    """The nest of the module's docstring."""

    name = "cpu.tile_pair"
    version = 1
    knobs = TilePairKnobs

    def default(self, workload: Conv2DKernel, machine: CPUInfo) -> TilePairKnobs:
        """Return the cheapest setting of the cost model."""
        return default_pair_knobs(workload, machine)

    def settings(self, workload: Conv2DKernel, machine: CPUInfo) -> Iterable[TilePairKnobs]:
        """Yield the settings that the cost model compares."""
        return tile_pair_space(workload, machine)

    def write(
        self, func: tirx.PrimFunc, workload: Conv2DKernel, knobs: TilePairKnobs, target: Target
    ) -> s_tir.Schedule:
        """Write the nest."""
        return tile_pair_template(func, workload, knobs, CPUInfo.from_target(target))

    def cycles(self, workload: Conv2DKernel, knobs: TilePairKnobs, machine: CPUInfo) -> float:
        """Return the cost model's cycles."""
        return tile_pair_cycles(workload, knobs, machine)

    def clear_padding(self, workload: Conv2DKernel, position: int, array: np.ndarray) -> None:
        """Zero the channels that fill up blocks of the data; scales are those of single layers."""
        if position == 0:
            super().clear_padding(workload, position, array)
        start = workload.second_weight
        for kernel, first in zip(workload.apart(), (1, start), strict=True):
            if kernel.is_quantized and position == first + 2:
                super().clear_padding(kernel, 3, array)


TILE_PAIR = TilePairTemplate()


class TilePair(PackedRule):
    """Rule for functions that legalization marked as a pair in tile registers."""

    template: ClassVar[PackedTemplate[TilePairKnobs]] = TILE_PAIR

    def workload(self, func: tirx.PrimFunc, target: Target) -> Conv2DKernel | None:
        """Return the pair; None where tiles cannot compute it."""
        kernel = packed_kernel(func, layers=2)
        return kernel if kernel and takes_pair(kernel, CPUInfo.from_target(target)) else None


def tile_pair_template(
    func: tirx.PrimFunc, kernel: Conv2DKernel, knobs: TilePairKnobs, cpu: CPUInfo
) -> s_tir.Schedule:
    """Write the loop nest of the module's docstring."""
    first, second = kernel.apart()
    if not cpu.emulates_tiles:
        func = func.with_attr(attributes.TILES, kernel.dtype)
    builder, height = KernelBuilder(func), int(second.height or 1)
    pieces = -(-height // knobs.height)
    with builder.body():
        with T.parallel(0, builder.batch * pieces) as index:
            image, piece = tirx.floordiv(index, pieces), tirx.floormod(index, pieces)
            row = piece * knobs.height
            row = tirx.min(row, height - knobs.height) if height % knobs.height else row
            with T.sblock("pair"):
                T.reads()
                T.writes()
                mid = _intermediate(second, knobs.height, row)
                one = replace(operands(builder, first, image), output=mid)
                two = operands(builder, second, image, kernel.second_weight)
                if first.layers[0].is_depthwise:
                    _write_vectors(one, first, knobs, row, cpu)
                else:
                    _write_rows(one, first, knobs.layers[0], row, knobs.height, cpu)
                _write_rows(
                    replace(two, source=mid), second, knobs.layers[1], row, knobs.height, cpu
                )
    return builder.schedule()


def _intermediate(second: Conv2DKernel, height: int, row: Index) -> FeatureMap:
    """Buffer of a task for some rows of what the second layer reads, as words."""
    channels, width = second.layers[0].in_channels, int(second.width or 1)
    lanes = int(second.data_layout[len("NCHW") : -1])
    words, blocks = lanes // WORDS[second.dtype], -(-channels // lanes)
    plane = height * width * words
    return FeatureMap(
        buffer=T.sblock_alloc_buffer((blocks * plane,), "int32"),
        offset=0,
        block_stride=plane,
        row_stride=width * words,
        lanes=words,
        height=int(second.height or 1),
        width=width,
        first_row=row,
        is_local=True,
    )


def _write_vectors(
    ops: LayerOperands, kernel: Conv2DKernel, knobs: TilePairKnobs, row: Index, cpu: CPUInfo
) -> None:
    """Rows of a depthwise layer."""
    ops = by_vectors(ops, in_vectors(kernel, cpu).lanes)
    for block, _ in for_each_block_tile(block_runs(ops, 1), None):

        def body(line: Index, run: Run, column: Index, block: Index = block) -> None:
            compute_tile(ops, block, 1, line, run, column)

        pixel_nest(ops, (row, row + knobs.height), knobs.pixels1, body)


def _write_rows(
    ops: LayerOperands,
    kernel: Conv2DKernel,
    knobs: TileConv2DKnobs,
    row: Index,
    height: int,
    cpu: CPUInfo,
) -> None:
    """Rows of a layer in tiles; lines are counted from the first of them."""
    geometry = TileGeometry.of(rows_of(kernel, height))
    with T.sblock("tiles"):
        T.reads()
        T.writes()
        if is_flat(ops):
            ops = flatten(ops, row, height)
        else:
            ops = bordered(ops, geometry.width, height, (row, row + height - 1))
            start = ops.source.first_row - row * ops.layer.strides[0]
            ops = replace(
                ops,
                source=replace(ops.source, first_row=cancelled(start)),
                output=_from_row(ops.output, row),
                residual=None if ops.residual is None else _from_row(ops.residual, row),
            )
        geometry = replace(geometry, lines=ops.output.height if is_flat(ops) else height)
        write_tiles(ops, kernel, geometry, knobs, cpu)


def _from_row(image: FeatureMap, row: Index) -> FeatureMap:
    """A map whose rows are counted from one of them."""
    return replace(image, first_row=cancelled(image.first_row - row))
