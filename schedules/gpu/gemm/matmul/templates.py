# SPDX-License-Identifier: Apache-2.0
"""Templates of matrix products: on ordinary cores in tiles or of few rows, and of warpgroups."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tvm import DataType, tirx

from schedules.tir.extents import constant
from schedules.workload.reduce import DTYPES

from ...core.machine import GPUInfo
from ...core.machine_costs import COSTS
from ...core.rule import GPUTemplate, Knobs
from ...core.tensor_core import MatrixType, product_type
from .factor_tiles import WIDTH, operand_lanes
from .matmul_pattern import MatmulFunction, read_matmul
from .matmul_tile_sizes import TileConfig, all_tile_configs, choose_tiles, tile_cycles
from .skinny_matmul import MOST_ROWS, RowsConfig, all_rows_configs, choose_rows, write_rows_kernel
from .tensor_core_tile import along_depth
from .tiled_matmul import write_tiles_kernel
from .warpgroup_matmul import warpgroup_kernel
from .warpgroup_tile import WarpgroupTile, fastest_tile


@dataclass(frozen=True)
class MatmulWorkload:
    """Products of matrices beside each other, ``left[m, k] * right[n, k]``.

    Parameters
    ----------
    batches, m, n, k : int
        Number of products and their extents.
    dtype : str
        Of the sums, and of the factors in shared memory.
    left_rows_first, right_rows_first : bool
        Whether neighbours of a factor in memory lie along its rows, not along the sums.
    vector : int
        Neighbours of the right factor that a lane may load at once.
    """

    batches: int
    m: int
    n: int
    k: int
    dtype: str
    left_rows_first: bool
    right_rows_first: bool
    vector: int

    @classmethod
    def of(cls, matmul: MatmulFunction) -> MatmulWorkload | None:
        """The product of a function; None if an extent is symbolic."""
        extents = [constant(e) for e in (matmul.batches, matmul.m, matmul.n, matmul.k)]
        batches, m, n, k = (extent or 0 for extent in extents)
        if 0 in (batches, m, n, k):
            return None
        sides = matmul.left.rows_first, matmul.right.rows_first
        vector = operand_lanes(matmul.right, WIDTH).vector
        return cls(batches, m, n, k, matmul.dtype, *sides, vector)

    @property
    def is_skinny(self) -> bool:
        """Return whether there are few rows."""
        return self.m <= MOST_ROWS

    @property
    def item_bytes(self) -> int:
        """Bytes of a sum."""
        return DataType(self.dtype).bits // 8


@dataclass(frozen=True)
class WarpgroupWorkload(MatmulWorkload):
    """Products that warpgroups compute.

    Parameters
    ----------
    factors, right : str
        Types of the left and of the right factor.
    """

    factors: str
    right: str

    @property
    def type(self) -> MatrixType:
        """Type of both factors."""
        return MatrixType(self.factors, self.right)


@dataclass(frozen=True)
class WarpgroupKnobs:
    """Tiles of warpgroups.

    Parameters
    ----------
    columns, cluster, warpgroups : int
        As of :class:`.warpgroup_tile.WarpgroupTile`.
    stages : int
        Stages in shared memory.
    """

    columns: int
    cluster: int
    warpgroups: int
    stages: int

    def tile(self, kind: MatrixType) -> WarpgroupTile:
        """The tile for factors of a type."""
        return WarpgroupTile(self.columns, self.cluster, self.warpgroups, kind, self.stages)


class MatmulTemplate(GPUTemplate[MatmulWorkload, Knobs]):
    """Base of the templates.

    Attributes
    ----------
    workload : type
        That of its products.
    """

    rule = "Matmul"
    workload: ClassVar[type[MatmulWorkload]] = MatmulWorkload

    def read_workload(self, text: str) -> MatmulWorkload:
        """Read the JSON of a workload."""
        found = self.workload(**json.loads(text))
        extents = found.batches, found.m, found.n, found.k, found.vector
        are_known = found.dtype in DTYPES
        if isinstance(found, WarpgroupWorkload):
            are_known &= product_type(found.factors, found.right) is not None
        if not are_known or not all(type(e) is int and e > 0 for e in extents):
            raise ValueError(f"{text:.100} describes no product")
        return found

    def describe(self, workload: MatmulWorkload) -> str:
        """Return the shape of the product."""
        shape = f"matmul {workload.m}x{workload.k} by {workload.k}x{workload.n}"
        return shape + (f", {workload.batches} times" if workload.batches > 1 else "")


class TilesTemplate(MatmulTemplate[TileConfig]):
    """Tiles in shared memory (:mod:`.tiled_matmul`)."""

    name = "gpu.matmul_tiles"
    version = 2
    knobs = TileConfig

    def default(self, workload: MatmulWorkload, machine: GPUInfo) -> TileConfig:
        """Return the largest tiles that occupy the GPU."""
        extents = workload.batches, workload.m, workload.n, workload.k
        return choose_tiles(*extents, workload.item_bytes, machine)

    def settings(self, workload: MatmulWorkload, machine: GPUInfo) -> Iterator[TileConfig]:
        """Yield tiles of any size that the device can hold."""
        return all_tile_configs(workload.k, workload.item_bytes, machine)

    def kernel(
        self, func: tirx.PrimFunc, workload: MatmulWorkload, knobs: TileConfig, gpu: GPUInfo
    ) -> tirx.PrimFunc:
        """Write the kernel."""
        least = self.least_blocks(workload, knobs, gpu)
        return write_tiles_kernel(func, _read(func), knobs, gpu, least)

    def cycles(self, workload: MatmulWorkload, knobs: TileConfig, machine: GPUInfo) -> float:
        """Return the cycles of a multiprocessor with its share of the tiles."""
        extents = workload.batches, workload.m, workload.n, workload.k
        return tile_cycles(*extents, workload.item_bytes, knobs, machine)


class RowsTemplate(MatmulTemplate[RowsConfig]):
    """Few rows (:mod:`.skinny_matmul`)."""

    name = "gpu.matmul_rows"
    version = 2
    knobs = RowsConfig

    def default(self, workload: MatmulWorkload, machine: GPUInfo) -> RowsConfig:
        """Return the setting of the rules."""
        along_depth = not workload.right_rows_first
        extents = workload.m, workload.n, workload.k
        return choose_rows(along_depth, workload.vector, *extents, workload.item_bytes, machine)

    def settings(self, workload: MatmulWorkload, machine: GPUInfo) -> Iterator[RowsConfig]:
        """Yield lanes, parts and vectors that the device can hold."""
        along_depth = not workload.right_rows_first
        return all_rows_configs(
            along_depth, workload.vector, workload.m, workload.item_bytes, machine
        )

    def kernel(
        self, func: tirx.PrimFunc, workload: MatmulWorkload, knobs: RowsConfig, gpu: GPUInfo
    ) -> tirx.PrimFunc:
        """Write the kernel."""
        return write_rows_kernel(func, _read(func), knobs, gpu)

    def cycles(self, workload: MatmulWorkload, knobs: RowsConfig, machine: GPUInfo) -> float:
        """Return the cycles of reading the right factor, at the threads that hide its latency."""
        moved = workload.batches * workload.n * workload.k * workload.item_bytes
        blocks = workload.batches * -(-workload.n // knobs.columns)
        share = -(-blocks // machine.multiprocessors)
        resident = COSTS.multiprocessor_threads // max(knobs.threads, 2 * COSTS.warp)
        busy = min(share, resident) * knobs.threads / COSTS.hiding_threads
        rate = COSTS.memory_bytes * min(1.0, busy) * min(1.0, knobs.vector / 2)
        each = knobs.lanes if knobs.along_depth else knobs.parts
        rounds = -(-share // resident)
        meeting = each.bit_length() * COSTS.warp
        used = share * machine.multiprocessors / blocks
        return moved * used / (rate * machine.multiprocessors) + rounds * (
            COSTS.block_latency + meeting
        )


class WarpgroupTemplate(MatmulTemplate[WarpgroupKnobs]):
    """Products of warpgroups (:mod:`.warpgroup_matmul`)."""

    name = "gpu.matmul_warpgroups"
    version = 2
    knobs = WarpgroupKnobs
    workload = WarpgroupWorkload

    def default(self, workload: MatmulWorkload, machine: GPUInfo) -> WarpgroupKnobs:
        """Return the tile of the least predicted time."""
        extents = workload.batches, workload.m, workload.n, workload.k
        assert isinstance(workload, WarpgroupWorkload), "the rule gives it no other"
        tile = fastest_tile(*extents, workload.type, machine)
        return WarpgroupKnobs(tile.columns, tile.cluster, tile.warpgroups, tile.stages)

    def settings(self, workload: MatmulWorkload, machine: GPUInfo) -> Iterator[WarpgroupKnobs]:
        """Yield tiles of one and two warpgroups with all stages that fit."""
        for columns, cluster, warpgroups in itertools.product((256, 128, 64), (1, 2), (2, 1)):
            most = WarpgroupTile(columns, cluster, warpgroups).stages
            if cluster <= machine.multiprocessors:
                for stages in range(most, 2, -1):
                    yield WarpgroupKnobs(columns, cluster, warpgroups, stages)

    def kernel(
        self, func: tirx.PrimFunc, workload: MatmulWorkload, knobs: WarpgroupKnobs, gpu: GPUInfo
    ) -> tirx.PrimFunc:
        """Write the kernel."""
        assert isinstance(workload, WarpgroupWorkload), "the rule gives it no other"
        func, matmul = along_depth(func, _read(func))
        return warpgroup_kernel(func, matmul, knobs.tile(workload.type), gpu)

    def cycles(self, workload: MatmulWorkload, knobs: WarpgroupKnobs, machine: GPUInfo) -> float:
        """Return the cycles of a multiprocessor with its share of the tiles."""
        extents = workload.batches, workload.m, workload.n, workload.k
        assert isinstance(workload, WarpgroupWorkload), "the rule gives it no other"
        return knobs.tile(workload.type).cycles(*extents, machine)


def _read(func: tirx.PrimFunc) -> MatmulFunction:
    matmul = read_matmul(func)
    assert matmul is not None, "the workload was read from another function"
    return matmul


TILES, ROWS, WARPGROUPS = TilesTemplate(), RowsTemplate(), WarpgroupTemplate()
