# SPDX-License-Identifier: Apache-2.0
"""Schedule rule of a single packed convolution: dense, grouped or depthwise.

Loop nest (``units`` are rows, or pixel tiles where the layer is flat)::

    parallel image, chunk of units, chunk of block tiles
      for group of units that fits L2
        for block tile            # or inside the pixel loops, when the weights fit L1
          for part of the input blocks
            for unit, pixel tile
              micro-kernel, which continues the sums of the previous part
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

import numpy as np
from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from schedules import attributes
from schedules.compute.conv2d import WORDS_RANK
from schedules.errors import OpError
from schedules.tuning.template import Knobs, Template
from schedules.workload.conv2d import (
    WORD_BYTES,
    WORDS,
    Activation,
    ByteAddition,
    ByteRounding,
    Conv2DKernel,
    describe,
    from_json,
    to_json,
)

from ..core.kernel_builder import KernelBuilder, buffers
from ..core.machine import CPUInfo
from ..core.micro_kernel import (
    FeatureMap,
    Index,
    LayerOperands,
    ReducedBlocks,
    loop,
    word_functions,
)
from ..core.rule import TunableCPURule
from ..core.tiles import Run, Span, chunk, split_evenly
from ..cost.conv2d_knobs import (
    Conv2DKnobs,
    conv2d_space,
    in_conv2d_space,
    in_vectors,
    multiplies_words,
)
from ..cost.cost_model import default_conv2d_knobs, estimate
from .register_tile_nest import (
    BlockRuns,
    block_runs,
    compute_tile,
    flatten,
    for_each_block_tile,
    is_flat,
    pixel_nest,
    weight_lines,
    weight_turns,
)
from .words_of_rows import rounded, widened

_SCALE = 3  # Place among the parameters of a convolution of bytes.


class PackedTemplate(Template[Conv2DKernel, Knobs, CPUInfo]):
    """Base of the templates of packed convolutions."""

    def read_workload(self, text: str) -> Conv2DKernel:
        """Read the workload's attribute."""
        return from_json(text)

    def clear_padding(self, workload: Conv2DKernel, position: int, array: np.ndarray) -> None:
        """Zero the channels that fill up blocks, of data, weights and biases.

        Scales of sums of bytes become such that the sums reach about a quarter of a byte's range.
        """
        if workload.is_quantized and position == _SCALE:
            layer = workload.layers[0]
            array *= 2**-7 / (layer.in_channels * prod(layer.kernel)) ** 0.5
            return
        number, is_bias = divmod(position - 1, 2)
        if position == 0:
            if array.ndim == 5:
                _keep(array, (1, 4), workload.layers[0].in_channels)
        elif number < len(workload.layers) and not workload.has_words:
            layer, first = workload.layers[number], int(workload.winograd > 0)
            last = array.ndim - 1
            _keep(array, (0 if is_bias else first, last), layer.out_channels)
            if not is_bias and layer.groups == 1:
                _keep(array, (first + 1, last - 1), layer.in_channels)

    def describe(self, workload: Conv2DKernel) -> str:
        """Return the layers and the size of the image."""
        return describe(workload)


def _keep(array: np.ndarray, axes: tuple[int, int], channels: int) -> None:
    """Zero what lies beyond so many channels, whose blocks and lanes are two axes."""
    shape = [extent if axis in axes else 1 for axis, extent in enumerate(array.shape)]
    array *= (np.arange(prod(shape)) < channels).reshape(shape)


class Conv2DTemplate(PackedTemplate[Conv2DKnobs]):
    """The nest of the module's docstring."""

    name = "cpu.conv2d"
    version = 1
    knobs = Conv2DKnobs

    def default(self, workload: Conv2DKernel, machine: CPUInfo) -> Conv2DKnobs:
        """Return the cheapest setting of the cost model."""
        return default_conv2d_knobs(in_vectors(workload, machine), machine)

    def settings(self, workload: Conv2DKernel, machine: CPUInfo) -> Iterable[Conv2DKnobs]:
        """Yield the settings that the cost model compares."""
        return conv2d_space(in_vectors(workload, machine), machine)

    def contains(self, workload: Conv2DKernel, knobs: Conv2DKnobs, machine: CPUInfo) -> bool:
        """Return whether a setting is one of these."""
        return in_conv2d_space(in_vectors(workload, machine), knobs, machine)

    def write(
        self, func: tirx.PrimFunc, workload: Conv2DKernel, knobs: Conv2DKnobs, target: Target
    ) -> s_tir.Schedule:
        """Write the nest."""
        cpu = CPUInfo.from_target(target)
        lanes = in_vectors(workload, cpu).lanes
        return conv2d_template(func, workload, knobs, multiplies_words(workload, cpu), lanes)

    def cycles(self, workload: Conv2DKernel, knobs: Conv2DKnobs, machine: CPUInfo) -> float:
        """Return the cost model's cycles."""
        return estimate(in_vectors(workload, machine), knobs, machine).cycles

    def features(
        self, workload: Conv2DKernel, knobs: Conv2DKnobs, machine: CPUInfo
    ) -> dict[str, float]:
        """Return the knobs, the terms of the cost model, and products of knobs."""
        terms = estimate(in_vectors(workload, machine), knobs, machine).terms()
        terms["accumulators"] = knobs.pixels * knobs.blocks
        terms["pieces"] = knobs.unit_chunks * knobs.block_chunks
        return super().features(workload, knobs, machine) | terms


CONV2D = Conv2DTemplate()


class PackedRule(TunableCPURule):
    """Base of the rules for functions that legalization marked as packed convolutions."""

    def workload_json(self, workload: Conv2DKernel) -> str:
        """Write the convolutions as legalization does."""
        return to_json(workload)


class Conv2D(PackedRule):
    """Rule for functions that legalization marked as one packed convolution.

    Takes static image sizes (the batch may be symbolic) in ``NCHW[x]c``, or NCHW data with a packed
    output; returns None for everything else.
    """

    template: ClassVar[PackedTemplate[Any]] = CONV2D

    def workload(self, func: tirx.PrimFunc, target: Target) -> Conv2DKernel | None:
        """Return the convolution; None for one of bytes that the CPU does not multiply."""
        kernel, cpu = packed_kernel(func, layers=1), CPUInfo.from_target(target)
        if kernel is not None and kernel.has_mmla:
            fits = kernel.dtype in cpu.mmla and kernel.lanes == cpu.lanes("int32")
            return kernel if fits and not kernel.shifted else None
        if kernel is not None and kernel.is_quantized:
            word = WORDS["int16"] if kernel.limited else kernel.word
            takes_bytes = word == cpu.word_channels and kernel.lanes <= cpu.lanes("int32")
            return kernel if takes_bytes and kernel.shifted == cpu.shifts_bytes else None
        return kernel

    def workload_json(self, workload: Conv2DKernel) -> str:
        """Write the convolution; bounds and scales of bytes, which each layer has, do not count."""
        (layer,) = workload.layers
        in_bytes = workload.is_quantized or workload.data_dtype or workload.out_dtype
        if in_bytes and layer.activation.kind == "round_clip":
            layer = replace(layer, activation=Activation("round_clip", 0.0, 255.0))
            workload = replace(workload, layers=(layer,))
        if workload.addition is not None:
            workload = replace(workload, addition=ByteAddition(1.0, 1.0, 0.0, 1.0, 0.0, 255.0))
        if workload.rounding is not None:
            workload = replace(workload, rounding=ByteRounding(1.0, 0.0, 255.0))
        return super().workload_json(workload)


def packed_kernel(func: tirx.PrimFunc, layers: int, winograd: bool = False) -> Conv2DKernel | None:
    """The workload of a marked function, or None if the packed templates cannot take it."""
    text = func.attrs.get(attributes.WORKLOAD) if func.attrs else None
    if text is None:
        return None
    kernel = from_json(str(text))
    packed = kernel.out_layout != "NCHW" and None not in (kernel.height, kernel.width)
    mine = len(kernel.layers) == layers and bool(kernel.winograd) == winograd
    # Weights of floats in words of a whole block are those of a GPU's tensor cores.
    for_cpu = kernel.has_words or all(len(tensor.shape) < WORDS_RANK for tensor in buffers(func))
    return kernel if packed and mine and for_cpu else None


def operands(
    builder: KernelBuilder, kernel: Conv2DKernel, image: Index, at: int = 1
) -> LayerOperands:
    """The operands of a function with parameters data, weight, bias[, scale, residual], output.

    The weight may be a later parameter, ``at``, as that of the second layer of a pair.
    """
    if kernel.is_quantized:
        return _quantized_operands(builder, kernel, image, at)
    if kernel.sums is not None:
        return _half_operands(builder, kernel, image, at)
    (layer,) = kernel.layers
    weight = builder.buffers[at]
    return LayerOperands(
        layer=layer,
        source=builder.feature_map(0, image),
        output=builder.feature_map(-1, image),
        weight=builder.flat[at],
        bias=builder.flat[at + 1],
        residual=builder.feature_map(-2, image) if kernel.residual else None,
        lanes=int(weight.shape[-1]),
        in_blocks=1 if layer.is_depthwise else int(weight.shape[1]),
        out_blocks=int(weight.shape[0]),
        dtype=kernel.dtype,
        out_dtype=kernel.out_dtype,
        scale=builder.flat[at + 2] if kernel.has_scale else None,
    )


def _quantized_operands(
    builder: KernelBuilder, kernel: Conv2DKernel, image: Index, at: int
) -> LayerOperands:
    """The operands of a function with parameters data, weight, bias, scale[, residual], output.

    What is not multiplied as it is given is copied to words later: bytes that are multiplied in 16
    bits, and floats of an image; the layer of the latter counts channels until then.
    """
    places = (0, -1, -2) if kernel.residual else (0, -1)
    maps = [builder.feature_map(place, image) for place in places]
    if kernel.is_matrix:
        maps = [_row_of_images(each, int(kernel.batch or 1)) for each in maps]
    data, output, *residual = maps
    weight = builder.buffers[at]
    if kernel.word >= WORD_BYTES and kernel.rounding is None:
        data = _in_words(data, builder.words(0), WORD_BYTES)
    return LayerOperands(
        layer=(kernel if kernel.rounding else kernel.in_words()).layers[0],
        source=data,
        output=output,
        weight=builder.words(at),
        bias=builder.flat[at + 1],
        residual=residual[0] if residual else None,
        lanes=int(weight.shape[5]),
        in_blocks=int(weight.shape[1]) - kernel.shifted,
        out_blocks=int(weight.shape[0]),
        dtype="int32",
        scale=builder.flat[at + 2],
        out_dtype=kernel.out_dtype,
        word=WORD_BYTES if kernel.has_mmla else kernel.word,
        mmla=kernel.has_mmla,
        limited=kernel.limited,
        shifted=kernel.shifted,
        addition=kernel.addition,
        rounding=kernel.rounding,
    )


def _half_operands(
    builder: KernelBuilder, kernel: Conv2DKernel, image: Index, at: int
) -> LayerOperands:
    """The operands of a function with parameters data, weight, bias[, residual], output.

    Those of bfloat16 are read and written as bits, dense data and weights as words of two.
    """
    places = (0, -1, -2) if kernel.residual else (0, -1)
    maps = [
        replace(builder.feature_map(place, image), buffer=builder.bits(place)) for place in places
    ]
    if kernel.is_matrix:
        maps = [_row_of_images(each, int(kernel.batch or 1)) for each in maps]
    data, output, *residual = maps
    layer, weight = kernel.in_words().layers[0], builder.buffers[at]
    word = WORDS[kernel.dtype] if kernel.has_mmla else kernel.word
    return LayerOperands(
        layer=layer,
        source=_in_words(data, builder.words(0), word) if kernel.has_words else data,
        output=output,
        weight=builder.words(at) if kernel.has_words else builder.bits(at),
        bias=builder.flat[at + 1],
        residual=residual[0] if residual else None,
        lanes=int(builder.buffers[at + 1].shape[1]),
        in_blocks=1 if layer.is_depthwise else int(weight.shape[1]),
        out_blocks=int(weight.shape[0]),
        dtype=str(kernel.sums),
        out_dtype=kernel.out_dtype,
        word=word,
        pairs=kernel.has_words,
        mmla=kernel.has_mmla,
    )


def _in_words(data: FeatureMap, words: tirx.Buffer, word: int) -> FeatureMap:
    """Channels in words of so many."""
    return replace(
        data,
        buffer=words,
        offset=tirx.floordiv(data.offset, word),
        block_stride=data.block_stride // word,
        row_stride=data.row_stride // word,
        lanes=data.lanes // word,
        pixel_stride=data.step // word,
    )


def _row_of_images(image: FeatureMap, count: int) -> FeatureMap:
    """Images of one pixel as the pixels of one row."""
    step = int(image.buffer.shape[0]) // count
    return replace(image, pixel_stride=step, row_stride=count * step, width=count)


def by_vectors(ops: LayerOperands, lanes: int) -> LayerOperands:
    """A layer whose blocks read only themselves, in blocks of fewer lanes."""
    parts = ops.lanes // lanes
    if parts == 1:
        return ops

    def cut(image: FeatureMap) -> FeatureMap:
        return replace(image, lanes=image.lanes // parts, pixel_stride=image.step, parts=parts)

    return replace(
        ops,
        source=cut(ops.source),
        output=cut(ops.output),
        residual=None if ops.residual is None else cut(ops.residual),
        lanes=lanes,
        out_blocks=parts * ops.out_blocks,
    )


def conv2d_template(
    func: tirx.PrimFunc,
    kernel: Conv2DKernel,
    knobs: Conv2DKnobs,
    dots: bool = False,
    lanes: int | None = None,
) -> s_tir.Schedule:
    """Write the loop nest of the module's docstring.

    ``dots``: pairs of bfloat16 are multiplied by an instruction, not as float32. ``lanes``: those
    of the vectors of blocks that read only themselves, if blocks are wider.

    Raises
    ------
    OpError
        If ``ic_o`` does not divide the input blocks, or comes with ``blocks_inside``.
    """
    builder = KernelBuilder(func)
    in_pairs = kernel.is_quantized and (kernel.word < WORD_BYTES or kernel.limited)
    with builder.body(), word_functions(in_pairs, kernel.lanes * dots, kernel.has_mmla):
        pieces = knobs.unit_chunks * knobs.block_chunks
        images = 1 if kernel.is_matrix else builder.batch
        with T.parallel(0, images * pieces) as index:
            image, piece = tirx.floordiv(index, pieces), tirx.floormod(index, pieces)
            ops = operands(builder, kernel, image)
            ops = replace(ops, dots=dots, pairs=ops.pairs and not dots)
            ops = by_vectors(ops, lanes or ops.lanes)
            if ops.in_blocks % knobs.ic_o or (knobs.blocks_inside and knobs.ic_o > 1):
                raise OpError(
                    f"ic_o is {knobs.ic_o}; expected a divisor of the {ops.in_blocks} input "
                    "blocks, and 1 with blocks_inside"
                )
            if is_flat(ops):
                ops = flatten(ops, 0, ops.output.height)
            runs = block_runs(ops, knobs.blocks)
            tiles = runs.groups * runs.tiles
            units = chunk(
                count_units(ops, knobs.pixels),
                tirx.floordiv(piece, knobs.block_chunks),
                knobs.unit_chunks,
            )
            blocks = chunk(tiles, tirx.floormod(piece, knobs.block_chunks), knobs.block_chunks)
            longest = -(-count_units(ops, knobs.pixels) // knobs.unit_chunks)
            knobs = replace(knobs, unit_group=min(knobs.unit_group, longest))
            if knobs.unit_group == longest:
                _nest(ops, units, runs, blocks, knobs)
            else:
                with T.serial(0, -(-longest // knobs.unit_group)) as group:
                    start = units[0] + group * knobs.unit_group
                    stop = tirx.min(units[1], start + knobs.unit_group)
                    _nest(ops, (start, stop), runs, blocks, knobs)
    return builder.schedule()


def count_units(ops: LayerOperands, pixels: int) -> int:
    """Number of pieces that the pixels can be divided into: tiles of a flat layer, else rows."""
    return len(split_evenly(ops.output.width, pixels)) if is_flat(ops) else ops.output.height


def _nest(
    ops: LayerOperands,
    units: Span,
    runs: BlockRuns,
    blocks: Span,
    knobs: Conv2DKnobs,
) -> None:
    """Both orders of block tiles and pixels over one group of units."""
    flat = is_flat(ops)
    is_wider = ops.pairs or (ops.scale is not None and ops.word != WORD_BYTES)
    if ops.rounding is not None or is_wider or ops.shifted:
        with T.sblock("words"):
            T.reads()
            T.writes()
            if ops.rounding is not None:
                copied = rounded(ops, units, knobs.unit_group)
            else:
                copied = widened(ops, units, knobs)
            _tiles(copied, flat, units, runs, blocks, knobs)
        return
    _tiles(ops, flat, units, runs, blocks, knobs)


def _tiles(
    ops: LayerOperands, flat: bool, units: Span, runs: BlockRuns, blocks: Span, knobs: Conv2DKnobs
) -> None:
    rows, tiles = ((0, 1), units) if flat else (units, None)
    if knobs.blocks_inside:

        def over_blocks(row: Index, run: Run, column: Index) -> None:
            for block, size in for_each_block_tile(runs, blocks):
                compute_tile(ops, block, size, row, run, column)

        pixel_nest(ops, rows, knobs.pixels, over_blocks, tiles)
        return
    count = ops.in_blocks // knobs.ic_o
    turns = weight_turns(ops, knobs.pixels) if knobs.prefetch else 0
    passes = knobs.unit_group if flat else knobs.unit_group * turns
    for block, size in for_each_block_tile(runs, blocks):
        with loop(0, knobs.ic_o) as part:
            reduction = ReducedBlocks(part * count, count, part == 0, part == knobs.ic_o - 1)
            tile = functools.partial(
                compute_tile,
                ops,
                block,
                size,
                reduction=reduction,
                turns=turns,
                lines=weight_lines(ops, size, passes),
            )
            pixel_nest(ops, rows, knobs.pixels, tile, tiles)
