# SPDX-License-Identifier: Apache-2.0
"""Loops on which the choice of a nest depends; default and legal knobs of the three nests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import tvm_ffi

from schedules.cost.decisions import compare
from schedules.cost.kernel_call import KernelCall
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.nests.loop_transforms import SERIAL_ELEMENTS, feeds
from schedules.errors import OpError
from schedules.tir.extents import constant
from schedules.tir.index_math import floor_power_of_two
from schedules.tir.vector_math import is_expensive
from schedules.workload.reduce import DTYPES, MAX_SUM_EXP, OPERATORS

from .coalesced_columns import ColumnVectors
from .coalesced_rows import RowVectors, StreamVectors
from .source import Axis, ReduceSource
from .tasks import Split

SYMBOLIC = 1024
"""Assumed for a symbolic extent."""


@dataclass(frozen=True)
class ReductionLoops:
    """Loops of one reduction, as far as the choice of its nest depends on them."""

    operator: str
    dtype: str
    acc_dtype: str
    """``operator``, ``dtype`` and ``acc_dtype``: operator, type of the elements, and type of the
    states in registers."""
    kinds: str  # ``P`` (parallel) or ``R`` (reduced) for each loop, outermost first.
    extents: tuple[int | None, ...]  # Iterations of each loop; None where symbolic.
    strides: tuple[tuple[int | None, ...], ...] = ()
    """Stride of each load's address along each loop; None where it is no constant."""
    has_functions: bool = False
    """Whether an element takes an elementary function, such as the exponential."""
    is_stream: bool = False
    """Whether the two innermost loops, reduced rows of parallel columns, read all their data one
    element after the other."""

    @classmethod
    def of(cls, source: ReduceSource) -> ReductionLoops:
        """The loops of a reduction."""
        strides = (
            tuple(stride if stride is None else constant(stride) for stride in load.values())
            for load in source.strides
        )
        return cls(
            operator=source.workload.operator,
            dtype=source.workload.dtype,
            acc_dtype=source.registers.acc_dtype,
            kinds="".join("R" if axis.reduced else "P" for axis in source.axes),
            extents=tuple(axis.size for axis in source.axes),
            strides=tuple(strides),
            has_functions=is_expensive(source.element),
            is_stream=_is_stream(source),
        )

    @classmethod
    def from_json(cls, text: str) -> ReductionLoops:
        """Read the JSON of a workload.

        Raises ``ValueError`` if it is anything else, or an extent is symbolic.
        """
        values = json.loads(text)
        strides = tuple(map(tuple, values["strides"]))
        loops = cls(**{**values, "extents": tuple(values["extents"]), "strides": strides})
        count = len(loops.extents)
        if not (
            loops.operator in (*OPERATORS, MAX_SUM_EXP)
            and {loops.dtype, loops.acc_dtype} <= set(DTYPES)
            and len(loops.kinds) == count == loops.kinds.count("P") + loops.kinds.count("R")
            and "R" in loops.kinds
            and all(type(extent) is int and extent > 0 for extent in loops.extents)
            and (not loops.is_stream or loops.kinds.endswith("RP"))
        ):
            raise ValueError(f"{text:.100} describes no reduction")
        return loops

    @property
    def is_static(self) -> bool:
        """Return whether all extents are known."""
        return None not in self.extents

    @cached_property
    def parallel(self) -> tuple[int | None, ...]:
        """Extents of the parallel loops."""
        return self._extents_of("P")

    @cached_property
    def reduced(self) -> tuple[int | None, ...]:
        """Extents of the reduced loops."""
        return self._extents_of("R")

    def _extents_of(self, kind: str) -> tuple[int | None, ...]:
        pairs = zip(self.kinds, self.extents, strict=True)
        return tuple(extent for own, extent in pairs if own == kind)

    @cached_property
    def elements(self) -> int | None:
        """Reduced elements in all; None where an extent is symbolic."""
        return None if None in self.extents else estimate(self.extents)

    @property
    def is_arg(self) -> bool:
        """Return whether the result is a position."""
        return self.operator in ("argmin", "argmax")

    @property
    def is_heavy(self) -> bool:
        """Return whether a step is so long that unrolling it less compiles and runs as fast."""
        return self.is_arg or self.has_functions

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return tvm_ffi.dtype(self.dtype).itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of a state in registers, without its position."""
        return tvm_ffi.dtype(self.acc_dtype).itemsize


def estimate(extents: tuple[int | None, ...]) -> int:
    """Product of extents; a symbolic one counts as :data:`SYMBOLIC`."""
    return math.prod(SYMBOLIC if extent is None else extent for extent in extents)


def _is_stream(source: ReduceSource) -> bool:
    """Return whether each row begins where the previous one ends, at all addresses."""
    if len(source.axes) < 2 or source.workload.is_arg:
        return False
    rows, columns = source.axes[-2:]
    if columns.reduced or not rows.reduced or columns.size is None:
        return False
    if source.bare & {rows.var, columns.var}:
        return False
    return all(_is_contiguous(strides, rows, columns) for strides in source.strides)


def _is_contiguous(strides: dict, rows: Axis, columns: Axis) -> bool:
    row, column = strides[rows.var], strides[columns.var]
    if row is None or column is None:
        return False
    return tvm_ffi.structural_equal(row, column * columns.extent)


_VECTORS = 8
"""Independent states: four cycles of latency at two vectors a cycle."""

_FEW_VECTORS = 4  # where elements or states need more registers
_MOST_VECTORS = 16  # Vectors of a stream, and in the spaces.
_LEAST_LANES = 4  # shorter rows are read by elements
_ROWS = 8  # streams that the prefetcher follows at once
_SHORT = 16  # iterations of the innermost reduced loop that are unrolled whole
_UNROLLED = 64  # vectors of elements
_UNROLLED_HEAVY = 8
_STATE_BYTES = 8 * 1024
_LEAST_CHUNK_BYTES = 16 * 1024  # narrower pieces of rows cost bandwidth
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # Counts of vectors, rows and outputs in the spaces.
_TILES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class RowKnobs(Split, RowVectors):
    """Knobs of :mod:`.coalesced_rows`."""


@dataclass(frozen=True)
class ColumnKnobs(Split, ColumnVectors):
    """Knobs of :mod:`.coalesced_columns`."""


@dataclass(frozen=True)
class StreamKnobs(Split, StreamVectors):
    """Knobs of a stream (:mod:`.coalesced_rows`)."""


def prefers_rows(loops: ReductionLoops, cpu: CPUInfo) -> bool:
    """Return whether vectors run along the innermost loop, a reduced one.

    Where that is short, they run better across the rows, whose strided loads cost less then.
    """
    if loops.kinds[-1] == "P":
        return False
    size = loops.extents[-1]
    lanes = cpu.lanes(loops.acc_dtype)
    if not loops.parallel or size is None or size >= 2 * lanes or not loops.is_heavy:
        return True
    outputs = loops.parallel[-1]
    return not (outputs is None or outputs >= size)


def default_rows(loops: ReductionLoops, cpu: CPUInfo) -> RowKnobs:
    """Vectors of a row, and neighbouring rows together where one is short."""
    lanes, size = cpu.lanes(loops.acc_dtype), loops.reduced[-1]
    most = _FEW_VECTORS if loops.is_heavy else _VECTORS
    if size is None:
        rows = RowVectors(lanes, most, 1)
    else:
        lanes = min(lanes, floor_power_of_two(size)) if size >= _LEAST_LANES else 1
        rows = RowVectors(lanes, min(most, size // lanes), 1)
    split = _split(loops, cpu, loops.parallel, rows.step)
    outputs = _together(loops, cpu, rows, split)
    return RowKnobs(rows.lanes, rows.vectors, outputs, split.threads, split.parts, split.axis)


def _together(loops: ReductionLoops, cpu: CPUInfo, rows: RowVectors, split: Split) -> int:
    """Number of neighbouring outputs of a task, so that it reads long pieces of memory."""
    *outer, last = loops.reduced
    neighbours = loops.parallel[-1] if loops.parallel else None
    if not outer or loops.elements is None or neighbours is None or split.parts > 1:
        return 1
    if loops.elements * loops.item_bytes <= cpu.l2_bytes:
        return 1
    row_bytes = int(last or 1) * loops.item_bytes
    most = min(_STATE_BYTES // (rows.step * loops.state_bytes), _LEAST_CHUNK_BYTES // row_bytes)
    return max(
        number
        for number in range(1, max(1, most) + 1)
        if neighbours % number == 0
        and (number == 1 or feeds(estimate(loops.parallel) // number, cpu.num_cores))
    )


def all_rows(loops: ReductionLoops, cpu: CPUInfo) -> Iterator[RowKnobs]:
    """Whole or half vectors, several of them, outputs together or parts of each; see ``splits``."""
    *outer, last = loops.reduced
    size, default = int(last or 1), default_rows(loops, cpu)
    neighbours = int(loops.parallel[-1] or 1) if outer and loops.parallel else 1
    for lanes, vectors in product(_halved(default.lanes), _COUNTS):
        rows = RowVectors(lanes, vectors, 1)
        if rows.step > size:
            continue
        for split in splits(loops, cpu, rows.step):
            yield RowKnobs(lanes, vectors, 1, split.threads, split.parts, split.axis)
            together = _COUNTS[1:] if split.parts == 1 else ()
            for outputs in together:
                states = outputs * rows.step * loops.state_bytes
                if neighbours % outputs == 0 and states <= _STATE_BYTES:
                    yield RowKnobs(lanes, vectors, outputs, split.threads)


def default_columns(loops: ReductionLoops, cpu: CPUInfo) -> ColumnKnobs:
    """Vectors of a tile with the least waste, and tiles whose states the L1 cache holds."""
    lanes, size, cores = cpu.lanes(loops.acc_dtype), loops.parallel[-1], cpu.num_cores
    if size is None:
        rows = _rows_together(loops, _FEW_VECTORS)
        threads = cores > 1 and _worth_threads(loops, cores)
        return ColumnKnobs(lanes, _FEW_VECTORS, 1, rows, threads)
    lanes = min(lanes, floor_power_of_two(size))
    vectors = min(
        range(1, min(_VECTORS, size // lanes) + 1),
        key=lambda number: (-(-size // (number * lanes)) * max(number, 4), -number),
    )
    rows = _rows_together(loops, vectors)
    tiles = -(-size // (vectors * lanes))
    vector_bytes = cpu.vector_bits // 8
    most = max(1, _STATE_BYTES // (vector_bytes * vectors))
    if estimate(loops.reduced) <= _SHORT:
        most = 1  # all states of a tile are in registers
    chunks = -(-tiles // most)
    split = Split(threads=cores > 1 and _worth_threads(loops, cores))
    if split.threads and not feeds(estimate(loops.parallel[:-1]) * chunks, cores):
        row_bytes = size // lanes * vector_bytes
        in_cache = (loops.elements or cpu.l2_bytes) * vector_bytes // lanes
        if row_bytes >= cores * _LEAST_CHUNK_BYTES or in_cache < cpu.l2_bytes:
            chunks = min(tiles, -(-chunks // cores) * cores)
        else:
            split = _parts(loops, cores, rows)
    together = -(-tiles // chunks)
    return ColumnKnobs(lanes, vectors, together, rows, split.threads, split.parts, split.axis)


def _rows_together(loops: ReductionLoops, vectors: int) -> int:
    """Number of iterations of the innermost reduced loop that are unrolled."""
    most = (_UNROLLED_HEAVY if loops.is_heavy else _UNROLLED) // vectors
    size = loops.reduced[-1]
    if size is not None and size <= min(most, _SHORT):
        return size
    return max(1, min(_ROWS, most))


def all_columns(loops: ReductionLoops, cpu: CPUInfo) -> Iterator[ColumnKnobs]:
    """Whole or half vectors, tiles of several, rows at once, and tiles or parts for a task."""
    size, last = int(loops.parallel[-1] or 1), int(loops.reduced[-1] or 1)
    default = default_columns(loops, cpu)
    for lanes, vectors, rows in product(_halved(default.lanes), _COUNTS[:6], _COUNTS):
        tile, unrolled = lanes * vectors, vectors * rows
        if tile > size or rows > last or unrolled > _UNROLLED:
            continue
        tiles = -(-size // tile)
        states = tile * loops.state_bytes
        counts = {min(count, tiles) for count in _TILES if count * states <= 2 * _STATE_BYTES}
        for together in sorted(counts | {1}):
            for split in splits(loops, cpu, rows):
                yield ColumnKnobs(
                    lanes, vectors, together, rows, split.threads, split.parts, split.axis
                )


def find_stream(loops: ReductionLoops, cpu: CPUInfo) -> StreamVectors | None:
    """Find a stream through the two innermost loops; None if they are no narrow stream."""
    lanes, columns = cpu.lanes(loops.acc_dtype), loops.extents[-1]
    if not loops.is_stream or columns is None:
        return None
    vectors = math.lcm(columns, lanes) // lanes
    if vectors > _MOST_VECTORS or columns > _VECTORS * lanes:
        return None
    repeats, rows = max(1, _VECTORS // vectors), loops.extents[-2]
    if rows is not None:  # rather fewer vectors than a rest
        steps, rest = divmod(rows * columns, vectors * lanes)
        even = [n for n in range(repeats // 2 + 1, repeats + 1) if rest == 0 == steps % n]
        repeats = max(even, default=repeats)
    return StreamVectors(lanes, vectors * repeats)


def default_stream(loops: ReductionLoops, cpu: CPUInfo) -> StreamKnobs:
    """Knobs of the stream that :func:`find_stream` finds.

    Raises ``OpError`` if there is none.
    """
    stream = find_stream(loops, cpu)
    if stream is None:
        raise OpError(f"{loops} is not a stream; expected reduced rows of a few columns")
    step = -(-stream.step // int(loops.extents[-1] or 1))
    split = _split(loops, cpu, loops.parallel[:-1], step)
    return StreamKnobs(stream.lanes, stream.vectors, split.threads, split.parts, split.axis)


def all_streams(loops: ReductionLoops, cpu: CPUInfo) -> Iterator[StreamKnobs]:
    """Whole or half vectors, any number of which is a multiple of the columns; see ``splits``."""
    columns = int(loops.extents[-1] or 1)
    for lanes in _halved(cpu.lanes(loops.acc_dtype)):
        least = math.lcm(columns, lanes) // lanes
        for vectors in range(least, max(_MOST_VECTORS, least) + 1, least):
            step = -(-lanes * vectors // columns)
            for split in splits(loops, cpu, step):
                yield StreamKnobs(lanes, vectors, split.threads, split.parts, split.axis)


def splits(
    loops: ReductionLoops,  # Loops of known extents.
    cpu: CPUInfo,
    step: int,  # Iterations of the innermost reduced loop that are done at once.
) -> Iterator[Split]:
    """One thread; all of them; a part, or two, of a reduced loop for each of them."""
    yield Split(threads=False)
    cores = cpu.num_cores
    if cores == 1:
        return
    yield Split(threads=True)
    for axis, extent in enumerate(loops.reduced):
        steps = int(extent or 1) // (step if axis == len(loops.reduced) - 1 else 1)
        for parts in (cores, 2 * cores):
            if steps >= parts:
                yield Split(True, parts, axis)


def _split(loops: ReductionLoops, cpu: CPUInfo, tasks: Sequence[int | None], step: int) -> Split:
    """Share ``tasks`` out to the threads, or parts of each where there are few."""
    cores = cpu.num_cores
    if cores == 1 or not _worth_threads(loops, cores):
        return Split(threads=False)
    if feeds(estimate(tuple(tasks)), cores):
        return Split(threads=True)
    return _parts(loops, cores, step)


def _parts(loops: ReductionLoops, cores: int, step: int) -> Split:
    """Cut the outermost reduced loop that is long enough; the innermost one into whole steps."""
    symbolic = None in loops.parallel
    for position, extent in enumerate(loops.reduced):
        steps = estimate((extent,)) // (step if position == len(loops.reduced) - 1 else 1)
        if steps >= 4 * cores and not symbolic:
            return Split(True, cores, position)
    return Split(threads=True)


def _worth_threads(loops: ReductionLoops, cores: int) -> bool:
    """Return whether threads gain: waking two of them costs half of ``SERIAL_ELEMENTS`` cycles."""
    if loops.elements is None:
        return True
    functions = loops.elements if loops.has_functions else 0
    moved = loops.elements * loops.item_bytes
    sizes = {"activation_bytes": moved, "functions": functions}
    op = "cpu.coalescedreduce"
    threads = KernelCall(op, {**sizes, "parallel": 1}, flops=loops.elements, read_bytes=moved)
    share = replace(threads, sizes={**sizes, "parallel": 0})  # Share of a core, if all had one.
    work = loops.elements * (8 if functions else 1)
    comparison = compare(
        "split",
        f"{loops.operator} of {loops.elements} elements",
        {"threads": [threads], "one thread": [share] * cores},
        0.0,
        {"threads": (work + SERIAL_ELEMENTS) / 2, "one thread": work},
    )
    return comparison.chosen == "threads"


def _halved(lanes: int) -> tuple[int, ...]:
    """Whole vectors, and half ones if they have four lanes at least."""
    return (lanes, lanes // 2) if lanes >= 2 * _LEAST_LANES else (lanes,)
