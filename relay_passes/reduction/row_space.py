# SPDX-License-Identifier: Apache-2.0
"""Space of the two loops of a coalesced reduction, and the other tensors in it.

``m`` numbers the results, ``n`` the elements that each is reduced from. A tensor *of rows* has an
element for each ``m``, in this order; a tensor *of tiles* has one for each ``(m, n)`` where the
data of the reduction has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from tvm import relax, tirx
from tvm.ir import Range
from tvm.sym import Analyzer

from schedules.tir.extents import Extent, extent_of, is_one, size_of, unravel
from schedules.tir.index_math import i64, ravel
from schedules.workload.reduce import CanonicalLoops, ReduceWorkload

from ..core.element_function import ElementFunction

ROW, TILE = "row", "tile"
Shape: TypeAlias = "Sequence[tirx.Expr]"


class RowSpace:
    """Common space of reductions that one kernel can compute.

    Parameters
    ----------
    shape : relax.ShapeExpr
        Of the data.
    workload : ReduceWorkload
        With the reduced axes.

    Attributes
    ----------
    outputs, reduced : Extent
        ``M`` and ``N``.
    runs, form : tuple, str
        As in :class:`~schedules.workload.reduce.CanonicalLoops`.
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
        self,
        function: ElementFunction | None,
        call: relax.Call,
        members: Collection[relax.Expr],
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
        found: list[tirx.Expr] = [i64(0)] * len(shape)
        for letter, var in (("P", self.m), ("R", self.n)):
            chosen = [axis for axis, of in enumerate(axes) if of == letter]
            indices = unravel(var, [shape[axis] for axis in chosen])
            for axis, index in zip(chosen, indices, strict=True):
                found[axis] = index
        return found

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
        found = ["P"] * len(shape)
        rest = [axis for axis, extent in enumerate(shape) if not is_one(extent)]
        for letter, extent in self.runs:
            size: Extent = 1
            while rest and not self._is_equal(size, extent):
                axis = rest.pop(0)
                size = size * extent_of(shape[axis])
                found[axis] = letter
            if not self._is_equal(size, extent):
                return None
        return found

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
