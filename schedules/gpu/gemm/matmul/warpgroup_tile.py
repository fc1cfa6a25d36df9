# SPDX-License-Identifier: Apache-2.0
"""Tiles of a matrix product of warpgroups, and their costs beside those of single warps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx

from schedules.tir.extents import constant
from schedules.tir.index_math import i64

from ...core.machine import GPUInfo
from ...core.machine_costs import COSTS
from ...core.tensor_core import MATRIX_TYPES, MatrixType
from ...core.warpgroup import DEPTH, LINE, ROWS, BulkSource, FactorLayout, WarpgroupCore
from .matmul_pattern import MatmulFunction, Operand
from .matmul_tile_sizes import assumed_size
from .tensor_core_tile import (
    STEP,
    SharedTile,
    TensorTile,
    choose_tensor_tile,
    copied_read,
    is_copied,
)

_MOST_AXES = 5  # of a map
MOST_STAGES = 8
"""Stages of a tile."""


@dataclass(frozen=True)
class WarpgroupTile:
    """Partition of a tile of the result among warpgroups, one below the other.

    Parameters
    ----------
    columns : int
        Columns, of each warpgroup as of the tile: at most 256.
    cluster : int
        Blocks with tiles below each other that share the copies of the right factor.
    warpgroups : int
        Warpgroups of a block, of 64 rows each.
    type : MatrixType
        Of the factors.
    most_stages : int
        Stages in shared memory, if they fit.
    """

    columns: int
    cluster: int = 1
    warpgroups: int = 2
    type: MatrixType = MATRIX_TYPES["float16"]
    most_stages: int = MOST_STAGES

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return self.warpgroups * ROWS

    @property
    def sums(self) -> int:
        """Sums of a thread."""
        return self.columns // 2

    @property
    def moves_registers(self) -> bool:
        """Return whether a thread needs more registers for its sums than nine warps have.

        Three of them share a quarter of a multiprocessor's registers: 168 for a thread. Beside 128
        sums these hold neither a factor that is rounded nor all that an epilogue reads ahead.
        """
        return self.columns == 256 and self.warpgroups == 2

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage of both factors."""
        return (self.rows + self.columns) * LINE

    @property
    def depth(self) -> int:
        """Elements of the reduced axis in a stage."""
        return LINE // self.type.itemsize

    @property
    def stages(self) -> int:
        """Stages in the shared memory of a multiprocessor."""
        most = range(self.most_stages, 1, -1)
        room = COSTS.opt_in_shared_bytes
        return next(n for n in most if WarpgroupCore.shared_bytes(n, self.stage_bytes) <= room)

    def cycles(self, batches: int, m: int, n: int, k: int, gpu: GPUInfo) -> float:
        """Predicted cycles of a product, whose blocks compute one tile after the other."""
        clusters = batches * -(-m // (self.cluster * self.rows)) * -(-n // self.columns)
        share, steps = -(-clusters // (gpu.multiprocessors // self.cluster)), -(-k // self.depth)
        products = self.rows * self.columns * DEPTH / COSTS.warpgroup_products
        copied = (self.rows + self.columns / self.cluster) * LINE
        step = max(products, copied / COSTS.l2_bytes)
        # The copies of the following tile go on during the epilogue.
        return share * (steps * step + COSTS.epilogue) + COSTS.block_latency


TILES = (
    WarpgroupTile(256, 2),
    WarpgroupTile(256),
    WarpgroupTile(128, 2),
    WarpgroupTile(128),
    WarpgroupTile(64),
)


def choose_warpgroup_tile(
    matmul: MatmulFunction, gpu: GPUInfo, rounded: int | None = None
) -> WarpgroupTile | None:
    """The tile of the least predicted time; None if single warps take less, or must compute it.

    Warpgroups take factors that are copied as they lie in memory. Of bytes and of TF32 both lie
    along the reduced axis, and the right one is rounded before: it has a :func:`rounded_position`.
    """
    single = choose_tensor_tile(matmul, gpu, tf32=rounded is not None)
    if not gpu.has_warpgroup_products or single is None or not matmul.is_plain:
        return None
    kind, factors = single.type, (matmul.left, matmul.right)
    if not all(lies_in_memory(factor, kind) for factor in factors):
        return None
    batches, m, n, k = (assumed_size(e) for e in (matmul.batches, matmul.m, matmul.n, matmul.k))
    extents = batches, m, n, k
    best = fastest_tile(*extents, kind, gpu)
    return None if best.cycles(*extents, gpu) > single_cycles(single, *extents, gpu) else best


def fastest_tile(
    batches: int, m: int, n: int, k: int, kind: MatrixType, gpu: GPUInfo
) -> WarpgroupTile:
    """The tile of the least predicted time for factors of a type."""
    fitting = (replace(tile, type=kind) for tile in TILES if tile.cluster <= gpu.multiprocessors)
    return min(fitting, key=lambda tile: tile.cycles(batches, m, n, k, gpu))


def single_cycles(tile: TensorTile, batches: int, m: int, n: int, k: int, gpu: GPUInfo) -> float:
    """Predicted cycles of a product of single warps, by ``mma.sync``."""
    blocks = batches * -(-m // tile.rows) * -(-n // tile.columns)
    share, steps = -(-blocks // gpu.multiprocessors), -(-k // tile.depth)
    resident = COSTS.register_file // (tile.registers * tile.threads)
    # In the time of one product of 16 bits there are two of bytes, or half a one of TF32.
    products = tile.rows * tile.columns * tile.depth * tile.type.itemsize / 2 / COSTS.warp_products
    step = max(products, tile.stage_bytes / COSTS.l2_bytes)
    alone = max(step, COSTS.step_latency / max(1, tile.stages - 1))
    rounds = -(-share // max(1, resident))
    return max(share * steps * step, rounds * steps * alone) + rounds * COSTS.block_latency


def lies_in_memory(operand: Operand, kind: MatrixType) -> bool:
    """Return whether tensor maps describe a factor of a type, its rows multiples of 16 bytes.

    Other types than those of 16 bits have to lie along the reduced axis.
    """
    rows_first = operand.rows_first
    shared = SharedTile(STEP, LINE // kind.itemsize, rows_first, True, kind.chunk)
    layout = FactorLayout(ROWS, rows_first, itemsize=kind.itemsize)
    can_be_read = kind.transposes or not rows_first
    return can_be_read and is_copied(operand, shared) and bulk_source(operand, layout) is not None


def bulk_source(operand: Operand, layout: FactorLayout) -> tuple[BulkSource, list[int]] | None:
    """A factor as a tensor of which tiles are copied; None if it is none.

    Returns
    -------
    tuple[BulkSource, list[int]]
        The tensor, and for each of its axes that of the factor's space.
    """
    read, space = copied_read(operand), operand.space
    linear = None if read is None or read.guards else space.linear(read)
    if read is None or operand.shift is not None or linear is None or constant(linear[1]) != 0:
        return None
    count = len(space.axes)
    first = count - 2 if operand.rows_first else count - 1
    second = 2 * count - 3 - first
    repeated = [k for k in range(count - 2) if constant(linear[0][k]) != 0]
    axes = [first, second, *reversed(repeated)]
    if len(axes) > _MOST_AXES or constant(linear[0][first]) != 1:
        return None
    extents: list[tirx.Expr] = [i64(space.extents[k]) for k in axes]
    box = (*layout.box, *(1 for _ in repeated))
    strides = tuple(linear[0][k] for k in axes[1:])
    return BulkSource(read.buffer, tuple(extents), strides, box), axes
