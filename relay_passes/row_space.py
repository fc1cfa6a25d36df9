# SPDX-License-Identifier: Apache-2.0
"""The two loops of a coalesced reduction, and which other tensors live in them.

``m`` numbers the results, ``n`` the elements that each is made of. A tensor *of rows* has an
element for each ``m``, in this order; a tensor *of tiles* has one for each ``(m, n)`` where the
data of the reduction has it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tvm import relax, tirx
from tvm.ir import Range
from tvm.sym import Analyzer

from schedules.reduce_workload import (
    CanonicalLoops,
    Extent,
    ReduceWorkload,
    constant,
    is_one,
    unravel,
)

from .element_function import ElementFunction

ROW, TILE = "row", "tile"


class RowSpace:
    """What reductions have in common if one kernel can compute them.

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
    runs : tuple
        As in :class:`~schedules.reduce_workload.CanonicalLoops`.
    """

    def __init__(self, shape: relax.ShapeExpr, workload: ReduceWorkload) -> None:
        extents = [extent if constant(extent) is None else constant(extent) for extent in shape]
        loops = CanonicalLoops(tuple(extents), workload.axes)
        self.outputs, self.reduced, self.runs = loops.outputs, loops.reduced, loops.runs
        self.m, self.n = tirx.Var("m", "int64"), tirx.Var("n", "int64")
        self.analyzer = Analyzer()
        for var, extent in ((self.m, self.outputs), (self.n, self.reduced)):
            self.analyzer.bind(var, Range.from_min_extent(_index(0), _index(extent)))
        self.tile = self.analyzer.simplify(self._tile())

    def is_same(self, other: RowSpace) -> bool:
        """Whether the runs have the same kinds and extents."""
        if len(self.runs) != len(other.runs):
            return False
        return all(
            kind == other_kind and self._is_equal(extent, other_extent)
            for (kind, extent), (other_kind, other_extent) in zip(
                self.runs, other.runs, strict=True
            )
        )

    def kind(self, tensor: relax.Expr) -> str | None:
        """:data:`ROW`, :data:`TILE`, or None, by the number of elements."""
        count: Extent = 1
        for extent in tensor.ty.shape:
            known = constant(extent)
            count = count * (extent if known is None else known)
        if self._is_equal(count, self.outputs):
            return ROW
        return TILE if self._is_equal(count, self.outputs * self.reduced) else None

    def agrees(
        self,
        function: ElementFunction | None,
        call: relax.Call,
        members: Collection[relax.Expr],
    ) -> bool:
        """Whether a call reads tensors of rows and of tiles among ``members`` where it writes.

        No element may depend on another row. One of a row may depend on any of its tile.
        """
        kind = self.kind(call)
        if function is None or kind is None:
            return False
        for operand, indices in function.reads(call, self._place(kind)):
            if operand not in members:
                continue
            other, shape = self.kind(operand), list(operand.ty.shape)
            inside = (kind, other) == (ROW, TILE)
            place = self._row_of(indices, shape) if inside else ravel(indices, shape)
            wanted = self.tile if (kind, other) == (TILE, TILE) else self.m
            if other is None or place is None:
                return False
            if not self.analyzer.can_prove_equal(place, wanted):
                return False
        return True

    def _row_of(self, indices: list[tirx.Expr], shape: list[tirx.Expr]) -> tirx.Expr | None:
        """The row of an element of tiles; None if an axis of these has parts of ``m`` and ``n``."""
        axes = [(i, e) for i, e in zip(indices, shape, strict=True) if not is_one(e)]
        row: tirx.Expr = _index(0)
        for kind, extent in self.runs:
            size: Extent = 1
            while axes and not self._is_equal(size, extent):
                index, axis = axes.pop(0)
                known = constant(axis)
                size = size * (axis if known is None else known)
                if kind == "P":
                    row = row * axis + index
            if not self._is_equal(size, extent):
                return None
        return row

    def _place(self, kind: str) -> tirx.Expr:
        return self.m if kind == ROW else self.tile

    def _tile(self) -> tirx.Expr:
        """The row-major position of element ``(m, n)`` of the data."""
        indices = {
            kind: unravel(var, [extent for other, extent in self.runs if other == kind])
            for kind, var in (("P", self.m), ("R", self.n))
        }
        place: tirx.Expr = _index(0)
        for kind, extent in self.runs:
            place = place * _index(extent) + indices[kind].pop(0)
        return place

    def _is_equal(self, a: Extent, b: Extent) -> bool:
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        return bool(self.analyzer.can_prove_equal(_index(a), _index(b)))


def ravel(indices: Sequence[tirx.Expr], shape: Sequence[tirx.Expr]) -> tirx.Expr:
    """The row-major position of an element; along unit axes an index is 0."""
    flat: tirx.Expr = _index(0)
    for index, extent in zip(indices, shape, strict=True):
        flat = flat * extent + (_index(0) if is_one(extent) else index.astype("int64"))
    return flat


def _index(extent: Extent) -> tirx.Expr:
    return tirx.const(extent, "int64") if isinstance(extent, int) else extent
