# SPDX-License-Identifier: Apache-2.0
"""Roofline of a direct convolution, the baseline for Winograd's algorithm.

It is not the cost model of :mod:`schedules.cpu.cost.nest_cost`, which ranks the knobs of one layer
and compares one kernel with two: that one reads weights from memory at 3.8 bytes a cycle, fitted
along with the traffic of data; :mod:`schedules.cpu.cost.winograd_knobs` at 6.5. Compared directly,
they would predict a gain of the algorithm, which has 1.8 times the weights, where reading weights
is all that takes time, as for 512 channels of 7x7 pixels on 64 cores. With one or two cores both
choose the same for the five networks and the 39 pairs of ``examples``.
"""

from __future__ import annotations

from math import ceil

from schedules.cpu.core.machine import CPUInfo
from schedules.workload.conv2d import ITEM_BYTES, ConvLayer

# Constants of the model, in bytes and cycles of one core; measure before changing one.
L2_BYTES_PER_CYCLE = 32.0
L3_BYTES_PER_CYCLE = 27.0
MEMORY_BYTES_PER_CYCLE = 8.0  # for one core alone
MEMORY_CORES = 2.0  # cores that saturate the memory; more share it
DENSE_EFFICIENCY = 0.95  # of the peak, with weights and data in L1
CACHE_SHARE = 0.75  # of a cache that a kernel's own data may fill


def _arithmetic(layer: ConvLayer, size: tuple[int, int], cpu: CPUInfo, dtype: str) -> float:
    """Cycles of multiply-adds for ``size`` output pixels, channels rounded up to whole vectors."""
    lanes = cpu.lanes(dtype)
    per_cycle = lanes * cpu.fma_per_cycle
    channels = ceil(layer.out_channels / lanes) * lanes
    taps = layer.kernel[0] * layer.kernel[1] * layer.in_channels
    return size[0] * size[1] * channels * taps / (per_cycle * DENSE_EFFICIENCY)


def _read_weights(weights: float, cpu: CPUInfo) -> float:
    """Cycles in which each core reads all weights, from the cache level that they fit."""
    if weights <= CACHE_SHARE * cpu.l2_bytes:
        return weights / L2_BYTES_PER_CYCLE
    if weights <= CACHE_SHARE * cpu.l3_bytes:
        return weights / L3_BYTES_PER_CYCLE
    return weights / (MEMORY_BYTES_PER_CYCLE * min(1.0, MEMORY_CORES / cpu.num_cores))


def direct_cycles(
    layer: ConvLayer, batch: int, out_size: tuple[int, int], cpu: CPUInfo, dtype: str
) -> float:
    """Cycles of a layer as a separate kernel, split evenly among the cores.

    The traffic of its input and output is not counted.
    """
    weights = layer.weight_elements() * ITEM_BYTES[dtype]
    work = batch * _arithmetic(layer, out_size, cpu, dtype)
    return max(work, _read_weights(weights, cpu)) / cpu.num_cores
