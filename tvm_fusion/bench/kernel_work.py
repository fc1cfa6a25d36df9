# SPDX-License-Identifier: Apache-2.0
"""Work of a kernel beyond FLOPs and sizes, and likely reasons why it falls short of the limit."""

from __future__ import annotations

import math
from typing import NamedTuple

import tvm
import tvm_ffi
from tvm import ir, tirx

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.tiles import split_evenly
from schedules.cpu.cost.register_tile import register_tiles, row_cycles
from schedules.tir.expression_walk import nodes
from schedules.tir.vector_math import is_expensive
from schedules.workload.conv2d import Conv2DKernel, ConvLayer

from .machine_limits import MachineLimits


class KernelWork(NamedTuple):
    """Work of one call."""

    functions: int  # Elements for which an elementary function such as ``exp`` is computed.
    gathered_bytes: dict[int, int]
    """Bytes that are read of those parameters whose elements are chosen by data, by position."""


def count_work(func: tirx.PrimFunc) -> KernelWork:
    """Count the work of a function that has no schedule yet; symbolic loops count once."""
    functions = 0
    gathered: dict[str, int] = {}

    def count(body: tirx.Stmt, times: int) -> None:
        def inside(loop: tirx.For) -> tvm_ffi.WalkResult:
            extent = loop.extent.value if isinstance(loop.extent, tirx.IntImm) else 1
            count(loop.body, times * int(extent))
            return tvm_ffi.WalkResult.SKIP

        def store(node: tirx.BufferStore) -> tvm_ffi.WalkResult:
            nonlocal functions
            functions += times * is_expensive(node.value)
            for load in nodes(node.value, ir.TensorLoad):
                if any(nodes(index, ir.TensorLoad) for index in load.indices):
                    name = load.source.name
                    size = times * tvm.DataType(str(load.source.dtype)).bits // 8
                    gathered[name] = gathered.get(name, 0) + size
            return tvm_ffi.WalkResult.SKIP

        callbacks = [(tirx.For, inside), (tirx.BufferStore, store)]
        tvm_ffi.structural_walk(body, callbacks, order="pre")

    count(func.body, 1)
    found = {}
    for position, param in enumerate(func.params):
        name = getattr(param, "name", "")
        if name in gathered:
            found[position] = min(parameter_bytes(param), gathered[name])
    return KernelWork(functions, found)


def parameter_bytes(param: tirx.Var) -> int:
    """Bytes of a tensor of static shape."""
    bits = tvm.DataType(str(param.dtype)).bits
    return math.prod(int(extent) for extent in param.shape) * bits // 8


NEAR = 0.85
"""Share of the limit above which no reason is given."""

SHORT_SECONDS = 20e-6
"""Seconds below which waking the threads and waiting for the last one dominate."""

MOST_USE = 0.95
FEW_STEPS = 256


def reason(
    kernel: Conv2DKernel | None,
    moved: int,
    seconds: float,
    fraction: float,
    limits: MachineLimits,
    cpu: CPUInfo,
) -> str:
    """Name the likely reason in a few words; an empty text near the limit.

    ``kernel``: the convolutions, if the kernel computes some. ``moved``: bytes of all tensors that
    it reads and writes. ``seconds`` and ``fraction``: its time, and the share of the limit that it
    reaches. ``limits``: the roofs. ``cpu``: target of the code.
    """
    if fraction >= NEAR:
        return ""
    memory = limits.levels[-1].bandwidth
    if moved / seconds >= memory / 2:
        return f"data moves at {moved / seconds / memory:.0%} of memory bandwidth"
    if seconds < SHORT_SECONDS:
        return "short: threads start and wait"
    if kernel is None:
        return "unknown"
    if kernel.winograd:
        return "transforms before and after the products"
    used = useful_share(kernel, cpu)
    if used < MOST_USE:
        return f"{used:.0%} of the multiply-adds are useful: tails of tiles, idle lanes and cores"
    if kernel.layers[0].is_depthwise:
        return "depthwise: as many loads as multiply-adds"
    steps = min(_steps(layer) for layer in kernel.layers)
    if steps < FEW_STEPS:
        return f"sums of {steps} steps: tiles begin and end often"
    return "weights come from beyond the L2"


def useful_share(kernel: Conv2DKernel, cpu: CPUInfo) -> float:
    """Useful share of the time of the multiply-adds, in default tiles on all cores.

    Lost are the lanes of a last block that is not full, the registers of smaller tiles at the end
    of a row or of the channels, and the cores that wait for the one with the most rows.
    """
    height, width = int(kernel.height or 1), int(kernel.width or 1)
    work = time = 0.0
    for layer in kernel.layers:
        flops = layer.flops(height, width)
        height, width = layer.output_size(height, width)
        work += flops
        time += flops / _layer_share(layer, kernel, (height, width), cpu)
    return work / time


def _layer_share(
    layer: ConvLayer, kernel: Conv2DKernel, size: tuple[int, int], cpu: CPUInfo
) -> float:
    lanes = kernel.lanes
    own = layer.out_channels // layer.groups if layer.fills_blocks(lanes) else lanes
    blocks = -(-own // lanes)
    row = size[0] * size[1] if layer.is_pointwise else size[1]
    pixels, vectors = register_tiles(layer, row, lanes, cpu)[0]
    tiles = 1.0
    if not layer.group_lanes(lanes):
        tiles = row * blocks / cpu.fma_per_cycle / row_cycles(row, blocks, pixels, vectors, cpu)
    units = len(split_evenly(row, pixels)) if layer.is_pointwise else size[0]
    units *= kernel.batch or 1
    channels = -(-layer.out_channels // lanes)
    cores = max(_even(units, cpu.num_cores), _even(channels, cpu.num_cores))
    return layer.out_channels / (channels * lanes) * tiles * cores


def _even(pieces: int, cores: int) -> float:
    return pieces / (-(-pieces // cores) * cores)


def _steps(layer: ConvLayer) -> int:
    return layer.in_channels // layer.groups * layer.kernel[0] * layer.kernel[1]
