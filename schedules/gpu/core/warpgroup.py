# SPDX-License-Identifier: Apache-2.0
"""Matrix products of warpgroups, and the bulk copies that feed them: the tensor cores of sm_90a.

A warpgroup is 128 threads, which multiply 64 rows by up to 256 columns at once. Both factors lie in
shared memory, where another thread has copied them to by maps of tensors; the products are
asynchronous, too. Barriers in shared memory tell each side when a stage is filled, and when it is
free. Blocks of a cluster may each copy a part of a factor that all of them multiply by, to all at
once. The layouts are those of the PTX manual, sections ``wgmma.mma_async`` (canonical layouts with
a swizzle of 128 bytes, and without any) and ``cp.async.bulk.tensor``. A map is encoded by the host
for each call.

Factors of 16 bits lie along either axis, those of bytes and of float32 along the reduced one. Of
float32 the product drops the bits that TF32 lacks. So warps round the left factor on its way from
shared memory to registers; the right one has to be rounded in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.index_math import i64
from schedules.tir.statements import when

from . import cluster_intrinsics
from .intrinsics import sync
from .kernel_function import ROLLED
from .tensor_core import CHUNK, MatrixType, RegisterOperations

Index: TypeAlias = "tirx.Expr | int"
Fetch = Callable[[tirx.Expr, tirx.Expr, tirx.Expr], None]
"""Function that begins to copy a step to a byte of the stages, all bytes of its stage, and has the
copies tell a barrier."""

WARPGROUP = 128
"""Threads that multiply together."""
ROWS = 64
"""Rows of a product of a warpgroup."""
LINE = 128
"""Bytes of the reduced axis in a stage, and of a line, within which chunks of 16 are swizzled."""
STEPS = 4
"""Products of a stage, each of 32 bytes of the reduced axis."""
DEPTH = 64
"""Elements of 16 bits of the reduced axis in a stage."""
STEP = DEPTH // STEPS
"""The same in a product."""
PATTERN = 8 * LINE
"""Bytes after which the swizzle repeats, to a multiple of which a factor's tile is aligned."""

_SWIZZLE = 3  # Swizzle of a map: 128 bytes.
_PROMOTE = 2  # lines of 128 bytes in the second-level cache
_DESCRIPTOR_SWIZZLE = 1 << 62  # 128 bytes
_UNIT = 4  # bits of an address that a descriptor leaves out
# Registers of a thread. At the launch 384 threads have 168 each, the multiple of 8 that fits. Two
# warpgroups take exactly what one gives up, so that none waits for ever.
_GIVEN, _TAKEN = 24, 240

# Else the compiler reads a sum before the wait for what adds to it, or writes a factor's register
# before the wait for what reads it.
_SETTLE = """
__forceinline__ __device__ void tvm_fusion_settle_{dtype}({dtype}& value) {{
  asm volatile("" : "+{letter}"(value) :: "memory");
}}
"""
_REGISTERS = {"float32": ("float", "f"), "uint32": ("unsigned", "r")}

# Not of the scope of the cluster, which would wait for all memory in each step: the other block
# reads nothing that this thread has written, and its copies only follow products that are done.
_ARRIVE = """
__forceinline__ __device__ void tvm_fusion_arrive(unsigned int barrier, int rank) {
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
               " mbarrier.arrive.shared::cluster.b64 _, [there]; }"
               :: "r"(barrier), "r"(rank) : "memory");
}
"""


@dataclass(frozen=True)
class FactorLayout:
    """Tile of a factor in shared memory, as products of warpgroups read it.

    A line is 128 bytes along the reduced axis. Of 16-bit elements it may lie along the rows, if
    neighbours in memory lie there; then 64 lines are a block, and further rows are in further
    blocks.

    Parameters
    ----------
    rows : int
        Rows of the left factor's tile, or columns of the right one's: a multiple of 64.
    rows_first : bool
        Whether lines lie along the rows.
    parts : int
        Equal parts of the rows, each copied by one block of a cluster to all of them.
    itemsize : int
        Bytes of an element.
    """

    rows: int
    rows_first: bool
    parts: int = 1
    itemsize: int = 2

    @property
    def box(self) -> tuple[int, int]:
        """Elements of a line, and lines, of a copy."""
        return LINE // self.itemsize, DEPTH if self.rows_first else self.rows // self.parts

    @property
    def boxes(self) -> range:
        """First row of each copy of a part; its bytes begin where :meth:`place` has the row."""
        rows = self.rows // self.parts
        return range(0, rows, DEPTH if self.rows_first else rows)

    @property
    def descriptor(self) -> int:
        """Descriptor without the address: the distances of blocks and of eight lines."""
        block = DEPTH * LINE if self.rows_first else 1 << _UNIT  # unused where there is one block
        return _DESCRIPTOR_SWIZZLE | PATTERN >> _UNIT << 32 | block >> _UNIT << 16

    def chunk(self, row: tirx.Expr, number: tirx.Expr) -> tirx.Expr:
        """Byte of a chunk of a row, where lines are of rows."""
        return row * LINE + (number ^ row % 8) * CHUNK

    def place(self, row: Index, step: int = 0) -> Index:
        """Byte where a part or a multiple of 64 rows, and a product's part of a stage, begin."""
        return row * LINE + step * (STEP * LINE if self.rows_first else LINE // STEPS)


@dataclass(frozen=True)
class ChunkLayout:
    """The same of a tensor in blocks of 16 bytes of channels: without a swizzle.

    Chunks are 16 bytes along the reduced axis, or, of 16-bit elements, along the rows. Eight of
    them that follow each other are a matrix.

    Parameters
    ----------
    rows, rows_first : int, bool
        Number of rows, and whether they come first, as in :class:`FactorLayout`.
    row_bytes, depth_bytes : int
        Distances of matrices that are neighbours along the rows and along the reduced axis.
    parts : int
        Equal parts of the rows where chunks lie along them, else of the reduced axis, each copied
        by one block of a cluster to all of them.
    """

    rows: int
    rows_first: bool
    row_bytes: int
    depth_bytes: int
    parts: int = 1

    @property
    def descriptor(self) -> int:
        """Descriptor without the address: both distances."""
        return self.row_bytes >> _UNIT << 32 | self.depth_bytes >> _UNIT << 16

    def part(self, number: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """First row of a part, and its first chunk along the reduced axis."""
        if self.rows_first:
            return number * i64(self.rows // self.parts), i64(0)
        return i64(0), number * i64(LINE // CHUNK // self.parts)

    def chunk(self, row: tirx.Expr, number: tirx.Expr) -> tirx.Expr:
        """Byte of a chunk of a row, where chunks are of rows."""
        return row * CHUNK + number * self.depth_bytes

    def place(self, row: Index, step: int = 0) -> Index:
        """Byte where a part or a multiple of 64 rows, and a product's part of a stage, begin."""
        return row * (self.row_bytes // 8) + 2 * step * self.depth_bytes


Layout: TypeAlias = FactorLayout | ChunkLayout


@dataclass(frozen=True)
class BulkSource:
    """A tensor of which boxes are copied, zeros outside of it.

    Parameters
    ----------
    buffer : tirx.Buffer
        The tensor.
    extents : tuple[tirx.Expr, ...]
        Extents of its axes, that of neighbours first.
    strides : tuple[tirx.Expr, ...]
        Distances of the elements of all axes but the first.
    box : tuple[int, ...]
        Elements along each axis that are copied at once; times their steps at most 256.
    steps : tuple[int, ...]
        Distances of these elements along each axis; none for neighbours.
    words : int
        Elements of the tensor that are one along the first axis, all neighbours: 1, or those of
        eight bytes.
    is_swizzled : bool
        Whether chunks are swizzled within lines, as in :class:`FactorLayout`.
    """

    buffer: tirx.Buffer
    extents: tuple[tirx.Expr, ...]
    strides: tuple[tirx.Expr, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    words: int = 1
    is_swizzled: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DataType(str(self.buffer.dtype)).bits // 8


class WarpgroupCore(RegisterOperations):
    """Emitter of the instructions of one kernel, inside its launch.

    Parameters
    ----------
    kind : MatrixType
        Type of the factors.
    stages, stage_bytes : int
        Stages in shared memory, and bytes of each.
    warpgroups : int
        Warpgroups that multiply.
    thread : tirx.Expr
        The thread; behind those of the warpgroups there are :meth:`producers`.
    cluster : int
        Blocks that share copies.
    rank : tirx.Expr
        Number of the block among them.
    kept_bytes : int
        Shared memory behind the stages, which is filled once.
    moves_registers : bool
        Whether two warpgroups take registers that a warpgroup of producers gives up.
    """

    def __init__(
        self,
        kind: MatrixType,
        stages: int,
        stage_bytes: int,
        warpgroups: int,
        thread: tirx.Expr,
        cluster: int,
        rank: tirx.Expr,
        kept_bytes: int = 0,
        moves_registers: bool = False,
    ):
        self.type, self.stages, self.stage_bytes = kind, stages, stage_bytes
        self.moves_registers = moves_registers
        self.kept_bytes = kept_bytes
        self.cluster, self.rank = cluster, rank
        self.threads, self.thread = warpgroups * WARPGROUP, thread
        self._left: tirx.Buffer | None = None  # a stage of it, where it is rounded
        size = self.shared_bytes(stages, stage_bytes, kept_bytes)
        shared = T.alloc_buffer((size,), "uint8", scope="shared.dyn")
        begin = T.cuda.cvta_generic_to_shared(shared.data)
        self._base = T.bind((begin + _u32(PATTERN - 1)) & _u32(-PATTERN & 0xFFFFFFFF))
        self._filled = self._base + _u32(stages * stage_bytes + kept_bytes)
        self._free = self._filled + _u32(8 * stages)
        self._kept = self._free + _u32(8 * stages)
        with when(tirx.EQ(thread, 0)):
            for stage in range(stages):
                self._initialize(self._filled + _u32(8 * stage), 1)
                self._initialize(self._free + _u32(8 * stage), cluster * self.threads // 32)
            if kept_bytes:
                self._initialize(self._kept, 1)
            T.evaluate(T.ptx["fence.mbarrier_init.release.cluster"]())
        self._meet()

    @property
    def kept(self) -> tirx.Expr:
        """Byte where what is kept begins."""
        return _u32(self.stages * self.stage_bytes)

    def _meet(self) -> None:
        """Emit a barrier of the cluster, or of the block that is alone."""
        if self.cluster == 1:
            sync()
        else:
            cluster_intrinsics.arrive()
            cluster_intrinsics.wait()

    @staticmethod
    def producers(moves_registers: bool = False) -> int:
        """Threads of a block beside those of the warpgroups; one of them copies."""
        return WARPGROUP if moves_registers else 32

    @staticmethod
    def launch_cluster(size: int) -> AbstractContextManager[object]:
        """Launch so many neighbouring blocks together, to be opened inside the launch of blocks."""
        return nullcontext() if size == 1 else T.launch_thread("clusterCtaIdx.x", size)

    @staticmethod
    def shared_bytes(stages: int, stage_bytes: int, kept_bytes: int = 0) -> int:
        """Shared memory of a block: stages, what is kept, barriers, and what aligns them."""
        return stages * (stage_bytes + 2 * 8) + kept_bytes + 8 + PATTERN

    @staticmethod
    def encode(source: BulkSource) -> tirx.Expr | None:
        """Emit what the host does before the launch; returns the map."""
        name = f"{source.buffer.name}_map"
        tensor_map = tirx.Var(name, T.handle("tensormap").ty)
        T.bind(T.tvm_stack_alloca("tensormap", 1), var=tensor_map)
        strides = [stride * i64(source.itemsize) for stride in source.strides]  # bytes
        rank, swizzle = len(source.box), _SWIZZLE if source.is_swizzled else 0
        steps = source.steps or (1,) * rank
        box = [count * step for count, step in zip(source.box, steps, strict=True)]
        arguments = (*source.extents, *strides, *box, *steps, 0, swizzle, _PROMOTE, 0)
        dtype = str(source.buffer.dtype) if source.words == 1 else "uint64"
        T.evaluate(
            T.call_packed(
                "runtime.cuTensorMapEncodeTiled",
                tensor_map,
                dtype,
                rank,
                source.buffer.data,
                *arguments,
            )
        )
        return tensor_map

    def run(
        self,
        tiles: Callable[[], AbstractContextManager[tirx.Expr]],
        steps: int,
        fetch: Callable[[tirx.Expr], Fetch],
        multiply: Callable[[tirx.Expr], None],
        sums: tirx.Buffer,
        finish: Callable[[tirx.Expr], None],
    ) -> None:
        """Emit the loops of both sides.

        Parameters
        ----------
        tiles : Callable
            Opens the loop over the block's tiles; its value is a tile.
        steps : int
            Steps of a tile.
        fetch : Callable
            Function that makes of a tile a function that copies one of its steps.
        multiply : Callable
            Adds the products of the stage at a byte to the sums.
        sums : tirx.Buffer
            The sums of a thread.
        finish : Callable
            Stores the sums of a tile.
        """
        if self.moves_registers:  # every warp of a warpgroup executes it, before all waits
            with when(self.thread >= self.threads):
                T.evaluate(T.ptx["setmaxnreg.dec.sync.aligned.u32"](_GIVEN))
        with when(tirx.EQ(self.thread, self.threads)):
            ring = _Ring(self.stages, 1)
            with tiles() as tile:
                self._fill(ring, steps, fetch(tile))
        with when(self.thread < self.threads):
            if self.moves_registers:
                T.evaluate(T.ptx["setmaxnreg.inc.sync.aligned.u32"](_TAKEN))
            ring = _Ring(self.stages, 0)
            if self.type.is_rounded:
                self._left = T.alloc_buffer((4 * STEPS,), "uint32", scope="local")
            with tiles() as tile:
                clear(sums)
                with T.serial(0, steps, annotations=ROLLED) as step:
                    ring.wait(self._filled)
                    self._issue(multiply, ring.stage)
                    self._free_stage(ring, step)
                    ring.advance()
                if self._left is None:
                    self._wait(0)
                    self._release(ring.before, True)
                self._settle(sums)
                finish(tile)
        if self.cluster > 1:  # else a block could end while another one still tells its barriers
            self._meet()

    def _free_stage(self, ring: _Ring, step: tirx.Expr) -> None:
        """Wait for products, and tell that their stage is free."""
        if self._left is None:
            # Only now the products of the step before are done, so that others follow them.
            self._wait(1)
            self._release(ring.before, step > 0)
        else:
            # The next step rounds its factor to the same registers. Meanwhile the tensor cores have
            # the other warpgroup's products.
            self._wait(0)
            self._settle(self._left)
            self._release(ring.stage, True)

    def run_chained(
        self,
        steps: tirx.Expr,
        keep: Callable[[tirx.Expr, tirx.Expr], None],
        fetch: Fetch,
        multiply: tuple[Callable[[tirx.Expr], None], Callable[[tirx.Expr], None]],
        results: tuple[tirx.Buffer, tirx.Buffer],
        left: tirx.Buffer,
        between: Callable[[tirx.Expr, Callable[[], None]], None],
        finish: Callable[[], None],
    ) -> None:
        """Emit the loops of both sides where each step has a product of the product before.

        While a step's first products are changed, the second ones of the step before go on.

        Parameters
        ----------
        steps : tirx.Expr
            Steps, at least one.
        keep : Callable
            Begins to copy what is kept to a byte, and has the copies tell a barrier.
        fetch : Fetch
            Copies a step.
        multiply : tuple[Callable, Callable]
            The first one sets the first results, the second one adds to the second results.
        results : tuple[tirx.Buffer, tirx.Buffer]
            Both results of a thread.
        left : tirx.Buffer
            Registers of the second products' left factor.
        between : Callable
            Makes the left factor of the first results, from a step's number and a function that
            waits for the second products before. Only after that function it touches the second
            results and the left factor.
        finish : Callable
            Stores the second results.
        """
        with when(tirx.EQ(self.thread, self.threads)):
            self._expect(self._kept, self.kept_bytes)
            keep(self.kept, self._kept)
            self._fill(_Ring(self.stages, 1), steps, fetch)
        first, second = multiply
        with when(self.thread < self.threads):
            ring = _Ring(self.stages, 0)
            T.evaluate(T.cuda.mbarrier_wait(self._kept, _u32(0)))
            ring.wait(self._filled)
            self._issue(first, ring.stage)
            self._wait(0)
            self._settle(results[0])
            between(i64(0), lambda: None)
            self._settle(results[1], left)
            ring.advance()

            def settle_before() -> None:
                self._wait(0)
                self._settle(results[1], left)
                self._release(ring.before, True)

            with T.serial(i64(1), steps, annotations=ROLLED) as step:
                ring.wait(self._filled)
                self._issue(first, ring.stage)
                self._issue(second, ring.before)
                self._wait(1)
                self._settle(results[0])
                between(step, settle_before)
                self._settle(results[1], left)
                ring.advance()
            self._issue(second, ring.before)
            self._wait(0)
            self._settle(results[1])
            finish()

    def _fill(self, ring: _Ring, steps: Index, fetch: Fetch) -> None:
        """Emit the copies of some steps, each after its stage is free."""
        begin = 0 if isinstance(steps, int) else i64(0)
        with T.serial(begin, steps, annotations=ROLLED) as step:
            ring.wait(self._free)
            filled = T.bind(self._filled + ring.stage * _u32(8))
            self._expect(filled, self.stage_bytes)
            fetch(step, ring.stage * _u32(self.stage_bytes), filled)
            ring.advance()

    def _expect(self, barrier: tirx.Expr, size: int) -> None:
        expect = T.ptx["mbarrier.arrive.expect_tx.shared::cta.b64"]
        T.evaluate(expect(barrier, _u32(size)))

    def _issue(self, multiply: Callable[[tirx.Expr], None], stage: tirx.Expr) -> None:
        """Begin the products of a stage, as one group."""
        T.evaluate(T.ptx["wgmma.fence.sync.aligned"]())
        multiply(stage * _u32(self.stage_bytes))
        T.evaluate(T.ptx["wgmma.commit_group.sync.aligned"]())

    def _settle(self, *registers: tirx.Buffer) -> None:
        for buffer in registers:
            dtype, letter = _REGISTERS[str(buffer.dtype)]
            code = _SETTLE.format(dtype=dtype, letter=letter)
            for e in range(int(buffer.shape[0])):
                settle = f"tvm_fusion_settle_{dtype}"
                T.evaluate(T.cuda.func_call(settle, buffer[e], source_code=code))

    def shares(self, layout: Layout) -> Sequence[Index]:
        """The parts of a factor that the block copies."""
        return [0] if layout.parts == 1 else [self.rank]

    def copy(
        self,
        handle: tirx.Expr,
        source: BulkSource,
        coordinates: Sequence[tirx.Expr],
        place: tirx.Expr,
        filled: tirx.Expr,
        to_all: bool,
    ) -> None:
        """Begin to copy the box at some coordinates to a byte of the stages, and tell a barrier.

        ``to_all`` copies it to the same byte, and tells the same barrier, in each block of the
        cluster.
        """
        name = (
            f"cp.async.bulk.tensor.{len(source.box)}d.shared::cluster.global.tile"
            ".mbarrier::complete_tx::bytes"
        )
        where = [each.astype("int32") for each in coordinates]
        mask = [tirx.const((1 << self.cluster) - 1, "uint16")] if to_all else []
        copy = T.ptx[f"{name}.multicast::cluster" if to_all else name]
        T.evaluate(copy(self._base + place, T.address_of(handle), *where, filled, *mask))

    def multiply(
        self,
        sums: tirx.Buffer,
        left: tuple[Layout, tirx.Expr] | Sequence[tirx.Expr],
        right: tuple[Layout, tirx.Expr],
        sets: bool = False,
    ) -> None:
        """Add the products of 64 rows and of all columns, 128 bytes deep.

        ``left`` lies from a byte on, or in registers as ``mma.sync`` has it, four for each 32
        bytes. ``sets`` replaces the sums.
        """
        layouts, begins = [right[0]], [self._descriptor(*right)]
        registers: Sequence[tirx.Expr] = ()
        if not isinstance(left[0], FactorLayout | ChunkLayout):
            registers = left
        elif self._left is not None:
            registers = self._rounded(*left)
        else:
            layouts, begins = [left[0], *layouts], [self._descriptor(*left), *begins]
        columns = right[0].rows
        width = min(columns, self.type.warpgroup_columns)
        product = T.ptx[f"wgmma.mma_async.sync.aligned.m{ROWS}n{width}{self.type.warpgroup_suffix}"]
        for step, first in itertools.product(range(STEPS), range(0, columns, width)):
            part = [sums[e] for e in range(first // 2, (first + width) // 2)]
            factors = [*registers[4 * step : 4 * step + 4]]
            for begin, layout in zip(begins, layouts, strict=True):
                place = layout.place(first if layout is right[0] else 0, step)
                factors.append(begin + tirx.const(int(place) // (1 << _UNIT), "uint64"))
            options = [tirx.const(step > 0 or not sets, "bool")]
            if self.type.sums == "float32":
                options += [1, 1]  # signs
            if self.type.transposes:
                options += [int(each.rows_first) for each in layouts]
            T.evaluate(product(*part, *factors, *options))

    def _rounded(self, layout: Layout, place: tirx.Expr) -> list[tirx.Expr]:
        """A stage of 64 rows from a byte on, rounded to TF32, in registers."""
        assert self._left is not None, "it was allocated for this type"
        lane, warp = self.thread % 32, self.thread % WARPGROUP // 32
        below, beside = lane // 8 % 2, lane // 16
        row = T.bind(warp * 16 + below * 8 + lane % 8)
        for step in range(STEPS):
            byte = layout.chunk(row, 2 * step + beside)
            self.load_matrices(self._left, 4 * step, self._base + place + byte.astype("uint32"))
        T.evaluate(T.ptx["wgmma.fence.sync.aligned"]())
        return [self._left[r] for r in range(4 * STEPS)]

    def _descriptor(self, layout: Layout, place: tirx.Expr) -> tirx.Expr:
        address = (self._base + place) >> _u32(_UNIT)
        return T.bind(address.astype("uint64") | tirx.const(layout.descriptor, "uint64"))

    def _wait(self, groups: int) -> None:
        T.evaluate(T.ptx["wgmma.wait_group.sync.aligned"](groups))

    def _release(self, stage: tirx.Expr, condition: tirx.Expr | bool) -> None:
        """Tell that the warp has read a stage, each block that copies to it."""
        lane, free = self.thread % 32, self._free + stage * _u32(8)
        with when(lane < self.cluster, condition):
            if self.cluster == 1:
                T.evaluate(T.ptx["mbarrier.arrive.shared::cta.b64"](free))
            else:
                rank = lane.astype("int32")
                T.evaluate(T.cuda.func_call("tvm_fusion_arrive", free, rank, source_code=_ARRIVE))

    def _initialize(self, barrier: tirx.Expr, count: int) -> None:
        T.evaluate(T.ptx["mbarrier.init.shared::cta.b64"](barrier, _u32(count)))


def clear(sums: tirx.Buffer) -> None:
    """Emit zeros of all sums."""
    for e in range(int(sums.shape[0])):
        T.buffer_store(sums, tirx.const(0, sums.dtype), [e])


class _Ring:
    """Place of one side in the stages, in registers: the next one, the one before, and a parity."""

    def __init__(self, stages: int, parity: int):
        self._stages = stages
        self._state = T.alloc_buffer((3,), "uint32", scope="local")
        for k, value in enumerate((0, 0, parity)):
            T.buffer_store(self._state, _u32(value), [k])

    @property
    def stage(self) -> tirx.Expr:
        return self._state[0]

    @property
    def before(self) -> tirx.Expr:
        return self._state[1]

    def wait(self, barriers: tirx.Expr) -> None:
        """Emit the wait for the stage's barrier."""
        barrier = barriers + self.stage * _u32(8)
        T.evaluate(T.cuda.mbarrier_wait(barrier, self._state[2]))

    def advance(self) -> None:
        """Emit the step to the following stage; the parity changes behind the last one."""
        state = self._state
        T.buffer_store(state, state[0], [1])
        T.buffer_store(state, state[0] + _u32(1), [0])
        with when(tirx.EQ(state[0], _u32(self._stages))):
            T.buffer_store(state, _u32(0), [0])
            T.buffer_store(state, state[2] ^ _u32(1), [2])


def _u32(value: int) -> tirx.Expr:
    return tirx.const(value, "uint32")
