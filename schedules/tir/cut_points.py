# SPDX-License-Identifier: Apache-2.0
"""Cut points of a loop: the iterations at which conditions on it change.

Padding and concatenation become conditions inside a block. Between two cut points no condition
changes, so a loop that is cut there has plain vector loads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, s_tir, sym, tirx
from tvm.s_tir.schedule import SBlockRV

from .expression_walk import is_if_then_else, nodes

COMPARISONS: dict[type[Any], Callable[[int], bool]] = {
    tirx.LT: lambda difference: difference < 0,
    tirx.LE: lambda difference: difference <= 0,
    tirx.GT: lambda difference: difference > 0,
    tirx.GE: lambda difference: difference >= 0,
    tirx.EQ: lambda difference: difference == 0,
    tirx.NE: lambda difference: difference != 0,
}
_MOST_CUTS = 64


def cut_points(sch: s_tir.Schedule, block: SBlockRV, position: int) -> list[int]:
    """Iterations at which a condition on one iteration variable changes its value.

    Parameters
    ----------
    sch : Schedule
        The schedule that holds the block.
    block : SBlockRV
        A block with constant extents.
    position : int
        Position of the iteration variable.

    Returns
    -------
    list[int]
        Ascending, without 0 and the extent: between two of them each comparison is true, false, or
        (where it depends on other variables too) still open. Empty if a comparison is not linear.
    """
    stmt = sch.get(block)
    axis = stmt.iter_vars[position]
    analyzer = sym.Analyzer()
    for other in stmt.iter_vars:
        analyzer.bind(other.var, other.dom)
    extent = int(axis.dom.extent)
    points: set[int] = set()
    for comparison in _comparisons(stmt.body):
        points |= _changes(comparison, axis.var, analyzer)
    inside = sorted(point for point in points if 0 < point < extent)
    return inside if len(inside) <= _MOST_CUTS else []


def _comparisons(body: tirx.Stmt) -> list[ir.Expr]:
    """Every comparison inside a condition of ``if_then_else``."""
    branches = filter(is_if_then_else, nodes(body, ir.Call))
    return [node for branch in branches for node in nodes(branch.args[0], *COMPARISONS)]


def _changes(comparison: ir.Expr, var: ir.Var, analyzer: sym.Analyzer) -> set[int]:
    """First iterations at which the comparison of ``slope * var + rest`` with 0 changes."""
    difference = analyzer.simplify(comparison.a - comparison.b)
    found = sym.detect_linear_equation(difference, [var])
    if not found or not isinstance(found[0], tirx.IntImm) or int(found[0]) == 0:
        return set()
    slope = int(found[0])
    rest = analyzer.const_int_bound(found[1])
    if max(abs(rest.min_value), abs(rest.max_value)) > 2**31:
        return set()
    holds = next(test for kind, test in COMPARISONS.items() if isinstance(comparison, kind))

    def state(value: int) -> tuple[bool, bool]:
        return holds(slope * value + rest.min_value), holds(slope * value + rest.max_value)

    zeros = [-rest.min_value // slope, -rest.max_value // slope]
    near = {zero + step for zero in zeros for step in (-1, 0, 1, 2)}
    return {value for value in near if state(value - 1) != state(value)}
