# SPDX-License-Identifier: Apache-2.0
"""Knobs of the fused template, and their search space."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product

from schedules.errors import OpError
from schedules.workload.conv2d import Conv2DKernel

from ..core.machine import CPUInfo
from .conv2d_knobs import shares
from .fused_conv2d_limits import takes_plain
from .register_tile import register_tiles

LOOPS = ("oc2", "ic_o", "h_o", "w_o")


@dataclass(frozen=True)
class FusedConv2DKnobs:
    """Knobs of Algorithm 2.

    Parameters
    ----------
    pixels1, blocks1, pixels2, blocks2 : int
        Register tiles of the two layers: pixels x channel blocks.
    h_t, w_t, oc_t : int
        Parallel pieces of the output's rows, of the tiles of a row, and of the channel tiles.
    h : int
        Rows of the output in one step of ``h_o``.
    w_o : int
        Pieces of a row in loop ``w_o``.
    ic_o : int
        Pieces of the reduction of layer two; a divisor of its input blocks.
    order : tuple[str, ...]
        Loops 1 to 4, outermost first.
    compute_at : int
        Number of loops that enclose the computation of layer one, 0 to 4.
    prefetch : bool
        Whether the micro-kernels prefetch the next weights.
    """

    pixels1: int
    blocks1: int
    pixels2: int
    blocks2: int
    h_t: int
    w_t: int = 1
    oc_t: int = 1
    h: int = 1
    w_o: int = 1
    ic_o: int = 1
    order: tuple[str, ...] = ("h_o", "w_o", "ic_o", "oc2")
    compute_at: int = 1
    prefetch: bool = False

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(LOOPS):
            raise OpError(f"order is {self.order}; expected a permutation of {LOOPS}")
        if not 0 <= self.compute_at <= len(LOOPS):
            raise OpError(f"compute_at is {self.compute_at}; expected 0 to {len(LOOPS)}")


def check_knobs(kernel: Conv2DKernel, knobs: FusedConv2DKnobs) -> None:
    """Reject knobs under which the kernel cannot change the layouts of its data or output."""
    if not (kernel.plain_data or kernel.plain_out):
        return
    if not takes_plain(kernel, kernel.plain_data, kernel.plain_out):
        raise OpError(
            f"the pair has plain_data={kernel.plain_data} and plain_out={kernel.plain_out}; "
            "expected one for which takes_plain is true"
        )
    if kernel.plain_out:
        for name in ("w_t", "w_o", "ic_o"):
            if getattr(knobs, name) != 1:
                raise OpError(
                    f"{name} is {getattr(knobs, name)}; expected 1, because the kernel unpacks "
                    "whole rows of finished sums"
                )
    layer1, layer2 = kernel.layers
    size = layer1.output_size(int(kernel.height or 1), int(kernel.width or 1))
    rows = layer2.output_size(*size)[0]
    if kernel.plain_data and knobs.h_t > rows:
        raise OpError(f"h_t is {knobs.h_t}; expected at most the {rows} rows of the output")
    if kernel.plain_data and knobs.ic_o > 1 and layer2.in_channels % kernel.lanes:
        raise OpError(
            f"ic_o is {knobs.ic_o}; expected 1, because {layer2.in_channels} channels do not "
            f"fill blocks of {kernel.lanes}"
        )


def chunk_sizes(extent: int, pieces: int) -> tuple[int, ...]:
    """The sizes that :func:`chunk` produces."""
    small, rest = divmod(extent, pieces)
    return (small, small + 1) if rest else (small,)


def mid_extents(
    kernel: Conv2DKernel, knobs: FusedConv2DKnobs, mid_height: int, out_height: int, blocks: int
) -> tuple[int, int, int]:
    """Most output rows, intermediate rows and channel blocks that are alive at the same time.

    All for the range of layer two that is open where layer one is computed.
    """
    layer2 = kernel.layers[1]
    enclosing = knobs.order[: knobs.compute_at]
    out_rows = max(chunk_sizes(out_height, knobs.h_t))
    if "h_o" in enclosing:
        out_rows = min(out_rows, knobs.h)
    reach = (layer2.kernel[0] - 1) * layer2.dilation[0] + 1
    rows = min(mid_height, (out_rows - 1) * layer2.strides[0] + reach)
    return out_rows, rows, blocks // knobs.ic_o if "ic_o" in enclosing else blocks


def fused_conv2d_space(kernel: Conv2DKernel, cpu: CPUInfo) -> Iterator[FusedConv2DKnobs]:
    """All settings that the cost model compares, each of them legal.

    Whole rows, whole sums, and layer one once for each step of rows: other places of it, pieces of
    a row and parts of the sum never gained enough to search for.
    """
    yield from _settings(kernel, grids(kernel, cpu), cpu)


def in_fused_conv2d_space(kernel: Conv2DKernel, knobs: FusedConv2DKnobs, cpu: CPUInfo) -> bool:
    """Return whether :func:`fused_conv2d_space` yields a setting, without all the others."""
    return _has_setting(kernel, knobs, grids(kernel, cpu), cpu)


def _settings(
    kernel: Conv2DKernel, some: Iterable[Grid], cpu: CPUInfo
) -> Iterator[FusedConv2DKnobs]:
    """All register tiles on some grids."""
    for grid in some:
        for tile1 in tiles_one(kernel, cpu):
            for tile2 in tiles_two(kernel, grid, cpu):
                yield grid.knobs(tile1, tile2)


def _has_setting(
    kernel: Conv2DKernel, knobs: FusedConv2DKnobs, some: Iterable[Grid], cpu: CPUInfo
) -> bool:
    """Return whether :func:`_settings` yields a setting."""
    tile1, tile2 = (knobs.pixels1, knobs.blocks1), (knobs.pixels2, knobs.blocks2)
    return tile1 in tiles_one(kernel, cpu) and any(
        knobs == grid.knobs(tile1, tile2) and tile2 in tiles_two(kernel, grid, cpu) for grid in some
    )


def wide_fused_conv2d_space(kernel: Conv2DKernel, cpu: CPUInfo) -> Iterator[FusedConv2DKnobs]:
    """All settings of :func:`fused_conv2d_space`, with every piece, order and place of layer one.

    Rows in pieces, the sum in parts, the loops that run more than once in any order, and layer one
    in any of them: the space of the dissertation, section 3.4. In the usual nest, also shares of
    the cores in a row's tiles (of images of few rows), and no prefetch of weights (of small ones,
    which stay in the caches); with all orders they would be too many to be scored. No two settings
    are the same nest.
    """
    for narrow in fused_conv2d_space(kernel, cpu):
        for w_o, ic_o in product(_row_pieces(kernel, narrow), _sum_parts(kernel)):
            pieces = replace(narrow, w_o=w_o, ic_o=ic_o)
            if not _is_refused(kernel, pieces):
                for order, compute_at in _nests(kernel, pieces):
                    yield replace(pieces, order=order, compute_at=compute_at)
        yield replace(narrow, prefetch=False)
    for shared in _settings(kernel, _row_grids(kernel, cpu), cpu):
        if _can_share_rows(kernel, shared):
            yield shared


def in_wide_fused_conv2d_space(kernel: Conv2DKernel, knobs: FusedConv2DKnobs, cpu: CPUInfo) -> bool:
    """Return whether :func:`wide_fused_conv2d_space` yields a setting, without all the others."""
    if not knobs.prefetch:
        return in_fused_conv2d_space(kernel, replace(knobs, prefetch=True), cpu)
    if knobs.w_t > 1:
        some = _row_grids(kernel, cpu)
        return _can_share_rows(kernel, knobs) and _has_setting(kernel, knobs, some, cpu)
    narrow = replace(
        knobs, w_o=1, ic_o=1, order=FusedConv2DKnobs.order, compute_at=FusedConv2DKnobs.compute_at
    )
    return (
        in_fused_conv2d_space(kernel, narrow, cpu)
        and knobs.w_o in _row_pieces(kernel, narrow)
        and knobs.ic_o in _sum_parts(kernel)
        and not _is_refused(kernel, knobs)
        and (knobs.order, knobs.compute_at) in _nests(kernel, knobs)
    )


def whole_rows(kernel: Conv2DKernel, knobs: FusedConv2DKnobs) -> FusedConv2DKnobs:
    """Return the nearest setting that the cost model knows: cores that share a row share rows."""
    h_t = min(knobs.h_t * knobs.w_t, _out_size(kernel)[0])
    return replace(knobs, h_t=h_t, w_t=1, w_o=1)


def _row_pieces(kernel: Conv2DKernel, knobs: FusedConv2DKnobs) -> list[int]:
    """Pieces of a row, each with a tile at least."""
    width = _out_size(kernel)[1]
    return [pieces for pieces in (1, 2, 4) if pieces * knobs.pixels2 <= width or pieces == 1]


def _can_share_rows(kernel: Conv2DKernel, knobs: FusedConv2DKnobs) -> bool:
    """Return whether each core gets a tile of a row at least."""
    enough = knobs.w_t * knobs.pixels2 <= _out_size(kernel)[1]
    return enough and not _is_refused(kernel, knobs)


def _sum_parts(kernel: Conv2DKernel) -> list[int]:
    """Parts of the sum of layer two, of whole blocks."""
    blocks = -(-kernel.layers[1].in_channels // kernel.lanes)
    return [parts for parts in range(1, blocks + 1) if blocks % parts == 0]


def _is_refused(kernel: Conv2DKernel, knobs: FusedConv2DKnobs) -> bool:
    try:
        check_knobs(kernel, knobs)
    except OpError:
        return True
    return False


def _nests(kernel: Conv2DKernel, knobs: FusedConv2DKnobs) -> list[tuple[tuple[str, ...], int]]:
    """Orders of the loops that run more than once, the others at their usual place; and places."""
    out_h = _out_size(kernel)[0]
    once = {
        "h_o": knobs.h >= max(chunk_sizes(out_h, knobs.h_t)),
        "w_o": knobs.w_o == 1,
        "ic_o": knobs.ic_o == 1,
        "oc2": False,
    }
    usual = FusedConv2DKnobs.order
    levels = [level for level, name in enumerate(usual) if not once[name]]
    nests = []
    for names in permutations(usual[level] for level in levels):
        order = list(usual)
        for level, name in zip(levels, names, strict=True):
            order[level] = name
        nests += [(tuple(order), place) for place in (0, *(level + 1 for level in levels))]
    default = (usual, FusedConv2DKnobs.compute_at)  # where ``h_o`` runs once, the same as place 0
    return [default if nest == (usual, 0) and once["h_o"] else nest for nest in nests]


@dataclass(frozen=True)
class Grid:
    """All knobs but the register tiles: shares of the cores, and rows of a step."""

    h_t: int
    oc_t: int
    h: int
    w_t: int = 1

    def knobs(self, tile1: tuple[int, int], tile2: tuple[int, int]) -> FusedConv2DKnobs:
        """The setting with these register tiles."""
        return FusedConv2DKnobs(
            *tile1, *tile2, self.h_t, self.w_t, self.oc_t, self.h, prefetch=True
        )


def grids(kernel: Conv2DKernel, cpu: CPUInfo) -> Iterator[Grid]:
    """Shares and rows of a step (some of those that give different numbers of steps)."""
    rows, blocks = _out_size(kernel)[0], -(-kernel.layers[1].out_channels // kernel.lanes)
    for h_t, oc_t in shares(kernel.batch or 1, cpu.num_cores, (rows, blocks)):
        yield from _steps(kernel, h_t, oc_t)


def _row_grids(kernel: Conv2DKernel, cpu: CPUInfo) -> Iterator[Grid]:
    """Grids whose cores also share the tiles of a row."""
    most = _out_size(kernel)[0], cpu.num_cores
    for h_t, others in shares(kernel.batch or 1, cpu.num_cores, most):
        for w_t in range(2, others + 1):
            if others % w_t == 0:
                yield from _steps(kernel, h_t, others // w_t, w_t)


def _steps(kernel: Conv2DKernel, h_t: int, oc_t: int, w_t: int = 1) -> Iterator[Grid]:
    """Rows of a step, if there are enough rows and channels for the cores."""
    layer2, out_h = kernel.layers[1], _out_size(kernel)[0]
    if h_t > out_h or oc_t > -(-layer2.out_channels // kernel.lanes):
        return
    rows = -(-out_h // h_t)
    for h in sorted({-(-rows // steps) for steps in (1, 2, 3, 4, 7, 14, 28)} | {1}):
        yield Grid(h_t, oc_t, h, w_t)


def tiles_one(kernel: Conv2DKernel, cpu: CPUInfo) -> list[tuple[int, int]]:
    """Register tiles of layer one; a grouped layer's hold one block."""
    layer1 = kernel.layers[0]
    if layer1.groups > 1 and not layer1.group_lanes(kernel.lanes):
        layer1 = replace(layer1, in_channels=1, out_channels=kernel.lanes, groups=1)
    row = _mid_size(kernel)[1]
    return register_tiles(layer1, row, kernel.lanes, cpu)


def tiles_two(kernel: Conv2DKernel, grid: Grid, cpu: CPUInfo) -> list[tuple[int, int]]:
    """Register tiles of layer two, on a row or on all rows of a step."""
    layer2, out_w = kernel.layers[1], _out_size(kernel)[1]
    row = grid.h * out_w if layer2.is_pointwise else out_w
    return register_tiles(layer2, row, kernel.lanes, cpu)


def _out_size(kernel: Conv2DKernel) -> tuple[int, int]:
    return kernel.layers[1].output_size(*_mid_size(kernel))


def _mid_size(kernel: Conv2DKernel) -> tuple[int, int]:
    return kernel.layers[0].output_size(int(kernel.height or 1), int(kernel.width or 1))
