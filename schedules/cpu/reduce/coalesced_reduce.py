# SPDX-License-Identifier: Apache-2.0
"""CPU rule for the op ``coalesced_reduce``: chooses the nest, the vectors and the threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import tvm_ffi
from tvm import s_tir, tirx
from tvm.target import Target

from schedules.cost.decisions import compare
from schedules.cost.kernel_call import KernelCall
from schedules.schedule_rule import RULE
from schedules.tir.index_math import floor_power_of_two
from schedules.tir.vector_math import is_expensive

from ..core.rule import CPURule
from ..nests.loop_transforms import SERIAL_ELEMENTS, feeds, finish
from .coalesced_columns import ColumnVectors, reduce_columns
from .coalesced_rows import RowVectors, reduce_rows
from .coalesced_stream import StreamVectors, find_stream, reduce_stream
from .read_source import read_source
from .source import Axis, ReduceSource
from .tasks import Split

_VECTORS = 8
"""Independent states: four cycles of latency at two vectors a cycle."""

_FEW_VECTORS = 4  # where elements or states need more registers
_LEAST_LANES = 4  # shorter rows are read by elements
_ROWS = 8  # streams that the prefetcher follows at once
_SHORT = 16  # iterations of the innermost reduced loop that are unrolled whole
_UNROLLED = 64  # vectors of elements
_UNROLLED_HEAVY = 8
_STATE_BYTES = 8 * 1024
_LEAST_CHUNK_BYTES = 16 * 1024  # narrower pieces of rows cost bandwidth
_SYMBOLIC = 1024  # assumed for a symbolic extent


class CoalescedReduce(CPURule):
    """One reduction over any axes: a legalized ``coalesced_reduce``, or one of TVM's operators.

    Producers and epilogue are computed with it. Rows (:mod:`.coalesced_rows`) where the reduced
    loop scans consecutive addresses, else columns (:mod:`.coalesced_columns`), or a stream
    (:mod:`.coalesced_stream`) where there are few of them; the attribute ``RULE`` of the function
    names the choice. NaN wins every minimum and maximum, whose identity is an infinity. Left alone:
    functions with no or several reductions, consumers of another shape than the result, and
    reductions of TVM's operators under a condition (padding) or to positions.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Schedule ``func``, or return None if it holds anything else."""
        source = read_source(func, target)
        if source is None:
            return None
        form, written = _write(source)
        func = finish(written).mod["main"]
        return s_tir.Schedule(func.with_attr(RULE, f"{type(self).__name__} ({form})"))


def _write(source: ReduceSource) -> tuple[str, s_tir.Schedule]:
    """The name of the nest that suits the reduction, and the nest."""
    lanes = source.cpu.lanes(source.registers.acc_dtype)
    last = source.axes[-1]
    if last.reduced and not _has_short_rows(source, lanes):
        rows = _rows(source, lanes)
        split = _split_rows(source, rows)
        rows = replace(rows, outputs=_together(source, rows, split))
        return "rows", reduce_rows(source, rows, split)
    stream = find_stream(source, lanes)
    if stream is not None:
        return "stream", reduce_stream(source, stream, _split_stream(source, stream))
    columns, split = _columns(source, lanes)
    return "columns", reduce_columns(source, columns, split)


def _has_short_rows(source: ReduceSource, lanes: int) -> bool:
    """Return whether vectors run better across the rows, whose strided loads cost less then."""
    size = source.axes[-1].size
    if not source.parallel or size is None or size >= 2 * lanes or not _is_heavy(source):
        return False
    outputs = source.parallel[-1].size
    return outputs is None or outputs >= size


def _rows(source: ReduceSource, lanes: int) -> RowVectors:
    size = source.reduced[-1].size
    most = _FEW_VECTORS if _is_heavy(source) else _VECTORS
    if size is None:
        return RowVectors(lanes, most)
    lanes = min(lanes, floor_power_of_two(size)) if size >= _LEAST_LANES else 1
    return RowVectors(lanes, min(most, size // lanes))


def _together(source: ReduceSource, rows: RowVectors, split: Split) -> int:
    """Number of neighbouring outputs of a task, so that it reads long pieces of memory."""
    *outer, last = source.reduced
    neighbours = source.parallel[-1].size if source.parallel else None
    if not outer or source.elements is None or neighbours is None or split.parts > 1:
        return 1
    element_bytes = tvm_ffi.dtype(source.workload.dtype).itemsize
    if source.elements * element_bytes <= source.cpu.l2_bytes:
        return 1
    state_bytes = rows.step * tvm_ffi.dtype(source.registers.acc_dtype).itemsize
    row_bytes = int(last.extent) * element_bytes
    most = min(_STATE_BYTES // state_bytes, _LEAST_CHUNK_BYTES // row_bytes)
    return max(
        number
        for number in range(1, max(1, most) + 1)
        if neighbours % number == 0
        and (number == 1 or feeds(_estimate(source.parallel) // number, source.cpu.num_cores))
    )


def _split_rows(source: ReduceSource, rows: RowVectors) -> Split:
    """Threads share the rows, or parts of each row where there are few."""
    return _split(source, source.parallel, rows.step)


def _split_stream(source: ReduceSource, stream: StreamVectors) -> Split:
    return _split(source, source.parallel[:-1], -(-stream.step // int(source.axes[-1].extent)))


def _split(source: ReduceSource, tasks: Sequence[Axis], step: int) -> Split:
    """Share ``tasks`` out to the threads, or parts of each where there are few."""
    cores = source.cpu.num_cores
    if cores == 1 or not _worth_threads(source):
        return Split(threads=False)
    return Split(threads=True) if feeds(_estimate(tasks), cores) else _parts(source, step)


def _parts(source: ReduceSource, step: int) -> Split:
    """Cut the outermost reduced loop that is long enough; the innermost one into whole steps."""
    cores, reduced = source.cpu.num_cores, source.reduced
    symbolic = any(axis.size is None for axis in source.parallel)
    for position, axis in enumerate(reduced):
        steps = _estimate([axis]) // (step if position == len(reduced) - 1 else 1)
        if steps >= 4 * cores and not symbolic:
            return Split(True, cores, position)
    return Split(threads=True)


def _columns(source: ReduceSource, lanes: int) -> tuple[ColumnVectors, Split]:
    size, cores = source.parallel[-1].size, source.cpu.num_cores
    if size is None:
        rows = _rows_together(source, _FEW_VECTORS)
        threads = cores > 1 and _worth_threads(source)
        return ColumnVectors(lanes, _FEW_VECTORS, 1, rows), Split(threads)
    lanes = min(lanes, floor_power_of_two(size))
    vectors = min(
        range(1, min(_VECTORS, size // lanes) + 1),
        key=lambda number: (-(-size // (number * lanes)) * max(number, 4), -number),
    )
    rows = _rows_together(source, vectors)
    tiles = -(-size // (vectors * lanes))
    vector_bytes = source.cpu.vector_bits // 8
    most = max(1, _STATE_BYTES // (vector_bytes * vectors))
    if _estimate(source.reduced) <= _SHORT:
        most = 1  # all states of a tile are in registers
    chunks = -(-tiles // most)
    split = Split(threads=cores > 1 and _worth_threads(source))
    if split.threads and not feeds(_estimate(source.parallel[:-1]) * chunks, cores):
        row_bytes = size // lanes * vector_bytes
        in_cache = (source.elements or source.cpu.l2_bytes) * vector_bytes // lanes
        if row_bytes >= cores * _LEAST_CHUNK_BYTES or in_cache < source.cpu.l2_bytes:
            chunks = min(tiles, -(-chunks // cores) * cores)
        else:
            split = _parts(source, rows)
    return ColumnVectors(lanes, vectors, -(-tiles // chunks), rows), split


def _rows_together(source: ReduceSource, vectors: int) -> int:
    """Number of iterations of the innermost reduced loop that are unrolled."""
    most = (_UNROLLED_HEAVY if _is_heavy(source) else _UNROLLED) // vectors
    size = source.reduced[-1].size
    if size is not None and size <= min(most, _SHORT):
        return size
    return max(1, min(_ROWS, most))


def _worth_threads(source: ReduceSource) -> bool:
    """Return whether threads gain: waking two of them costs half of ``SERIAL_ELEMENTS`` cycles."""
    if source.elements is None:
        return True
    functions = source.elements if is_expensive(source.element) else 0
    moved = source.elements * tvm_ffi.dtype(source.workload.dtype).itemsize
    sizes = {"activation_bytes": moved, "functions": functions}
    op = "cpu.coalescedreduce"
    threads = KernelCall(op, {**sizes, "parallel": 1}, flops=source.elements, read_bytes=moved)
    share = replace(threads, sizes={**sizes, "parallel": 0})  # of a core, if all had one
    work = source.elements * (8 if functions else 1)
    found = compare(
        "split",
        f"{source.workload.operator} of {source.elements} elements",
        {"threads": [threads], "one thread": [share] * source.cpu.num_cores},
        0.0,
        {"threads": (work + SERIAL_ELEMENTS) / 2, "one thread": work},
    )
    return found.chosen == "threads"


def _is_heavy(source: ReduceSource) -> bool:
    """Return whether a step is so long that unrolling it less compiles faster and runs as fast."""
    return source.workload.is_arg or is_expensive(source.element)


def _estimate(axes: Sequence[Axis]) -> int:
    return math.prod(_SYMBOLIC if axis.size is None else axis.size for axis in axes)
