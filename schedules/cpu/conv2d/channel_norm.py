# SPDX-License-Identifier: Apache-2.0
"""Schedule rule of the layer normalisation over the channels of each pixel, in NCHW[x]c."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from ..core.kernel_builder import KernelBuilder
from ..core.machine import CPUInfo
from ..core.micro_kernel import accumulators, loop
from ..core.prefetch import prefetch
from ..core.rule import CPURule
from ..core.tiles import Index, Run, chunk, split_evenly
from .register_tile_nest import for_each_pixel_tile

# Elements below which one core does all.
SERIAL_ELEMENTS = 16_384


class ChannelNorm(CPURule):
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

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Schedule ``func`` for a CPU target."""
        kind = str(func.attrs.get("tvm_fusion.op", "")) if func.attrs else ""
        if kind != "channel_norm":
            return None
        data = func.params[0]
        if not all(isinstance(extent, tirx.IntImm) for extent in data.shape[1:]):
            return None
        lanes = int(data.shape[4])
        if lanes < 2 or lanes & (lanes - 1) or str(data.dtype) != "float32":
            return None
        return _template(func, CPUInfo.from_target(target))


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


def _template(func: tirx.PrimFunc, cpu: CPUInfo) -> s_tir.Schedule:
    """Distribute tiles of pixels over the cores."""
    builder = KernelBuilder(func)
    blocks, height, width, lanes = (int(extent) for extent in func.params[0].shape[1:])
    pixels = height * width
    sizes = split_evenly(pixels, max(1, cpu.num_vector_registers // 4))
    larger = sizes.count(sizes[0])
    runs = [Run(0, larger, 0, sizes[0], ())]
    if larger < len(sizes):
        runs.append(Run(larger, len(sizes) - larger, larger * sizes[0], sizes[-1], ()))
    is_small = blocks * pixels * lanes < SERIAL_ELEMENTS
    pieces = 1 if is_small else min(cpu.num_cores, len(sizes))
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
                channels=int(func.attrs["tvm_fusion.channels"]),
                epsilon=float(func.attrs["tvm_fusion.epsilon"]),
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
