# SPDX-License-Identifier: Apache-2.0
"""Schedule rule of the layer normalisation over the channels of each pixel, in NCHW[x]c."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from schedules import attributes
from schedules.schedule_rule import KernelFacts
from schedules.tir.extents import constant
from schedules.tuning.template import Template

from ..core.kernel_builder import KernelBuilder
from ..core.machine import CPUInfo
from ..core.micro_kernel import accumulators, loop
from ..core.prefetch import prefetch
from ..core.rule import TunableCPURule
from ..core.tiles import Index, Run, chunk, split_evenly
from .register_tile_nest import for_each_pixel_tile

# Elements below which one core does all.
SERIAL_ELEMENTS = 16_384
_FIRST, _REST = 3.0, 1.5  # cycles of a vector in the first pass over a tile, and in the others
_TILE = 60.0  # cycles of shuffles and of the square root for a tile


@dataclass(frozen=True)
class ChannelNormWorkload:
    """A layer normalisation over channels.

    Parameters
    ----------
    batch : int | None
        Images; None where symbolic.
    blocks, pixels, lanes : int
        Blocks of channels, pixels of an image, and channels of a block.
    channels : int
        Number of channels without those that are padding.
    """

    batch: int | None
    blocks: int
    pixels: int
    lanes: int
    channels: int


@dataclass(frozen=True)
class ChannelNormKnobs:
    """Knobs of a layer normalisation over channels.

    Parameters
    ----------
    pixels : int
        Neighbouring pixels of a tile, at most, each with a sum in a register.
    pieces : int
        Pieces of an image, which threads share.
    """

    pixels: int
    pieces: int


class ChannelNormTemplate(Template[ChannelNormWorkload, ChannelNormKnobs, CPUInfo]):
    """Tiles and pieces of :class:`ChannelNorm`."""

    name = "cpu.channel_norm"
    version = 1
    knobs = ChannelNormKnobs

    def read_workload(self, text: str) -> ChannelNormWorkload:
        """Read the JSON of a workload."""
        found = ChannelNormWorkload(**json.loads(text))
        if not all(type(extent) is int and extent > 0 for extent in asdict(found).values()):
            raise ValueError(f"{text:.100} describes no normalisation")
        return found

    def describe(self, workload: ChannelNormWorkload) -> str:
        """Return channels and pixels."""
        return f"layer norm of {workload.channels} channels, {workload.pixels} pixels"

    def default(self, workload: ChannelNormWorkload, machine: CPUInfo) -> ChannelNormKnobs:
        """Return tiles with a quarter of the registers, and a piece for each core."""
        most = max(1, machine.num_vector_registers // 4)
        is_small = workload.blocks * workload.pixels * workload.lanes < SERIAL_ELEMENTS
        tiles = len(split_evenly(workload.pixels, most))
        return ChannelNormKnobs(most, 1 if is_small else min(machine.num_cores, tiles))

    def settings(
        self, workload: ChannelNormWorkload, machine: CPUInfo
    ) -> Iterator[ChannelNormKnobs]:
        """Yield tiles of up to half of the registers, in one piece or some for each core."""
        cores = machine.num_cores
        for most in range(1, min(workload.pixels, machine.num_vector_registers // 2) + 1):
            tiles = len(split_evenly(workload.pixels, most))
            for pieces in sorted({1, cores, 2 * cores, 4 * cores}):
                if pieces <= tiles:
                    yield ChannelNormKnobs(most, pieces)

    def write(
        self,
        func: tirx.PrimFunc,
        workload: ChannelNormWorkload,
        knobs: ChannelNormKnobs,
        target: Target,
    ) -> s_tir.Schedule:
        """Write the nest."""
        return _template(func, workload, knobs)

    def cycles(
        self, workload: ChannelNormWorkload, knobs: ChannelNormKnobs, machine: CPUInfo
    ) -> float:
        """Return the cycles of the busiest thread: three passes over each tile."""
        tiles = split_evenly(workload.pixels, knobs.pixels)
        chain = machine.costs.fma_latency
        passes = sum(max(_FIRST * n, chain) + 2 * max(_REST * n, chain) for n in tiles)
        images = workload.batch or 1
        pieces = images * knobs.pieces
        share = -(-pieces // machine.num_cores) / pieces
        busy = images * (workload.blocks * passes + _TILE * len(tiles)) * share
        return busy + (machine.costs.fork if pieces > 1 else 0.0)


CHANNEL_NORM = ChannelNormTemplate()


class ChannelNorm(TunableCPURule):
    """Rule for functions that legalization marked as ``channel_norm``.

    Vectors run along the lanes of a block, and the moments of a few neighbouring pixels stay in
    registers while the loop runs over all blocks::

        for pixels in T.parallel(...):
            for block in range(6):
                for pixel in T.unroll(8):
                    sums[pixel] += data[block, pixels * 8 + pixel, 0:16]
            ...                                # the lanes of each sum are added by shuffles
            ...                                # squares of the differences from the mean likewise
            for block in range(6):
                for pixel in T.unroll(8):
                    out[block, ...] = (data[block, ...] - mean[pixel]) * scale[pixel] * gamma + beta

    Takes static images with a power of two of lanes (the batch may be symbolic); returns None for
    everything else.
    """

    template = CHANNEL_NORM

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a marked function for a CPU."""
        workload = _workload(facts.func)
        if workload is None or workload.batch is not None:
            return super().schedule(facts)
        default = CHANNEL_NORM.default(workload, self.machine(facts.target))
        return _template(facts.func, workload, default)

    def workload(self, func: tirx.PrimFunc, target: Target) -> ChannelNormWorkload | None:
        """Return the normalisation, if the batch is known."""
        workload = _workload(func)
        return None if workload is None or workload.batch is None else workload


def _workload(func: tirx.PrimFunc) -> ChannelNormWorkload | None:
    """Read what a marked function normalises; None for others."""
    kind = str(func.attrs.get(attributes.OP, "")) if func.attrs else ""
    if kind != "channel_norm":
        return None
    batch, *extents = (constant(extent) for extent in func.params[0].shape)
    if None in extents:
        return None
    blocks, height, width, lanes = (int(extent or 0) for extent in extents)
    if lanes < 2 or lanes & (lanes - 1) or str(func.params[0].dtype) != "float32":
        return None
    channels = int(func.attrs[attributes.CHANNELS])
    return ChannelNormWorkload(batch, blocks, height * width, lanes, channels)


@dataclass(frozen=True)
class _Image:
    """One image: its buffers, where it begins, and its extents."""

    data: tirx.Buffer
    gamma: tirx.Buffer
    beta: tirx.Buffer
    out: tirx.Buffer
    offset: Index
    pixels: int
    lanes: int
    channels: int
    epsilon: float

    def at(self, block: Index, pixel: Index) -> tirx.Expr:
        """The vector of one block of a pixel."""
        return T.ramp(self.offset + (block * self.pixels + pixel) * self.lanes, 1, self.lanes)

    def vector(self, value: float) -> tirx.Expr:
        """A number in all lanes."""
        return T.broadcast(tirx.const(value, "float32"), self.lanes)


def _template(
    func: tirx.PrimFunc, workload: ChannelNormWorkload, knobs: ChannelNormKnobs
) -> s_tir.Schedule:
    """Distribute tiles of pixels over the cores."""
    builder = KernelBuilder(func)
    blocks, pixels, lanes = workload.blocks, workload.pixels, workload.lanes
    sizes = split_evenly(pixels, knobs.pixels)
    larger = sizes.count(sizes[0])
    runs = [Run(0, larger, 0, sizes[0], ())]
    if larger < len(sizes):
        runs.append(Run(larger, len(sizes) - larger, larger * sizes[0], sizes[-1], ()))
    pieces = knobs.pieces
    with builder.body():
        with T.parallel(0, builder.batch * pieces) as index:
            data, gamma, beta, out = builder.flat
            image = _Image(
                data,
                gamma,
                beta,
                out,
                offset=tirx.floordiv(index, pieces) * (blocks * pixels * lanes),
                pixels=pixels,
                lanes=lanes,
                channels=workload.channels,
                epsilon=float(func.attrs[attributes.EPSILON]),
            )
            span = chunk(len(sizes), tirx.floormod(index, pieces), pieces)
            for run, pixel in for_each_pixel_tile(runs, span):
                _tile(image, pixel, run.size)
    return builder.schedule()


def _tile(image: _Image, pixel: Index, size: int) -> None:
    """Normalise ``size`` neighbouring pixels."""
    with T.sblock("tile"):
        T.reads()
        T.writes()
        share = image.vector(1 / image.channels)
        means = _sums(image, pixel, size, lambda value, _: value, ahead=True)
        for mean in means:
            _set(mean, _get(mean) * share)

        def square(value: tirx.Expr, number: int) -> tirx.Expr:
            difference = value - _get(means[number])
            return difference * difference

        scales = _sums(image, pixel, size, square)
        for scale in scales:
            variance = _get(scale) * share + image.vector(image.epsilon)
            _set(scale, image.vector(1.0) / tirx.sqrt(variance))
        with loop(0, -(-image.channels // image.lanes)) as block:
            vector = T.ramp(block * image.lanes, 1, image.lanes)
            for number in range(size):
                at = image.at(block, pixel + number)
                value = (image.data[at] - _get(means[number])) * _get(scales[number])
                T.buffer_store(image.out, value * image.gamma[vector] + image.beta[vector], [at])


def _sums(
    image: _Image,
    pixel: Index,
    size: int,
    term: Callable[[tirx.Expr, int], tirx.Expr],
    ahead: bool = False,
) -> list[tirx.Buffer]:
    """Sum of ``term`` over the channels of each pixel, in all lanes.

    A tile is too short for the hardware prefetcher to predict the next one: prefetch ``ahead``.
    """
    sums = accumulators(size, image.lanes, "float32")
    for total in sums:
        _set(total, image.vector(0.0))

    def add(block: Index, used: int) -> None:
        for number, total in enumerate(sums):
            at = image.at(block, pixel + number)
            if ahead:
                prefetch(image.data, at.base + size * image.lanes)
            value = term(image.data[at], number)
            if used < image.lanes:
                lanes = T.ramp(0, 1, image.lanes)
                value = tirx.Select(
                    lanes < T.broadcast(used, image.lanes), value, image.vector(0.0)
                )
            _set(total, _get(total) + value)

    full, rest = divmod(image.channels, image.lanes)
    if full:
        with loop(0, full) as block:
            add(block, image.lanes)
    if rest:
        add(full, rest)
    for total in sums:
        distance = 1
        while distance < image.lanes:
            value = _get(total)
            order = [lane ^ distance for lane in range(image.lanes)]
            _set(total, value + tirx.Shuffle([value], order))
            distance *= 2
    return sums


def _get(register: tirx.Buffer) -> tirx.Expr:
    return register[T.ramp(0, 1, int(register.shape[0]))]


def _set(register: tirx.Buffer, value: tirx.Expr) -> None:
    T.buffer_store(register, value, [T.ramp(0, 1, int(register.shape[0]))])
