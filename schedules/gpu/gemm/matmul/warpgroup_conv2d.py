# SPDX-License-Identifier: Apache-2.0
"""Kernel of a convolution of warpgroups, for sm_90a, with channels in blocks of 16 bytes.

It is the product of :mod:`.matmul.warpgroup_matmul` with other copies. The rows of a tile are a box
of output pixels, and of images. In each step 64 channels of a tap are copied: a box of the data,
shifted by the tap, with zeros around the image, and that of the filters. Both lie in shared memory
as they do in memory, which is one of the layouts in which warpgroups read factors.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import Extent, constant, size_of, unravel
from schedules.tir.index_math import ceildiv, i64, ravel
from schedules.workload.conv2d import ConvLayer

from ...core.machine import GPUInfo
from ...core.machine_costs import COSTS
from ...core.tensor_core import CHUNK
from ...core.warpgroup import DEPTH, LINE, ROWS, ChunkLayout, WarpgroupCore
from .matmul_pattern import MatmulFunction, divides
from .matmul_tile_sizes import assumed_size
from .tensor_core_matmul import Locate
from .tensor_core_tile import ELEMENTS, choose_tensor_tile, rounded_position
from .warpgroup_matmul import Grid, product_kernel
from .warpgroup_tile import WarpgroupTile, single_cycles
from .window_boxes import BLOCKS, BlockedAxes, BlockedTensor, WindowProduct

_MATRIX = 8 * CHUNK  # bytes of one
SHAPES = tuple(itertools.product((256, 128, 64), (1, 2), (2, 1)))
"""Columns, cluster and warpgroups of tiles."""
_SEVERAL = 2


def warpgroup_conv2d_function(
    func: tirx.PrimFunc, matmul: MatmulFunction, gpu: GPUInfo
) -> tirx.PrimFunc | None:
    """The scheduled function of a convolution; None if it is better computed otherwise.

    Parameters
    ----------
    func, matmul : tirx.PrimFunc, MatmulFunction
        The function, and the product of windows that it computes.
    gpu : GPUInfo
        The device.
    """
    found = window_tile(func, matmul, gpu)
    return None if found is None else window_kernel(func, matmul, *found, gpu)


def window_tile(
    func: tirx.PrimFunc, matmul: MatmulFunction, gpu: GPUInfo
) -> tuple[WindowProduct, WindowTile] | None:
    """The convolution that a product is, and its tile; None if it is better computed otherwise."""
    if not gpu.has_warpgroup_products or not matmul.is_plain:
        return None
    windows = WindowProduct.of(matmul.left, matmul.right)
    if windows is None:
        return None
    tile = choose_window_tile(windows, matmul, gpu, rounded_position(func, matmul.right))
    return None if tile is None else (windows, tile)


def window_kernel(
    func: tirx.PrimFunc,
    matmul: MatmulFunction,
    windows: WindowProduct,
    tile: WindowTile,
    gpu: GPUInfo,
) -> tirx.PrimFunc:
    """The scheduled function of a convolution with a tile."""

    def factors() -> tuple[_BlockFactor, _BlockFactor]:
        data = ChunkLayout(tile.rows, False, _MATRIX, tile.pixels * CHUNK)
        share, distances = tile.columns, (_MATRIX, tile.columns * CHUNK)
        if tile.type.transposes:
            share, distances = tile.columns // tile.cluster, (BLOCKS * _MATRIX, _MATRIX)
        filters = ChunkLayout(tile.columns, tile.type.transposes, *distances, tile.cluster)
        box = share // tile.type.chunk, tile.type.chunk
        return (
            _BlockFactor(windows, windows.data, tile.box, data, 0),
            _BlockFactor(windows, windows.filters, box, filters, tile.pixels * LINE),
        )

    grid = _PixelGrid(matmul, tile, windows)
    return product_kernel(func, grid, factors, gpu, "Conv2D (warpgroups)")


@dataclass(frozen=True)
class WindowTile(WarpgroupTile):
    """Partition of a tile whose rows are a box of output pixels.

    Parameters
    ----------
    box : tuple[int, ...]
        Its extents, along each axis of the rows.
    """

    box: tuple[int, ...] = ()

    @property
    def pixels(self) -> int:
        """Pixels of the box, at most as many as rows."""
        return prod(self.box)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage of both factors."""
        return (self.pixels + self.columns) * LINE

    def window_cycles(self, sizes: WindowSizes, gpu: GPUInfo) -> float:
        """Predicted cycles, whose blocks compute one tile after the other."""
        down = prod(-(-extent // part) for extent, part in zip(sizes.rows, self.box, strict=True))
        clusters = -(-down // self.cluster) * -(-sizes.columns // self.columns)
        share = -(-clusters // (gpu.multiprocessors // self.cluster))
        steps = sizes.taps * -(-sizes.blocks // BLOCKS)
        products = self.rows * self.columns * DEPTH / COSTS.warpgroup_products
        run = self.box[-1] * CHUNK if sizes.is_joined else CHUNK
        runs = BLOCKS * self.pixels * CHUNK // run
        copied = runs * -(-run // COSTS.sector) * COSTS.sector + self.columns * LINE / self.cluster
        lines = runs * -(-run // LINE) + self.columns
        step = max(products, copied / COSTS.l2_bytes, lines * COSTS.copied_line)
        return share * (steps * step + COSTS.epilogue) + COSTS.block_latency


@dataclass(frozen=True)
class WindowSizes:
    """Sizes of a convolution on which its tiles depend.

    Parameters
    ----------
    rows, longest : tuple[int, ...]
        Extents of images and pixels, and of the longest box.
    taps, blocks, columns : int
        Taps, blocks of input channels, and output channels.
    is_joined : bool
        Whether neighbouring windows begin beside each other.
    """

    rows: tuple[int, ...]
    longest: tuple[int, ...]
    taps: int
    blocks: int
    columns: int
    is_joined: bool

    @classmethod
    def of(cls, windows: WindowProduct, columns: Extent) -> WindowSizes:
        """Sizes of a product; an open batch has as many images as fill a guess of all rows."""
        first, *others = windows.data.rows
        known = [int(constant(extent) or 1) for extent in others]
        images = constant(first) or max(1, assumed_size(first) // prod(known))
        return cls(
            (images, *known),
            windows.data.longest,
            prod(windows.taps),
            windows.blocks,
            assumed_size(columns),
            windows.data.is_joined,
        )

    @classmethod
    def of_layer(
        cls, layer: ConvLayer, images: int, size: tuple[int, int], lanes: int = ELEMENTS
    ) -> WindowSizes:
        """Sizes of a dense layer on images of a size, and with some channels in a block."""
        data = BlockedAxes.of_layer(layer, images, size, lanes)
        blocks = -(-layer.in_channels // lanes)
        taps = prod(layer.kernel)
        return cls(data.rows, data.longest, taps, blocks, layer.out_channels, data.is_joined)


@functools.lru_cache(maxsize=256)
def fastest_window_tile(sizes: WindowSizes, gpu: GPUInfo) -> tuple[float, WindowTile]:
    """The tile of the least predicted time, for any type, and its cycles."""
    tiles = (
        ranked_window_tiles(sizes, *shape, gpu)[0]
        for shape in SHAPES
        if shape[1] <= gpu.multiprocessors
    )
    rated = ((tile.window_cycles(sizes, gpu), tile) for tile in tiles)
    return min(rated, key=lambda found: (found[0], found[1].rows))


@functools.lru_cache(maxsize=256)
def ranked_window_tiles(
    sizes: WindowSizes, columns: int, cluster: int, warpgroups: int, gpu: GPUInfo
) -> tuple[WindowTile, ...]:
    """The tiles of a shape, those of least predicted time first, for any type."""
    boxes = _boxes(list(map(min, sizes.rows, sizes.longest)), warpgroups * ROWS)
    tiles = (WindowTile(columns, cluster, warpgroups, box=box) for box in boxes)
    return tuple(sorted(tiles, key=lambda tile: tile.window_cycles(sizes, gpu)))


def choose_window_tile(
    windows: WindowProduct, matmul: MatmulFunction, gpu: GPUInfo, rounded: int | None = None
) -> WindowTile | None:
    """The tile of the least predicted time; None if single warps take less.

    Of float32 only with weights that have a :func:`rounded_position`.
    """
    single = choose_tensor_tile(matmul, gpu, tf32=rounded is not None)
    if single is None:
        return None
    sizes = WindowSizes.of(windows, matmul.n)
    cycles, tile = fastest_window_tile(sizes, gpu)
    extents = 1, prod(sizes.rows), sizes.columns, int(constant(matmul.k) or 0)
    if cycles > single_cycles(single, *extents, gpu):
        return None
    return replace(tile, type=single.type)


def _boxes(longest: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Boxes of at most so many pixels that cannot be longer along their last axis."""
    if len(longest) < 2:
        yield tuple(min(extent, most) for extent in longest)
        return
    first, *others = longest
    for length in range(1, min(first, most) + 1):
        for box in _boxes(others, most // length):
            yield (length, *box)


class _PixelGrid(Grid):
    """Tiles that are boxes of pixels."""

    tile: WindowTile

    def __init__(self, matmul: MatmulFunction, tile: WindowTile, windows: WindowProduct):
        self.windows = windows
        self.counts = [
            ceildiv(extent, part) for extent, part in zip(windows.data.rows, tile.box, strict=True)
        ]
        super().__init__(self._spread(matmul), tile)

    def _spread(self, matmul: MatmulFunction) -> MatmulFunction:
        """The product with an epilogue over the axes of which its rows are the product."""
        row, column = matmul.epilogue.axes
        rows = self.windows.data.rows
        axes = [tirx.Var(f"m{k}", "int64") for k in range(len(rows))]
        extents = (*rows, matmul.epilogue.extents[-1])
        values = {row: ravel(axes, rows)}
        epilogue = matmul.epilogue.with_axes([*axes, column], extents, values)
        return replace(matmul, epilogue=epilogue)

    @property
    def row_tiles(self) -> Extent:
        return size_of(self.counts)

    @property
    def depth(self) -> int:
        # Whole steps for each tap: beyond the last block of channels there are zeros.
        return prod(self.windows.taps) * -(-self.windows.blocks // BLOCKS) * self.tile.depth

    def start(self, number: tirx.Expr) -> list[tirx.Expr]:
        # Tiles of a cluster that are past the end begin past the end of the outermost axis, also
        # where one box covers it: an extent of 1 would leave its place out.
        places = unravel(number, [_SEVERAL, *self.counts[1:]], is_natural=True)
        return [T.bind(at * i64(part)) for at, part in zip(places, self.tile.box, strict=True)]

    def locate(self, start: Sequence[tirx.Expr], first: tirx.Expr) -> Locate:
        tile, extents = self.tile, self.windows.data.rows
        is_whole = [divides(part, e) for part, e in zip(tile.box, extents, strict=True)]
        # The last tiles of a cluster may be past the end.
        is_whole[0] = is_whole[0] and divides(tile.cluster, self.row_tiles)

        def locate(row: tirx.Expr) -> tuple[list[tirx.Expr], tirx.Expr | bool]:
            row = T.bind(first + row)
            inner = unravel(row, tile.box)
            places = [T.bind(begin + at) for begin, at in zip(start, inner, strict=True)]
            inside = [row < i64(tile.pixels)] * (tile.pixels < tile.rows)
            for place, extent, whole in zip(places, extents, is_whole, strict=True):
                inside += [place < i64(extent)] * (not whole)
            return places, tirx.all(*inside) if inside else True

        return locate


class _BlockFactor:
    """One factor: where it lies in memory, and its part of each stage.

    Parameters
    ----------
    windows, tensor : WindowProduct, BlockedTensor
        The convolution, and its factor.
    box : Sequence[int]
        What is copied at once.
    layout, begin : ChunkLayout, int
        Its tile, and the byte of a stage where it begins.
    """

    def __init__(
        self,
        windows: WindowProduct,
        tensor: BlockedTensor,
        box: Sequence[int],
        layout: ChunkLayout,
        begin: int,
    ):
        self.windows, self.tensor = windows, tensor
        self.layout, self.begin = layout, begin
        self.source = tensor.source(box, BLOCKS if layout.rows_first else BLOCKS // layout.parts)
        self._map = WarpgroupCore.encode(self.source)

    def fetch(
        self,
        core: WarpgroupCore,
        start: Sequence[tirx.Expr],
        depth: tirx.Expr,
        stage: tirx.Expr,
        filled: tirx.Expr,
    ) -> None:
        """Begin to copy the tile at a start to a stage, from a place of the padded depth on."""
        layout, dtype = self.layout, stage.ty.dtype
        chunks = -(-self.windows.blocks // BLOCKS)
        lanes = self.windows.data.lanes
        *taps, chunk = unravel(depth // i64(BLOCKS * lanes), [*self.windows.taps, chunks])
        for part in core.shares(layout):
            row, block = layout.part(i64(part))
            rows = start
            if self.tensor is self.windows.filters:
                rows = [row // i64(lanes) + start[0] // i64(lanes)]
            coordinates = self.tensor.coordinates(rows, [*taps, chunk * i64(BLOCKS) + block])
            place = layout.place(row) + block * i64(layout.depth_bytes)
            at = stage + tirx.const(self.begin, dtype) + place.astype(dtype)
            core.copy(self._map, self.source, coordinates, at, filled, layout.parts > 1)
