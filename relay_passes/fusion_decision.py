# SPDX-License-Identifier: Apache-2.0
"""Whether two neighbouring convolutions should become one kernel.

A small roofline model in clock cycles of one core, from shapes and target alone. Fused, the
output is cut into spatial tiles, and along channels only to give every core a part; the model
tries all tile sizes and keeps the best. It charges

- halo: where the second kernel is wider than its stride, tiles overlap in the intermediate, and
  every part of the channels computes the first layer again;
- parallelism: cores wait for the one with the most tiles, while a separate kernel can be split
  by channels for nothing;
- weights: both layers' weights pass once a tile, so that tiny tiles wait for them;
- locality: an intermediate tile that leaves the cache with its input and output saves nothing.

Separate kernels pay for writing and reading the intermediate, where it lives by its size, and for
one more parallel region; and where the data comes or the result leaves in NCHW, for a kernel that
changes the layout, which a fused one does in its registers. But they may be computed by Winograd's
algorithm (:mod:`.winograd_decision`), which a fused kernel does not use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from tvm.target import Target

from schedules.conv2d_workload import ConvLayer, FusedConv2DWorkload
from schedules.cpu.fused_conv2d_limits import plain_sides
from schedules.cpu.machine import CPUInfo

from .cost_model import CACHE_SHARE, arithmetic, direct_cycles, transfer
from .winograd_decision import WinogradDecision, decide_winograd

# Constants of the model, in bytes and cycles of one core; measure before changing one.
EXPOSED = 0.6  # share of activation traffic that does not overlap with arithmetic
REGION_CYCLES = 5000.0  # starting and joining one parallel region
LAYOUT_BYTES_PER_CYCLE = 6.0  # of a kernel that changes the layout, each byte counted once
TRANSPOSE_BYTES_PER_CYCLE = 16.0  # of transposes in registers
LEAST_TILE_WIDTH = 4  # pixels in a row that keep the multiply-add units busy
LEAST_GAIN = 0.001  # predicted, below which two kernels stay


@dataclass(frozen=True)
class Decision:
    """Whether a pair is fused.

    Parameters
    ----------
    fuse : bool
        The answer.
    reason : str
        One line for the report.
    gain : float
        Predicted time of the separate kernels over that of the fused one, minus one.
    """

    fuse: bool
    reason: str
    gain: float = 0.0


@dataclass(frozen=True)
class _Plan:
    """The predicted best fused kernel."""

    cycles: float
    tile: tuple[int, int]
    parts: int  # of the output channels
    recomputed: float  # first layer's pixels computed, over those of the intermediate
    imbalance: float  # outputs of the busiest core, over the mean


def decide(
    workload: FusedConv2DWorkload, target: Target, winograd: tuple[bool, bool] = (True, True)
) -> Decision:
    """Predict whether one kernel is faster than two.

    Parameters
    ----------
    workload : FusedConv2DWorkload
        The pair on concrete shapes.
    target : Target
        Where it runs.
    winograd : tuple[bool, bool]
        Whether each layer, as a kernel of its own, may be computed by Winograd's algorithm.

    Returns
    -------
    Decision
        A function of the arguments alone.
    """
    if target.kind.name != "llvm":
        return Decision(False, f"no fused convolution kernel for target kind {target.kind.name!r}")
    cpu = CPUInfo.from_target(target)
    plan = min(
        (
            _fused_plan(workload, cpu, tile, parts)
            for parts in {1, min(cpu.num_cores, workload.layer2.out_channels)}
            for tile in _tiles(*workload.out_size)
        ),
        key=lambda candidate: candidate.cycles,
    )
    regions, layout_bytes = _layout_changes(workload, cpu)
    layout = regions * REGION_CYCLES + layout_bytes / (cpu.num_cores * LAYOUT_BYTES_PER_CYCLE)
    transposes = layout_bytes / (cpu.num_cores * TRANSPOSE_BYTES_PER_CYCLE)
    apart = _winograd_apart(workload, target, winograd)
    gain = (_separate_cycles(workload, cpu, apart) + layout) / (plan.cycles + transposes) - 1
    return Decision(gain >= LEAST_GAIN, _explain(workload, cpu, plan, gain, apart), gain)


def _winograd_apart(
    workload: FusedConv2DWorkload, target: Target, allowed: tuple[bool, bool]
) -> list[WinogradDecision | None]:
    """For each layer, what Winograd's algorithm gains where it is a kernel of its own."""
    decisions: list[WinogradDecision | None] = []
    for layer, size, may in (
        (workload.layer1, (workload.height, workload.width), allowed[0]),
        (workload.layer2, workload.mid_size, allowed[1]),
    ):
        found = None
        if may:
            found = decide_winograd(layer, workload.batch, *size, workload.dtype, target)
        decisions.append(found if found is not None and found.pays else None)
    return decisions


def _explain(
    workload: FusedConv2DWorkload,
    cpu: CPUInfo,
    plan: _Plan,
    gain: float,
    apart: Sequence[WinogradDecision | None],
) -> str:
    height, width = workload.out_size
    if gain >= LEAST_GAIN:
        tiles = f"{plan.tile[0]}x{plan.tile[1]} pixels"
        tiles += f" and 1/{plan.parts} of the channels" if plan.parts > 1 else ""
        kib = workload.mid_bytes() / 1024
        return (
            f"predicted {gain:+.1%}: {kib:.{0 if kib >= 10 else 1}f} KiB between the layers stay "
            f"in cache, in tiles of {tiles}"
        )
    if any(apart):
        layers = " and ".join(f"layer {index}" for index, by in enumerate(apart, 1) if by)
        return f"predicted {gain:+.1%}: apart, {layers} can be computed by Winograd's algorithm"
    losses = {
        f"output of {height}x{width} does not divide evenly among {cpu.num_cores} cores": (
            plan.imbalance
        ),
        f"{plan.recomputed - 1:.0%} of the first layer would be computed again": plan.recomputed,
    }
    cause, loss = max(losses.items(), key=lambda item: item[1])
    if loss < 1 + LEAST_GAIN:
        cause = "too little traffic between the layers to save"
    return f"predicted {gain:+.1%}: {cause}"


def _tiles(height: int, width: int) -> Iterator[tuple[int, int]]:
    """Tile sizes that cut the output into nearly equal parts, whole rows first."""
    columns = width
    while columns >= min(width, LEAST_TILE_WIDTH):
        for rows in sorted({ceil(height / parts) for parts in range(1, height + 1)}):
            yield rows, columns
        if columns == 1:
            return
        columns = ceil(columns / 2)


def _fused_plan(
    workload: FusedConv2DWorkload, cpu: CPUInfo, tile: tuple[int, int], parts: int
) -> _Plan:
    """Cost of the fused kernel with one tile size and number of channel parts."""
    first, whole = workload.layer1, workload.layer2
    second = replace(whole, out_channels=ceil(whole.out_channels / parts))
    (mid_h, mid_w), (out_h, out_w) = workload.mid_size, workload.out_size
    tiles = workload.batch * parts * ceil(out_h / tile[0]) * ceil(out_w / tile[1])
    mid_tile = _reach(second, tile, (mid_h, mid_w))
    in_tile = _reach(first, mid_tile, (workload.height, workload.width))

    item = workload.item_bytes
    in_bytes = in_tile[0] * in_tile[1] * first.in_channels * item
    mid_bytes = mid_tile[0] * mid_tile[1] * first.out_channels * item
    out_bytes = tile[0] * tile[1] * second.out_channels * item * (2 if workload.residual else 1)
    work = arithmetic(first, mid_tile, cpu, workload.dtype)
    work += arithmetic(second, tile, cpu, workload.dtype)
    weights = (first.weight_elements() + second.weight_elements()) * item
    traffic = transfer(in_bytes, workload.batch * _input_bytes(workload), cpu)
    traffic += transfer(out_bytes, workload.batch * _output_bytes(workload), cpu)
    if in_bytes + mid_bytes + out_bytes > CACHE_SHARE * cpu.l2_bytes:
        traffic += transfer(2 * mid_bytes, cpu.num_cores * mid_bytes, cpu)
    cycles = max(work, transfer(weights, weights, cpu, shared=True)) + EXPOSED * traffic

    most = ceil(tiles / cpu.num_cores)
    mid_pixels, pixels = workload.batch * mid_h * mid_w, workload.batch * out_h * out_w
    return _Plan(
        cycles=most * cycles + REGION_CYCLES,
        tile=tile,
        parts=parts,
        recomputed=max(1.0, tiles * mid_tile[0] * mid_tile[1] / mid_pixels),
        imbalance=max(1.0, most * tile[0] * tile[1] * cpu.num_cores / (pixels * parts)),
    )


def _separate_cycles(
    workload: FusedConv2DWorkload, cpu: CPUInfo, apart: Sequence[WinogradDecision | None]
) -> float:
    """Cost of two kernels, each split evenly among the cores, or by Winograd's algorithm."""
    batch = workload.batch
    total = 2 * REGION_CYCLES
    for layer, size, winograd in (
        (workload.layer1, workload.mid_size, apart[0]),
        (workload.layer2, workload.out_size, apart[1]),
    ):
        direct = direct_cycles(layer, batch, size, cpu, workload.dtype)
        total += direct if winograd is None else min(direct, winograd.cycles)
    traffic = 0.0
    for bytes_moved, size_bytes in (
        (_input_bytes(workload), _input_bytes(workload)),
        (2 * workload.mid_bytes() // batch, workload.mid_bytes() // batch),
        (_output_bytes(workload), _output_bytes(workload)),
    ):
        traffic += transfer(batch * bytes_moved, batch * size_bytes, cpu)
    return total + EXPOSED * traffic / cpu.num_cores


def _layout_changes(workload: FusedConv2DWorkload, cpu: CPUInfo) -> tuple[int, int]:
    """How many changes of layout the fused kernel saves, and of how many bytes."""
    sides = plain_sides(
        workload.layer1,
        workload.layer2,
        (workload.height, workload.width),
        cpu.lanes(workload.dtype),
    )
    sizes = [
        size * workload.batch
        for plain, taken, size in zip(
            (workload.plain_data, workload.plain_out),
            sides,
            (_input_bytes(workload), _output_bytes(workload)),
            strict=True,
        )
        if plain and taken
    ]
    return len(sizes), sum(sizes)


def _input_bytes(workload: FusedConv2DWorkload) -> int:
    """Bytes of one image of the input."""
    pixels = workload.height * workload.width
    return pixels * workload.layer1.in_channels * workload.item_bytes


def _output_bytes(workload: FusedConv2DWorkload) -> int:
    """Bytes of one image of the output, and of the residual if there is one."""
    out_h, out_w = workload.out_size
    count = 2 if workload.residual else 1
    return count * out_h * out_w * workload.layer2.out_channels * workload.item_bytes


def _reach(layer: ConvLayer, tile: tuple[int, int], whole: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the input that a tile of the output reads."""
    height, width = (
        min(
            whole[axis],
            (tile[axis] - 1) * layer.strides[axis]
            + (layer.kernel[axis] - 1) * layer.dilation[axis]
            + 1,
        )
        for axis in (0, 1)
    )
    return height, width
