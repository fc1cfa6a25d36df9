# SPDX-License-Identifier: Apache-2.0
"""Tiles of a matrix product on tensor cores: their sizes, and their places in shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import tvm_ffi
from tvm import DataType, tirx

from schedules import attributes
from schedules.tir.expression_walk import is_if_then_else
from schedules.tir.extents import constant
from schedules.tir.parameter_windows import lay_out_matrix

from ...core.machine import GPUInfo
from ...core.machine_costs import COSTS
from ...core.tensor_core import CHUNK, MATRIX_TYPES, MatrixType, product_type
from ...pointwise.coalescing import classify
from ...pointwise.element_program import Read, Value
from ..implicit_gemm import Index
from .matmul_pattern import MatmulFunction, Operand, read_matmul
from .matmul_tile_sizes import assumed_size

ELEMENTS = 8  # rows of a matrix of ldmatrix, columns of a product, 16-bit elements of a chunk
STEP = 16  # rows of a product, and 16-bit elements of the reduced axis in it
MOST_STAGES = 6
DTYPES = ("float16", "bfloat16")
_MOST_SUMS = 128  # of a thread
LINE = 64  # bytes along the reduced axis in a stage


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
    chunk : int
        Elements of a chunk; lines lie along the rows only where it has eight.
    turned : bool
        Whether the elements are gathered from memory in which neighbours lie along the rows, so
        that neighbouring threads take neighbouring lines.
    """

    rows: int
    depth: int
    rows_first: bool
    is_left: bool
    chunk: int = ELEMENTS
    turned: bool = False

    @property
    def chunks(self) -> int:
        """Chunks of a line."""
        return (self.rows if self.rows_first else self.depth) // self.chunk

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
        if self.turned:
            line, chunk = number % self.lines, number // self.lines
        row, depth = (chunk * self.chunk, line) if self.rows_first else (line, chunk * self.chunk)
        return row, depth, self.place(line, chunk)

    def fragment(self, lane: Index, row: Index, depth: int) -> Index:
        """Byte of the row of a matrix that a lane gives to ``ldmatrix``.

        Its four matrices are a part of 16 rows and two chunks along the reduced axis. The second
        one is below the first in the left factor, and beside it in the right one, so that two
        registers of the right factor belong to eight columns.
        """
        matrix, line = lane // 8, lane % 8
        below, beside = (matrix % 2, matrix // 2) if self.is_left else (matrix // 2, matrix % 2)
        if self.rows_first:
            return self.place(depth + beside * 8 + line, row // ELEMENTS + below)
        return self.place(row + below * 8 + line, depth // self.chunk + beside)


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
    type : MatrixType
        Of the factors.
    """

    rows: int
    columns: int
    warp_rows: int
    warp_columns: int
    depth: int = 32
    stages: int = 3
    type: MatrixType = MATRIX_TYPES["float16"]

    def of_type(self, kind: MatrixType) -> TensorTile:
        """The same partition for factors of a type."""
        return replace(self, depth=LINE // kind.itemsize, type=kind)

    def with_stages(self, room: int) -> TensorTile:
        """The same partition with as many stages as fit some bytes of shared memory."""
        return replace(self, stages=min(MOST_STAGES, room // self.stage_bytes))

    def shared(self, extent: int, operand: Operand, is_left: bool) -> SharedTile:
        """The tile of a factor of ``extent`` rows in shared memory."""
        turned = operand.rows_first and not self.type.transposes
        rows_first = operand.rows_first and not turned
        return SharedTile(extent, self.depth, rows_first, is_left, self.type.chunk, turned)

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
        return (self.rows + self.columns) * self.depth * self.type.itemsize

    @property
    def sums(self) -> int:
        """Sums of a thread."""
        return self.warp_rows * self.warp_columns // COSTS.warp

    @property
    def registers(self) -> int:
        """An estimate of the registers of a thread, rounded up."""
        fragments = 4 * (self.warp_rows + self.warp_columns) // STEP
        return -(-(self.sums + fragments + 40) // 64) * 64


TILES = (
    TensorTile(128, 128, 64, 32),
    TensorTile(64, 128, 32, 32),
    TensorTile(64, 64, 32, 32),
    TensorTile(32, 64, 16, 32),
)


def choose_tensor_tile(
    matmul: MatmulFunction, gpu: GPUInfo, tf32: bool = False
) -> TensorTile | None:
    """The largest tile that occupies the GPU; None if the product is not one of tensor cores.

    They take factors that have a :func:`product_type`, those of float32 only if they may be rounded
    to TF32 (``tf32``), with a known length of the sums. Values of rows are subtracted from factors
    that are copied as they lie, and from those of float32.
    """
    found = matrix_type(matmul, tf32)
    if not gpu.has_tensor_cores or found is None or constant(matmul.k) is None:
        return None
    if matmul.left.shift is not None and (found.name != "tf32" or not _is_whole(matmul.left)):
        return None
    batches, m, n = (assumed_size(e) for e in (matmul.batches, matmul.m, matmul.n))
    chosen = _with_large_warps(tile_of_sizes(batches, m, n, gpu).of_type(found), matmul, gpu)
    values = () if matmul.statistics is None else matmul.statistics.names
    room = gpu.shared_bytes - chosen.rows * sum(DataType(v.ty.dtype).bits // 8 for v in values)
    return chosen.with_stages(room)


def tile_of_sizes(batches: int, m: int, n: int, gpu: GPUInfo) -> TensorTile:
    """The largest partition that occupies the GPU and is mostly in use, else the smallest."""
    for tile in TILES:
        blocks = batches * -(-m // tile.rows) * -(-n // tile.columns)
        wasted = blocks * tile.rows * tile.columns > 1.5 * batches * m * n
        if not wasted and blocks >= gpu.multiprocessors:
            return tile
    return TILES[-1]


def _with_large_warps(tile: TensorTile, matmul: MatmulFunction, gpu: GPUInfo) -> TensorTile:
    """The tile with as many rows as columns a warp, where they are many and the grid is large.

    Warps then load a third less from shared memory. With half the warps, each multiprocessor needs
    as many blocks as fit, and all registers are for sums, so that nothing may be held on the way.
    """
    large = replace(tile, warp_columns=tile.warp_rows)
    m, n = assumed_size(matmul.m), assumed_size(matmul.n)
    blocks = assumed_size(matmul.batches) * -(-m // large.rows) * -(-n // large.columns)
    resident = COSTS.register_file // (large.registers * large.threads)
    is_copied_whole = all(
        is_copied(operand, large.shared(extent, operand, is_left))
        for operand, extent, is_left in (
            (matmul.left, large.rows, True),
            (matmul.right, large.columns, False),
        )
    )
    wanted = large.sums == _MOST_SUMS and tile.sums < large.sums and matmul.is_plain
    enough = blocks >= resident * gpu.multiprocessors
    return large if wanted and enough and is_copied_whole else tile


def _is_whole(operand: Operand) -> bool:
    """Return whether a factor of float32 is copied as it lies, whatever the tile."""
    return is_copied(operand, SharedTile(STEP, LINE // 4, operand.rows_first, True, CHUNK // 4))


def matrix_type(matmul: MatmulFunction, tf32: bool) -> MatrixType | None:
    """Types of both factors, if tensor cores take them and sum as the product does."""
    left, right = (str(element(operand).ty.dtype) for operand in (matmul.left, matmul.right))
    found = product_type(left, right)
    if found is None or found.sums != matmul.dtype or (found.name == "tf32" and not tf32):
        return None
    return found


def element(operand: Operand) -> tirx.Expr:
    """An element of a factor before its conversion to the type of the sums."""
    return operand.value.value if isinstance(operand.value, tirx.Cast) else operand.value


def allows_tf32(func: tirx.PrimFunc) -> bool:
    """Return whether the attribute :data:`schedules.attributes.TF32` is set."""
    return bool(func.attrs and func.attrs.get(attributes.TF32, False))


def rounded_position(func: tirx.PrimFunc, right: Operand) -> int | None:
    """Position of a right factor that can be rounded to TF32 before: a constant; else None."""
    read = copied_read(right)
    return _constant_position(func, read) if read is not None and allows_tf32(func) else None


def _constant_position(func: tirx.PrimFunc, read: Read) -> int | None:
    constants = map(int, func.attrs.get(attributes.CONSTANTS, ()))
    return next((k for k in constants if func.params[k].same_as(read.buffer)), None)


def along_depth(
    func: tirx.PrimFunc, matmul: MatmulFunction
) -> tuple[tirx.PrimFunc, MatmulFunction]:
    """A function and its product, with the right factor along the reduced axis if it is a constant.

    Tensor cores transpose matrices of 16 bits only. Of bytes and of TF32 a constant ``[K, N]`` is
    transposed when the program is compiled.
    """
    found, right = matrix_type(matmul, allows_tf32(func)), matmul.right
    depth, read = constant(matmul.k), copied_read(right)
    if found is None or found.transposes or not right.rows_first or not depth or read is None:
        return func, matmul
    place = _constant_position(func, read)
    if place is None or len(read.indices) != 2 or not read.indices[0].same_as(right.space.axes[-1]):
        return func, matmul
    func = lay_out_matrix(func, place, 0, depth)
    turned = read_matmul(func)
    assert turned is not None, "it is the same product"
    return func, turned


def factor_dtype(operand: Operand) -> str | None:
    """Type of a factor of 16 bits; else None."""
    dtype = str(element(operand).ty.dtype)
    return dtype if dtype in DTYPES else None


def is_copied(operand: Operand, shared: SharedTile) -> bool:
    """Return whether chunks of a factor are copied as they lie in memory, with zeros around.

    Else their elements are computed or gathered, and stored to shared memory by the threads.
    """
    read = copied_read(operand)
    if read is None or shared.turned:
        return False
    lanes = classify(operand.along_neighbours, shared.chunk)
    return lanes.is_aligned and lanes.kinds[read.var] == "vector"


def copied_read(operand: Operand) -> Read | None:
    """The read that a factor is, with zeros outside of the read's guards; None if it is none."""
    read, *rest = operand.space.steps
    value = element(operand) if operand.shift is None else operand.value.a
    if not isinstance(read, Read):
        return None
    if not rest:
        return read if read.var.same_as(value) and not read.guards else None
    [padded, *more] = rest
    if more or not isinstance(padded, Value) or not padded.var.same_as(value) or padded.guards:
        return None
    if not is_if_then_else(padded.expression):
        return None
    guard, inside, outside = padded.expression.args
    same = inside.same_as(read.var) and tvm_ffi.structural_equal([guard], list(read.guards))
    return read if same and getattr(outside, "value", None) == 0 else None
