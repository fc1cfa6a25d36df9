# SPDX-License-Identifier: Apache-2.0
"""Choice of pairs that are computed on planes, and their knobs.

Measured against the nest that packs and unpacks, on two cores:

AVX2, Zen 3
    Planes win where the input's rows hold seven vectors or more, by up to 1.27x at 112 pixels and
    32 channels. On shorter rows the vectors at the border, which need shuffles, and the overlap of
    the last one cost more than the changes of layout that planes save.
AVX-512, Zen 4
    With the input in the cache, planes win from 28 pixels on: by 1.2x to 1.5x at 112 pixels, 1.05x
    to 1.4x at 56, 1.02x to 1.1x at 28; most where the output has few channels, so that packing the
    input dominates. Inputs of 5 MB that come from memory take 1.2 times as long as packed ones,
    unless layer two prefetches the next step's rows: 0.7 (one noisy run). Planes lose the rest of a
    step's last vector, so steps have the number of rows that leaves least of it: 14 rows of 28
    pixels (24.5 vectors) take 0.9 of the time of 4 rows (7 vectors, but four steps for 14 rows).
    Inputs of 14 pixels lose 4 % or more. Register tiles of 6 x 4, 8 x 3 and 4 x 3 differ by some
    percent; the best one depends on the pair.

Other vector units have other numbers of registers and other shuffles, and were not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from schedules.workload.conv2d import ITEM_BYTES, Conv2DKernel

from ...core.machine import CPUInfo
from .planar_nest import PlanarKnobs, takes_planar, vector_instructions


@dataclass(frozen=True)
class _Unit:
    """Measurements of a vector unit.

    Parameters
    ----------
    wide_row : int
        Least pixels of an input row for which planes pay off.
    most_rows : dict[int, int]
        Most rows of a step, by its columns: more gain nothing, or their input evicts their output.
    longest : int
        Most rows of a step where more rows leave less of its last vector unused; 0 to ignore that.
    tile_rows : dict[int, int]
        Rows of a depthwise tile, by columns of a step; more leave no registers for the weights.
    outputs, vectors : int
        Register tile of layer two.
    ahead : bool
        Whether layer two prefetches what layer one will read in the next step.
    instruction_bytes : float
        Most bytes of machine code for each of :func:`.planar_nest.vector_instructions`.
    """

    wide_row: int
    most_rows: dict[int, int]
    longest: int
    tile_rows: dict[int, int]
    outputs: int
    vectors: int
    ahead: bool
    instruction_bytes: float


_UNITS = {
    256: _Unit(56, {1: 7, 2: 4}, 0, {1: 4, 2: 3}, 4, 3, False, 11.4),
    512: _Unit(28, {1: 7, 2: 4}, 14, {1: 7, 2: 7}, 6, 4, True, 8.2),
}
MOST_CODE_BYTES = 32 * 1024
"""Bound on the code of a kernel: every step runs through all of it, which the L1 instruction cache
of most x86 cores then holds. LLVM and TVM take about two seconds for as much."""
_MOST_ROWS = 28  # Rows of a step.
_TILE_ROWS = (1, 2, 3, 4, 5, 7)
_SHORTEST = 8  # lanes of a vector of layer one


def can_be_planar(kernel: Conv2DKernel, cpu: CPUInfo) -> bool:
    """Return whether there are settings for a kernel: its vectors are those of a known unit."""
    known = cpu.vector_bits in _UNITS and cpu.has_fma and kernel.lanes == cpu.lanes(kernel.dtype)
    return known and takes_planar(kernel, _row_lanes(kernel))


def planar_space(kernel: Conv2DKernel, cpu: CPUInfo) -> Iterator[PlanarKnobs]:
    """All settings of a kernel that :func:`can_be_planar`: rows of a step, register tiles.

    Tiles of layer two need a register for each sum and each vector, and one for a weight. Code that
    is too large is left out.
    """
    default = default_planar_knobs(kernel, cpu)
    height, width = _out_size(kernel)
    share = -(-height // default.h_t)
    steps = {-(-share // count) for count in range(1, share + 1)}
    tiles = [
        (outputs, vectors)
        for outputs, vectors in product((2, 4, 6, 8, 12), (1, 2, 3, 4, 6))
        if cpu.num_vector_registers // 3 <= outputs * vectors
        and (outputs + 1) * vectors < cpu.num_vector_registers
    ]
    for h in sorted(steps):
        lanes2 = kernel.lanes
        while lanes2 > h * width:
            lanes2 //= 2
        if h > min(height // default.h_t, _MOST_ROWS):
            continue
        for rows, (outputs, vectors), ahead in product(_TILE_ROWS, tiles, (False, True)):
            if rows <= h:
                tile = {"rows": rows, "outputs": outputs, "vectors": vectors}
                knobs = replace(default, h=h, lanes2=lanes2, ahead=ahead, **tile)
                if has_little_code(kernel, knobs, cpu):
                    yield knobs


def has_little_code(kernel: Conv2DKernel, knobs: PlanarKnobs, cpu: CPUInfo) -> bool:
    """Return whether the machine code of a setting is small enough."""
    return _unit(cpu).instruction_bytes * vector_instructions(kernel, knobs) <= MOST_CODE_BYTES


def prefers_planar(kernel: Conv2DKernel, cpu: CPUInfo) -> bool:
    """Return whether a kernel is computed on planes.

    The weights of layer two are read again for each tile of pixels, so they must fit half the L2.
    Each core's piece must fill a register tile.
    """
    if not can_be_planar(kernel, cpu):
        return False
    unit = _UNITS[cpu.vector_bits]
    if int(kernel.width or 0) < unit.wide_row:
        return False
    height, width = _out_size(kernel)
    if height // _pieces(kernel, cpu) * width < unit.vectors * kernel.lanes:
        return False
    weights = kernel.layers[1].weight_elements() * ITEM_BYTES[kernel.dtype]
    if weights > cpu.l2_bytes / 2:
        return False
    return has_little_code(kernel, default_planar_knobs(kernel, cpu), cpu)


def default_planar_knobs(kernel: Conv2DKernel, cpu: CPUInfo) -> PlanarKnobs:
    """Return the knobs for a kernel that :func:`prefers_planar` takes.

    Each core gets a piece. Steps have the number of rows with the least wasted multiplications; of
    equals, the largest whose intermediate fits the L2 beside the weights. Where that is too much
    code, depthwise tiles or steps have fewer rows.
    """
    layer1, layer2 = kernel.layers
    unit, stride = _unit(cpu), layer1.strides[1]
    height, width = _out_size(kernel)
    h_t = _pieces(kernel, cpu)
    item = ITEM_BYTES[kernel.dtype]
    free = cpu.costs.cache_share * cpu.l2_bytes - layer2.weight_elements() * item
    fitting = int(free / (layer1.out_channels * width * item))
    largest = max(1, min(height // h_t, fitting))
    most = min(largest, unit.most_rows[stride])
    share = -(-height // h_t)
    lanes1, lanes2 = _row_lanes(kernel), kernel.lanes
    while lanes2 > largest * width:
        lanes2 //= 2
    taps = layer1.kernel[0] * layer1.kernel[1]

    def multiplied(rows: int) -> int:
        """Work of the steps of a piece: rows, or multiply-adds for an input channel."""
        steps = -(-share // rows)
        if not unit.longest:
            return steps * rows
        one = rows * -(-width // lanes1) * lanes1 * taps
        two = -(-rows * width // lanes2) * lanes2 * layer2.out_channels
        return steps * (one + two)

    # One row reuses too little of what it loads.
    sizes = [*range(most, min(most, 2) - 1, -1), *range(most + 1, min(largest, unit.longest) + 1)]
    widest = PlanarKnobs(
        h_t=h_t,
        h=1,
        rows=unit.tile_rows[stride],
        outputs=unit.outputs,
        vectors=unit.vectors,
        lanes1=lanes1,
        lanes2=lanes2,
        ahead=unit.ahead,
    )
    tiles = [rows for rows in reversed(_TILE_ROWS) if rows <= widest.rows]
    settings = [
        replace(widest, h=h, rows=rows)
        for h, rows in product(sorted(sizes, key=multiplied), tiles)
        if rows == widest.rows or rows < h
    ]
    fitting_code = (knobs for knobs in settings if has_little_code(kernel, knobs, cpu))
    return next(fitting_code, settings[-1])


def _unit(cpu: CPUInfo) -> _Unit:
    return _UNITS.get(cpu.vector_bits, _UNITS[256])


def _out_size(kernel: Conv2DKernel) -> tuple[int, int]:
    return kernel.layers[0].output_size(int(kernel.height or 1), int(kernel.width or 1))


def _pieces(kernel: Conv2DKernel, cpu: CPUInfo) -> int:
    """Pieces of the rows, one for each core."""
    return min(_out_size(kernel)[0], cpu.num_cores // gcd(kernel.batch or 1, cpu.num_cores))


def _row_lanes(kernel: Conv2DKernel) -> int:
    """The longest vectors that fit the rows of layer one, down to :data:`_SHORTEST`."""
    lanes = kernel.lanes
    while lanes > _SHORTEST and not takes_planar(kernel, lanes):
        lanes //= 2
    return lanes
