# SPDX-License-Identifier: Apache-2.0
"""Roofline of a direct convolution, the baseline for Winograd's algorithm.

It is not the cost model of :mod:`.nest_cost`, which ranks the knobs of one layer and compares one
kernel with two: there the bandwidth of the memory was fitted along with the traffic of data, and is
lower than what weights that are asked ahead get. Both sides of this comparison, this module and
:mod:`.winograd_knobs`, read weights at the same rate. Else a gain of the algorithm, which has 1.8
times the weights, would be predicted where reading weights is all that takes time, as for 512
channels of 7x7 pixels on 64 cores.
"""

from __future__ import annotations

from math import ceil

from schedules.workload.conv2d import ITEM_BYTES, ConvLayer

from ..core.machine import CPUInfo
from .nest_cost import MEMORY, bandwidth, fits


def direct_cycles(
    layer: ConvLayer,
    batch: int,
    out_size: tuple[int, int],
    cpu: CPUInfo,
    dtype: str,
) -> float:
    """Cycles of a layer as a separate kernel, split evenly among the cores.

    The traffic of its input and output is not counted.
    """
    weights = layer.weight_elements() * ITEM_BYTES[dtype]
    level = fits(weights, cpu)
    rate = weights_rate(cpu.num_cores, cpu) if level == MEMORY else bandwidth(level, cpu)
    work = batch * _arithmetic(layer, out_size, cpu, dtype)
    return max(work, weights / rate) / cpu.num_cores


def weights_rate(cores: int, cpu: CPUInfo) -> float:
    """Bytes of weights a cycle that each of some cores gets from memory when it asks ahead."""
    return cpu.costs.weight_bytes_per_cycle * min(1.0, cpu.costs.weight_cores / cores)


def _arithmetic(layer: ConvLayer, size: tuple[int, int], cpu: CPUInfo, dtype: str) -> float:
    """Cycles of multiply-adds for ``size`` output pixels, channels rounded up to whole vectors."""
    lanes = cpu.lanes(dtype)
    per_cycle = lanes * cpu.fma_per_cycle
    channels = ceil(layer.out_channels / lanes) * lanes
    taps = layer.kernel[0] * layer.kernel[1] * layer.in_channels
    return size[0] * size[1] * channels * taps / (per_cycle * cpu.costs.direct_efficiency)
