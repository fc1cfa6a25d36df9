# SPDX-License-Identifier: Apache-2.0
"""Growth of an address, and of a condition, along the lanes of a vector."""

from __future__ import annotations

from tvm import sym, tirx
from tvm.ir import Range

from schedules.tir.expression_walk import nodes, uses
from schedules.tir.extents import constant
from schedules.tir.index_math import COMPARISONS, i64, is_multiple

_FAR = 1 << 40  # stands for an unknown extent


class LaneRun:
    """A vector of neighbouring elements at any place.

    Attributes
    ----------
    vector : int
        Lanes, a power of two.
    start : tirx.Expr
        Position of lane 0, a multiple of ``vector``.
    lane : tirx.Var
        Any lane.
    """

    def __init__(self, vector: int):
        self.vector = vector
        self._analyzer = sym.Analyzer()
        base, self._other, self.lane = (
            tirx.Var(name, "int64") for name in ("base", "other", "lane")
        )
        for var, extent in ((base, _FAR), (self._other, _FAR), (self.lane, vector)):
            self._analyzer.bind(var, Range.from_min_extent(i64(0), i64(extent)))
        self.start = base * i64(vector)

    def place(self, along_first: bool) -> tuple[tirx.Expr, tirx.Expr]:
        """Two indices of lane 0, which runs along the first or the second."""
        return (self.start, self._other) if along_first else (self._other, self.start)

    def kind(self, first: tirx.Expr, moved: tirx.Expr) -> str:
        """Growth of an index from lane 0, where it is ``first``, to ``lane``.

        Returns
        -------
        str
            ``vector`` (by one element a lane, from a multiple of the vector on), ``uniform`` (the
            same for all lanes), or ``each``.
        """
        step = self._analyzer.simplify(moved - first)
        if self._analyzer.can_prove_equal(step, i64(0)):
            return "uniform"
        aligned = is_multiple(first, self.vector, self._analyzer)
        return "vector" if aligned and self._analyzer.can_prove_equal(step, self.lane) else "each"

    def is_even(self, condition: tirx.Expr) -> bool:
        """Return whether a condition at ``start + lane`` is the same for each whole vector."""
        simple = self._analyzer.simplify(condition)
        compared = [node for node in nodes(simple, *COMPARISONS) if uses(node, self.lane)]
        return all(map(self._is_even, compared))

    def _is_even(self, comparison: tirx.Expr) -> bool:
        """Return it of one comparison, which has to be linear in the lane."""
        found = sym.detect_linear_equation(comparison.a - comparison.b, [self.lane])
        factor = constant(found[0]) if found else None
        if factor is None:
            return False
        known, vector = sym.Analyzer().modular_set(found[1]), self.vector
        if known.coeff % vector:
            return False
        holds = COMPARISONS[type(comparison)]
        return all(
            len({holds(v * vector + known.base + factor * k) for k in range(vector)}) == 1
            for v in range(-2 * vector, 2 * vector + 1)
        )
