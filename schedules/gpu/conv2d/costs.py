# SPDX-License-Identifier: Apache-2.0
"""Costs of convolutions on a GPU, in cycles: estimates, measured on no device.

They serve only to compare ways of computing the same layers.
"""

from __future__ import annotations

import math

from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..gemm.conv_tiles import (
    ProductExtents,
    choose_tile,
    estimate,
)
from ..gemm.implicit_gemm import LANES, ConvShape
from .depthwise_conv2d import choose_rows, depthwise_cycles
from .fused_tiles import ConvPair, choose_fused_tile, estimate_fused


def separate_cycles(pair: ConvPair, gpu: GPUInfo) -> float:
    """Predicted cycles of two kernels, which write and read the intermediate."""
    elements = pair.first.images * pair.first.out_planes * pair.first.out_pixels * LANES
    moved = 2 * 4 * elements
    rate = COSTS.l2_bytes if moved <= COSTS.l2_capacity else COSTS.memory_bytes
    layers = sum(layer_cycles(shape, gpu) for shape in (pair.first, pair.second))
    return layers + COSTS.launch + moved / (rate * gpu.multiprocessors)


def fused_cycles(pair: ConvPair, gpu: GPUInfo) -> float | None:
    """Predicted cycles of one kernel; None if no tile fits the device."""
    tile = choose_fused_tile(pair, gpu)
    return None if tile is None else estimate_fused(pair, tile, gpu)


def layer_cycles(shape: ConvShape, gpu: GPUInfo) -> float:
    """Predicted cycles of one layer's kernel; infinite if no tile fits the device."""
    if not shape.layer.is_depthwise:
        product = ProductExtents.of(shape)
        tile = choose_tile(product, gpu)
        return math.inf if tile is None else estimate(product, tile, gpu)
    return depthwise_cycles(shape, choose_rows(shape, gpu), gpu)
