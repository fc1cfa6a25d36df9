# SPDX-License-Identifier: Apache-2.0
"""What arithmetic and traffic cost, in clock cycles of one core: a small roofline model."""

from __future__ import annotations

from math import ceil

from schedules.conv2d_workload import ITEM_BYTES, ConvLayer
from schedules.cpu.machine import CPUInfo

# Constants of the model, in bytes and cycles of one core; measure before changing one.
FMA_BITS_PER_CYCLE = 512  # vector bits of multiply-adds started a cycle, of at most two registers
L2_BYTES_PER_CYCLE = 32.0
L3_BYTES_PER_CYCLE = 27.0
MEMORY_BYTES_PER_CYCLE = 8.0  # for one core alone
MEMORY_CORES = 2.0  # cores that saturate the memory; more share it
DENSE_EFFICIENCY = 0.95  # of the peak, with weights and data in L1
DEPTHWISE_EFFICIENCY = 0.8
CACHE_SHARE = 0.75  # of a cache that a kernel's own data may fill


def arithmetic(layer: ConvLayer, size: tuple[int, int], cpu: CPUInfo, dtype: str) -> float:
    """Cycles of multiply-adds for ``size`` output pixels, channels rounded up to whole vectors."""
    lanes = cpu.lanes(dtype)
    per_cycle = lanes * min(2 * cpu.vector_bits, FMA_BITS_PER_CYCLE) / cpu.vector_bits
    channels = ceil(layer.out_channels / lanes) * lanes
    taps = layer.kernel[0] * layer.kernel[1] * layer.in_channels // layer.groups
    efficiency = DEPTHWISE_EFFICIENCY if layer.is_depthwise else DENSE_EFFICIENCY
    return size[0] * size[1] * channels * taps / (per_cycle * efficiency)


def transfer(moved: float, resident: float, cpu: CPUInfo, *, shared: bool = False) -> float:
    """Cycles in which one core moves bytes of a tensor whose size tells where it lives.

    A ``shared`` tensor is wanted whole by every core, any other in parts.
    """
    l2_bytes = cpu.l2_bytes * (1 if shared else cpu.num_cores)
    if resident <= CACHE_SHARE * l2_bytes:
        return moved / L2_BYTES_PER_CYCLE
    if resident <= CACHE_SHARE * cpu.l3_bytes:
        return moved / L3_BYTES_PER_CYCLE
    return moved / (MEMORY_BYTES_PER_CYCLE * min(1.0, MEMORY_CORES / cpu.num_cores))


def direct_cycles(
    layer: ConvLayer, batch: int, out_size: tuple[int, int], cpu: CPUInfo, dtype: str
) -> float:
    """Cycles of a layer as a kernel of its own, split evenly among the cores.

    The traffic of its input and output is not counted.
    """
    weights = layer.weight_elements() * ITEM_BYTES[dtype]
    work = batch * arithmetic(layer, out_size, cpu, dtype)
    return max(work, transfer(weights, weights, cpu, shared=True)) / cpu.num_cores
