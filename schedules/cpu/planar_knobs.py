# SPDX-License-Identifier: Apache-2.0
"""When a pair is computed on planes, and with which knobs.

Measured with AVX2 (Zen 3, two cores) against the nest that packs and unpacks: planes win where the
input's rows hold seven vectors or more, by up to 1.27x at 112 pixels and 32 channels. On shorter
rows the vectors at the border, which need shuffles, and the overlap of the last one cost more than
the changes of layout that planes save. Other vector units have other numbers of registers and other
shuffles, and were not measured.
"""

from __future__ import annotations

from math import gcd

from ..conv2d_workload import ITEM_BYTES, Conv2DKernel
from .machine import CPUInfo
from .planar_nest import PlanarKnobs, takes_planar

WIDE_ROW = 7  # vectors of an input row, from which on planes pay
# By step of columns. More rows of a step gain nothing, or their input pushes out what they become;
# more rows of a tile leave no registers for the weights.
MOST_ROWS = {1: 7, 2: 4}
TILE_ROWS = {1: 4, 2: 3}


def prefers_planar(kernel: Conv2DKernel, cpu: CPUInfo) -> bool:
    """Whether a kernel is computed on planes.

    The weights of layer two are read again for each tile of pixels, so they must fit half the L2.
    """
    if not takes_planar(kernel) or cpu.vector_bits != 256 or not cpu.has_fma:
        return False
    weights = kernel.layers[1].weight_elements() * ITEM_BYTES[kernel.dtype]
    wide = int(kernel.width or 1) >= WIDE_ROW * kernel.lanes
    return wide and kernel.lanes == cpu.lanes(kernel.dtype) and weights <= cpu.l2_bytes / 2


def default_planar_knobs(kernel: Conv2DKernel, cpu: CPUInfo) -> PlanarKnobs:
    """Return the knobs for a kernel that ``takes_planar``.

    Each core gets a piece. Steps have the number of rows that computes fewest rows twice, and of
    equals the largest whose intermediate fits the L2 beside the weights.
    """
    layer1, layer2 = kernel.layers
    height, width = layer1.output_size(int(kernel.height or 1), int(kernel.width or 1))
    h_t = min(height, cpu.num_cores // gcd(kernel.batch or 1, cpu.num_cores))
    item = ITEM_BYTES[kernel.dtype]
    free = cpu.costs.cache_share * cpu.l2_bytes - layer2.weight_elements() * item
    fitting = int(free / (layer1.out_channels * width * item))
    most = max(1, min(height // h_t, MOST_ROWS[layer1.strides[1]], fitting))
    share = -(-height // h_t)
    steps = range(most, min(most, 2) - 1, -1)  # one row uses too little of what it loads
    h = min(steps, key=lambda rows: -(-share // rows) * rows)
    return PlanarKnobs(h_t=h_t, h=h, rows=TILE_ROWS[layer1.strides[1]])
