# SPDX-License-Identifier: Apache-2.0
"""Tiles of a matrix product on tensor cores: their sizes, and their places in shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx

from schedules.workload.reduce import constant

from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..core.tensor_core import CHUNK
from ..pointwise.coalescing import classify
from ..pointwise.element_program import Read
from .implicit_gemm import Index
from .matmul_pattern import MatmulFunction, Operand
from .matmul_tile_sizes import assumed_size

ELEMENTS = 8  # of 16 bits in a chunk, and rows and columns of a matrix of ldmatrix
STEP = 16  # of the sums, in one product
_MOST_STAGES = 6
_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class SharedTile:
    """A factor's tile in shared memory: lines of chunks, whose order in a line is swizzled.

    The eight rows of a matrix that ``ldmatrix`` reads at once, and eight neighbouring chunks that
    are copied at once, then lie in different banks.

    Parameters
    ----------
    rows : int
        Rows of the left factor's tile, or columns of the right one's.
    depth : int
        Elements along the reduced axis.
    rows_first : bool
        Whether lines and their chunks lie along the rows, not along the reduced axis.
    is_left : bool
        Which factor it is.
    """

    rows: int
    depth: int
    rows_first: bool
    is_left: bool

    @property
    def chunks(self) -> int:
        """Chunks of a line."""
        return (self.rows if self.rows_first else self.depth) // ELEMENTS

    @property
    def lines(self) -> int:
        """Number of lines."""
        return self.depth if self.rows_first else self.rows

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.lines * self.chunks * CHUNK

    def place(self, line: Index, chunk: Index) -> Index:
        """Byte of a chunk."""
        width = min(self.chunks, 8)  # eight chunks are all banks
        mixed = chunk ^ (line // (8 // width) % width)
        return (line * self.chunks + mixed) * CHUNK

    def copied(self, number: Index) -> tuple[Index, Index, Index]:
        """Row, depth and byte of the chunk with a number, in the order in which it is copied."""
        line, chunk = number // self.chunks, number % self.chunks
        row, depth = (chunk * ELEMENTS, line) if self.rows_first else (line, chunk * ELEMENTS)
        return row, depth, self.place(line, chunk)

    def fragment(self, lane: Index, row: Index, depth: int) -> Index:
        """Byte of the row of a matrix that a lane gives to ``ldmatrix``.

        Its four matrices are a part of 16 rows and 16 elements along the reduced axis. The second
        one is below the first in the left factor, and beside it in the right one, so that two
        registers of the right factor belong to eight columns.
        """
        matrix, line = lane // 8, lane % 8
        below, beside = (matrix % 2, matrix // 2) if self.is_left else (matrix // 2, matrix % 2)
        if self.rows_first:
            return self.place(depth + beside * 8 + line, row // ELEMENTS + below)
        return self.place(row + below * 8 + line, depth // ELEMENTS + beside)


@dataclass(frozen=True)
class TensorTile:
    """Partition of a tile of the result among warps.

    Parameters
    ----------
    rows, columns : int
        Of the tile.
    warp_rows, warp_columns : int
        Of the part of a warp: multiples of 16 and of 32.
    depth : int
        Elements of the reduced axis in a stage.
    stages : int
        Stages in shared memory: one in use, the others being loaded.
    """

    rows: int
    columns: int
    warp_rows: int
    warp_columns: int
    depth: int = 32
    stages: int = 3

    @property
    def warps_across(self) -> int:
        """Warps beside each other."""
        return self.columns // self.warp_columns

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return COSTS.warp * self.warps_across * (self.rows // self.warp_rows)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage of both factors."""
        return (self.rows + self.columns) * self.depth * 2

    @property
    def sums(self) -> int:
        """Sums of a thread."""
        return self.warp_rows * self.warp_columns // COSTS.warp

    @property
    def registers(self) -> int:
        """An estimate of the registers of a thread, rounded up."""
        fragments = 4 * (self.warp_rows + self.warp_columns) // STEP
        return -(-(self.sums + fragments + 40) // 64) * 64


_TILES = (
    TensorTile(128, 128, 64, 32),
    TensorTile(64, 128, 32, 32),
    TensorTile(64, 64, 32, 32),
    TensorTile(32, 64, 16, 32),
)


def choose_tensor_tile(matmul: MatmulFunction, gpu: GPUInfo) -> TensorTile | None:
    """The largest tile that occupies the GPU; None if the product is not one of tensor cores.

    They take factors of float16, or of bfloat16, with a known length of the sums.
    """
    dtypes = {factor_dtype(operand) for operand in (matmul.left, matmul.right)}
    if not gpu.has_tensor_cores or matmul.dtype != "float32" or len(dtypes) != 1 or None in dtypes:
        return None
    if constant(matmul.k) is None:
        return None
    batches, m, n, _ = (assumed_size(e) for e in (matmul.batches, matmul.m, matmul.n, matmul.k))
    chosen = _TILES[-1]
    for tile in _TILES:
        blocks = batches * -(-m // tile.rows) * -(-n // tile.columns)
        wasted = blocks * tile.rows * tile.columns > 1.5 * batches * m * n
        if not wasted and blocks >= gpu.multiprocessors:
            chosen = tile
            break
    stages = min(_MOST_STAGES, gpu.shared_bytes // chosen.stage_bytes)
    return replace(chosen, stages=stages)


def factor_dtype(operand: Operand) -> str | None:
    """Type of a factor that tensor cores take; else None."""
    if not isinstance(operand.value, tirx.Cast):
        return None
    dtype = str(operand.value.value.ty.dtype)
    return dtype if dtype in _DTYPES else None


def is_copied(operand: Operand) -> bool:
    """Return whether chunks of a factor are copied as they lie in memory.

    Else their elements are computed or gathered, and stored to shared memory by the threads.
    """
    [*steps, read] = operand.space.steps
    if steps or not isinstance(read, Read) or read.guards:
        return False
    lanes = classify(operand.along_neighbours, ELEMENTS)
    whole = read.var.same_as(operand.value.value) and lanes.is_aligned
    return whole and lanes.kinds[read.var] == "vector"
