# SPDX-License-Identifier: Apache-2.0
"""Space of the two loops of a coalesced reduction, and the other tensors in it.

``m`` numbers the results, ``n`` the elements that each is reduced from. A tensor *of rows* has an
element for each ``m``, in this order; a tensor *of tiles* has one for each ``(m, n)`` where the
data of the reduction has it.

A group of reductions can also store tensors that it does not need. The calls that make them are
*before* the group if it is computed from them, with calls between that become members, too. They
are *beside* it if they read what it reads, at the same place: as one kernel they read it once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

from tvm import relax, tirx
from tvm.ir import Range
from tvm.sym import Analyzer

from schedules.cost.decisions import compare
from schedules.cost.gpu_kernels import STORE
from schedules.cost.kernel_call import KernelCall
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS
from schedules.tir.extents import Extent, extent_of, is_one, size_of, unravel
from schedules.tir.index_math import i64, ravel
from schedules.workload.reduce import CanonicalLoops, ReduceWorkload

from ..core.prim_functions import ElementFunction
from .tir_calls import TIRCalls, count_bytes

ROW, TILE = "row", "tile"
Shape: TypeAlias = "Sequence[tirx.Expr]"


class RowSpace:
    """Common space of reductions that one kernel can compute.

    ``shape``: of the data. ``workload``: with the reduced axes. ``outputs`` and ``reduced``: ``M``
    and ``N``. ``runs`` and ``form``: as in :class:`~schedules.workload.reduce.CanonicalLoops`.
    """

    def __init__(self, shape: relax.ShapeExpr, workload: ReduceWorkload) -> None:
        loops = CanonicalLoops(tuple(map(extent_of, shape)), workload.axes)
        self.outputs, self.reduced, self.runs = loops.outputs, loops.reduced, loops.runs
        self.form = loops.form
        self.m, self.n = tirx.Var("m", "int64"), tirx.Var("n", "int64")
        self.analyzer = Analyzer()
        for var, extent in ((self.m, self.outputs), (self.n, self.reduced)):
            self.analyzer.bind(var, Range.from_min_extent(i64(0), i64(extent)))
        self.tile = self.analyzer.simplify(self._tile())

    def is_same(self, other: RowSpace) -> bool:
        """Return whether the runs have the same kinds and extents."""
        if len(self.runs) != len(other.runs):
            return False
        return all(
            kind == other_kind and self._is_equal(extent, other_extent)
            for (kind, extent), (other_kind, other_extent) in zip(
                self.runs, other.runs, strict=True
            )
        )

    def is_transposed(self, other: RowSpace) -> bool:
        """Return whether each has the rows of a matrix, of which the other has the columns."""
        pairs = zip(self.runs, other.runs, strict=False)
        return len(self.runs) == len(other.runs) == 2 and all(
            kind != other_kind and self._is_equal(extent, other_extent)
            for (kind, extent), (other_kind, other_extent) in pairs
        )

    def kind(self, tensor: relax.Expr) -> str | None:
        """:data:`ROW`, :data:`TILE`, or None, by the number of elements."""
        count = size_of(tensor.ty.shape)
        if self._is_equal(count, self.outputs):
            return ROW
        return TILE if self._is_equal(count, self.outputs * self.reduced) else None

    def agrees(
        self, function: ElementFunction | None, call: relax.Call, members: Collection[relax.Expr]
    ) -> bool:
        """Return whether a call reads tensors of ``members`` at the place that it writes.

        No element may depend on another row. One of a row may depend on any of its tile.
        """
        kind = self.kind(call)
        if function is None or kind is None:
            return False
        shape = list(call.ty.shape)
        for operand, indices in function.reads(call, self._element(kind, shape)):
            if operand not in members:
                continue
            other, extents = self.kind(operand), list(operand.ty.shape)
            if other is None:
                return False
            for place, wanted in self._places(kind, other, indices, extents):
                if not self.analyzer.can_prove_equal(place, wanted):
                    return False
        return True

    def _element(self, kind: str, shape: Shape) -> list[tirx.Expr]:
        """The indices of the element at ``m`` of rows, or at ``(m, n)`` of tiles."""
        if kind == ROW:
            return unravel(self.m, shape)
        axes = self._kinds_of_axes(shape)
        if axes is None:
            return unravel(self.tile, shape)
        element: list[tirx.Expr] = [i64(0)] * len(shape)
        for letter, var in (("P", self.m), ("R", self.n)):
            chosen = [axis for axis, of in enumerate(axes) if of == letter]
            indices = unravel(var, [shape[axis] for axis in chosen])
            for axis, index in zip(chosen, indices, strict=True):
                element[axis] = index
        return element

    def _places(
        self, kind: str, other: str, indices: list[tirx.Expr], shape: Shape
    ) -> Iterator[tuple[tirx.Expr, tirx.Expr]]:
        """Expressions that must be equal if a call of ``kind`` reads a tensor of ``other`` kind."""
        if other == ROW:
            yield _ravel(indices, shape), self.m
            return
        axes = self._kinds_of_axes(shape)
        if axes is None:
            wanted = self.tile if kind == TILE else i64(-1)  # nowhere: the row is not known
            yield _ravel(indices, shape), wanted
            return
        for letter, var in (("P", self.m), ("R", self.n)):
            chosen = [axis for axis, of in enumerate(axes) if of == letter]
            if kind == TILE or letter == "P":
                extents = [shape[axis] for axis in chosen]
                yield _ravel([indices[axis] for axis in chosen], extents), var

    def _kinds_of_axes(self, shape: Shape) -> list[str] | None:
        """Kind of each axis of tiles: ``P`` or ``R``; None if one has parts of both."""
        kinds = ["P"] * len(shape)
        rest = [axis for axis, extent in enumerate(shape) if not is_one(extent)]
        for letter, extent in self.runs:
            size: Extent = 1
            while rest and not self._is_equal(size, extent):
                axis = rest.pop(0)
                size = size * extent_of(shape[axis])
                kinds[axis] = letter
            if not self._is_equal(size, extent):
                return None
        return kinds

    def _tile(self) -> tirx.Expr:
        """The row-major position of element ``(m, n)`` of the data."""
        indices = {
            kind: unravel(var, [extent for other, extent in self.runs if other == kind])
            for kind, var in (("P", self.m), ("R", self.n))
        }
        places = [indices[kind].pop(0) for kind, _ in self.runs]
        return ravel(places, [extent for _, extent in self.runs])

    def _is_equal(self, a: Extent, b: Extent) -> bool:
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        return bool(self.analyzer.can_prove_equal(i64(a), i64(b)))


def _ravel(indices: Sequence[tirx.Expr], shape: Sequence[tirx.Expr]) -> tirx.Expr:
    """The row-major position of an element; along unit axes an index is 0."""
    moving = [0 if is_one(e) else index for index, e in zip(indices, shape, strict=True)]
    return ravel(moving, shape)


Agrees = Callable[[relax.Var, frozenset[relax.Expr]], bool]
"""Function that tells if a call reads the given tensors at the place that it writes."""


def is_stored(calls: TIRCalls, var: relax.Var) -> bool:
    """Return whether a tensor is stored whatever is fused: others than injective calls read it."""
    users = calls.users.get(var, set())
    return not isinstance(var, relax.DataflowVar) or any(
        not any(user in kind for kind in (calls.injective, calls.reductions, calls.columns))
        for user in users
    )


def calls_between(
    calls: TIRCalls, space: RowSpace, var: relax.Var, members: Collection[relax.Var]
) -> frozenset[relax.Var]:
    """A call and those that compute members from it; nothing if no member is."""
    after = {var}
    before: set[relax.Var] = set()  # the calls that members read
    queue = [var]
    while queue:
        current = queue.pop()
        for user in calls.users.get(current, ()):
            if user in members:
                before.add(current)
            elif user in calls.injective and user not in after and space.kind(user) is not None:
                after.add(user)
                queue.append(user)
    queue = list(before)
    while queue:
        new = after.intersection(calls.tensors(queue.pop())) - before
        before |= new
        queue += new
    return frozenset(before)


def tensors_in_place(
    calls: TIRCalls, space: RowSpace, var: relax.Var, agrees: Agrees
) -> frozenset[relax.Expr]:
    """The tensors of the size of the data from which a call and its producers are computed.

    Nothing if one of them is not read at the place that is written.
    """
    in_place: set[relax.Expr] = set()
    queue = [var]
    while queue:
        current = queue.pop()
        large = frozenset(e for e in calls.tensors(current) if space.kind(e) == TILE)
        if not agrees(current, large):
            return frozenset()
        queue += [e for e in large - in_place if e in calls.injective and not is_stored(calls, e)]
        in_place |= large
    return frozenset(in_place)


def calls_after(
    calls: TIRCalls, tensors: Collection[relax.Expr], members: Collection[relax.Var]
) -> frozenset[relax.Var]:
    """Those of some tensors that are computed from members, but are none."""
    found = set(members)
    for var in calls.injective:
        if var in tensors and not found.isdisjoint(calls.tensors(var)):
            found.add(var)
    return frozenset(found.difference(members))


def tensors_before(
    calls: TIRCalls, space: RowSpace, members: Collection[relax.Var]
) -> frozenset[relax.Expr]:
    """The tensors of the size of the data that are members, or from which members are computed."""

    def large(var: relax.Var) -> Iterator[relax.Expr]:
        return (tensor for tensor in calls.tensors(var) if space.kind(tensor) == TILE)

    tensors: set[relax.Expr] = {var for var in members if space.kind(var) == TILE}
    queue = list(members)
    while queue:
        new = set(large(queue.pop())) - tensors
        tensors |= new
        queue += [tensor for tensor in new if tensor in calls.injective]
    return frozenset(tensors)


def pays_off(
    subject: relax.Var,
    blocks: int,
    more: Collection[relax.Expr],
    alone: Collection[relax.Expr],
    gpu: GPUInfo,
) -> bool:
    """Return whether a kernel of few blocks stores a tensor faster than a kernel of its own would.

    ``blocks``: blocks of the kernel that run at once. ``more``: the tensors that the kernel moves
    in addition. ``alone``: those that a kernel of its own would move. ``gpu``: the device.
    """
    moved, apart = (sum(map(count_bytes, tensors)) for tensors in (more, alone))
    busy = min(blocks, gpu.multiprocessors)
    cycles = {
        "one kernel": moved / (busy * COSTS.memory_bytes),
        "two kernels": COSTS.launch + apart / (gpu.multiprocessors * COSTS.memory_bytes),
    }
    alternatives = {
        "one kernel": [_store(moved, busy, 0)],
        "two kernels": [_store(apart, gpu.multiprocessors, 1)],
    }
    found = compare("store", subject.name, alternatives, 0.0, cycles)
    return found.chosen == "one kernel"


def _store(moved: int, blocks: int, launches: int) -> KernelCall:
    return KernelCall(STORE, {"blocks": blocks, "launches": launches}, read_bytes=moved)
