# SPDX-License-Identifier: Apache-2.0
"""GPU rule for functions that read along another axis than they write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from schedules.schedule_rule import KernelFacts
from schedules.tir.expression_walk import substitute, variables
from schedules.tir.extents import Extent, constant, unravel
from schedules.tir.index_math import ceildiv, i64, simplified
from schedules.tir.statements import when

from ..core.intrinsics import sync
from ..core.kernel_function import unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.rule import GPURule
from .coalescing import best_lanes, classify, injective_spaces, is_scattered
from .element_program import Read
from .iteration_domain import IterationSpace, merge_axes
from .point_kernel import Names, PointWriter, Views

_TILE = 32
_ROWS = 8
_SHORTEST = 8


@dataclass(frozen=True)
class _Crossing:
    """A space, the axis along which some reads are contiguous, and these reads."""

    space: IterationSpace
    axis: int
    reads: tuple[Read, ...]


class Transpose(GPURule):
    """Transposes and changes of layout, with what comes before and after them.

    A block loads a tile of 32 x 32 elements along the axis that is contiguous in the input and
    stores it along the one that is contiguous in the output; between the two it lies in shared
    memory, each row padded by one element to avoid bank conflicts.

    Left alone: functions for which some order of the loops lets neighbouring threads read and
    write neighbouring elements, such as permutations that keep the last axis, and NCHW4c; so many
    tensors that their tiles do not fit the shared memory.
    """

    def kernel(self, facts: KernelFacts, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        func = facts.func
        spaces = facts.read(injective_spaces)
        if not spaces or len(spaces) > 1:
            return None
        crossing = _find_crossing(merge_axes(spaces[0]))
        if crossing is None or not is_scattered(best_lanes(spaces[0])):
            return None
        if gpu.max_threads < _TILE * _ROWS or _shared_bytes(crossing) > gpu.shared_bytes:
            return None
        return write_kernels(func, lambda: _write(func, crossing, gpu))


def _find_crossing(space: IterationSpace) -> _Crossing | None:
    """Find the reads that are contiguous along one axis other than the last."""
    crossing: dict[int, list[Read]] = {}
    axes = set(space.axes)
    for step in space.steps:
        linear = space.linear(step) if isinstance(step, Read) and not step.guards else None
        if linear is None or not isinstance(step, Read) or not linear[0]:
            continue
        names = {variable for index in step.indices for variable in variables(index)}
        earlier = {other.var for other in space.steps}
        if names & earlier or not names & axes or constant(linear[0][-1]) in (0, 1):
            continue
        units = [k for k, factor in enumerate(linear[0]) if constant(factor) == 1]
        if len(units) == 1 and _is_long(space.extents[units[0]]):
            crossing.setdefault(units[0], []).append(step)
    if len(crossing) != 1 or not _is_long(space.extents[-1]):
        return None
    [(axis, reads)] = crossing.items()
    return _Crossing(space, axis, tuple(reads))


def _shared_bytes(crossing: _Crossing) -> int:
    """Shared memory of a block: one tile of each read."""
    items = [DataType(str(read.buffer.dtype)).bits // 8 or 1 for read in crossing.reads]
    return _TILE * (_TILE + 1) * sum(items)


def _is_long(extent: Extent) -> bool:
    known = constant(extent)
    return known is None or known >= _SHORTEST


def _write(func: tirx.PrimFunc, crossing: _Crossing, gpu: GPUInfo) -> None:
    space = crossing.space
    outer = [k for k in range(len(space.axes) - 1) if k != crossing.axis]
    counts: list[Extent] = [space.extents[k] for k in outer]
    counts += [ceildiv(space.extents[k], _TILE) for k in (crossing.axis, len(space.axes) - 1)]
    total = i64(1)
    for count in counts:
        total = total * i64(count)
    total = simplified(total)
    with unless_empty(total), T.launch_thread("blockIdx.x", total) as block:
        with T.launch_thread("threadIdx.x", i64(_TILE * _ROWS)) as thread:
            views = Views.declare(func, gpu)
            *others, along_input, along_output = (
                T.bind(s) for s in unravel(block, counts, is_natural=True)
            )
            fixed = dict(zip(outer, others, strict=True))
            starts = (along_input * i64(_TILE), along_output * i64(_TILE))
            _Tile(crossing, views, fixed, starts, thread).write()


class _Tile:
    """The tile of a block."""

    def __init__(
        self,
        crossing: _Crossing,
        views: Views,
        fixed: dict[int, tirx.Expr],
        starts: tuple[tirx.Expr, tirx.Expr],
        thread: tirx.Expr,
    ):
        self.crossing, self.views, self.fixed, self.starts = crossing, views, fixed, starts
        self.fast, self.slow = T.bind(thread % i64(_TILE)), T.bind(thread // i64(_TILE))
        self.shared: dict[tirx.Var, tirx.Buffer] = {}

    def write(self) -> None:
        for read in self.crossing.reads:
            dtype = "uint8" if str(read.buffer.dtype) == "bool" else read.buffer.dtype
            size = (_TILE * (_TILE + 1),)
            self.shared[read.var] = T.alloc_buffer(size, dtype, scope="shared")
        for turn in range(_TILE // _ROWS):
            self._load(self.slow + i64(turn * _ROWS))
        sync()
        for turn in range(_TILE // _ROWS):
            self._store(self.slow + i64(turn * _ROWS))

    def _place(self, across: tirx.Expr, along: tirx.Expr) -> list[tirx.Expr]:
        """Subscripts of the element ``across`` the input's rows and ``along`` the output's."""
        last = len(self.crossing.space.axes) - 1
        moving = {self.crossing.axis: self.starts[0] + across, last: self.starts[1] + along}
        return [T.bind(moving[k]) if k in moving else self.fixed[k] for k in range(last + 1)]

    def _exists(self, place: Sequence[tirx.Expr]) -> list[tirx.Expr | None]:
        """Conditions under which an element is not past the end of either axis."""
        space = self.crossing.space
        conditions: list[tirx.Expr | None] = []
        for k in (self.crossing.axis, len(space.axes) - 1):
            extent = constant(space.extents[k])
            inside = extent is not None and extent % _TILE == 0
            conditions.append(None if inside else place[k] < i64(space.extents[k]))
        return conditions

    def _load(self, along: tirx.Expr) -> None:
        space = self.crossing.space
        place = self._place(self.fast, along)
        names = dict(zip(space.axes, place, strict=True))
        with when(*self._exists(place)):
            for read in self.crossing.reads:
                position = substitute(space.position(read), names)
                value = self.views.load(read, position, names)
                tile = self.shared[read.var]
                at = along * i64(_TILE + 1) + self.fast
                T.buffer_store(tile, value.astype(tile.dtype), [at])

    def _store(self, across: tirx.Expr) -> None:
        place = self._place(across, self.fast)
        element = self.fast * i64(_TILE + 1) + across

        def fetch(read: Read, _: Names) -> tirx.Expr | None:
            tile = self.shared.get(read.var)
            if tile is None:
                return None
            is_bool = str(read.buffer.dtype) == "bool"
            return tirx.NE(tile[element], tirx.const(0, "uint8")) if is_bool else tile[element]

        lanes = classify(self.crossing.space, 1)
        with when(*self._exists(place)):
            PointWriter(lanes, self.views, [place], fetch=fetch).write()
