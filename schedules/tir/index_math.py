# SPDX-License-Identifier: Apache-2.0
"""Index expressions in int64, and the iterations at which conditions on a loop change.

Padding and concatenation become conditions inside a block. Between two cut points no condition
changes, so a loop that is cut there has plain vector loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tvm import ir, s_tir, sym, tirx
from tvm.s_tir.schedule import SBlockRV
from tvm.sym import Analyzer, detect_linear_equation
from tvm.topi.utils import ravel_index

from .expression_walk import is_if_then_else, nodes
from .extents import Extent, constant, size_of

INT32_END = 1 << 31

_ANALYZER = Analyzer()


def as_type(value: Extent, dtype: str) -> tirx.Expr:
    """An integer expression in another type."""
    if isinstance(value, int | tirx.IntImm):
        return tirx.const(int(value), dtype)
    return value.astype(dtype)


def i64(value: Extent) -> tirx.Expr:
    """An int64 expression."""
    return as_type(value, "int64")


def ravel(indices: Sequence[Extent], extents: Sequence[Extent], dtype: str = "int64") -> tirx.Expr:
    """Row-major position of an element."""
    if not indices:
        return tirx.const(0, dtype)
    return ravel_index([as_type(i, dtype) for i in indices], [as_type(e, dtype) for e in extents])


def volume(extents: Iterable[Extent]) -> tirx.Expr:
    """Number of elements of a shape, as a simplified int64 expression."""
    return simplified(i64(size_of(map(i64, extents))))


def ceildiv(value: Extent, divisor: int) -> tirx.Expr:
    """``value / divisor`` rounded up."""
    if isinstance(value, int):
        return i64(-(-value // divisor))
    return simplified((i64(value) + i64(divisor - 1)) // i64(divisor))


def simplified(expression: tirx.Expr) -> tirx.Expr:
    """The expression after TVM's simplification."""
    return _ANALYZER.simplify(expression)


def is_multiple(index: tirx.Expr, factor: int, analyzer: Analyzer = _ANALYZER) -> bool:
    """True if an index is known to be a multiple of a number."""
    known = analyzer.modular_set(index)
    return known.coeff % factor == 0 and known.base % factor == 0


def factor_of(var: tirx.Var, expression: tirx.Expr) -> int | None:
    """Factor by which a linear expression multiplies a variable; None where it is no constant."""
    found = detect_linear_equation(expression, [var])
    return constant(found[0]) if found else None


def factors_of(variables: Sequence[tirx.Var], expression: tirx.Expr) -> list[int | None]:
    """Factors by which an expression multiplies each variable; None where one is no constant."""
    found = detect_linear_equation(expression, list(variables))
    if found:
        factors = [constant(factor) for factor in found[: len(variables)]]
        if None not in factors:
            return factors
    return [factor_of(var, expression) for var in variables]


def narrowed(index: tirx.Expr, analyzer: Analyzer = _ANALYZER) -> tirx.Expr:
    """An int64 index below 2^31 in int32 arithmetic, whatever is known of its variables.

    Sums and products are exact modulo 2^32; divisions remain in int64 unless both operands are
    known to be narrow.
    """
    if isinstance(index, tirx.IntImm):
        return tirx.const((int(index) + INT32_END) % (2 * INT32_END) - INT32_END, "int32")
    if isinstance(index, tirx.Cast) and str(index.value.ty.dtype) == "int32":
        return index.value
    is_ring = isinstance(index, tirx.Add | tirx.Sub | tirx.Mul)
    is_division = isinstance(index, tirx.FloorDiv | tirx.FloorMod)
    if is_ring or (is_division and all(_is_narrow(e, analyzer) for e in (index.a, index.b))):
        return type(index)(narrowed(index.a, analyzer), narrowed(index.b, analyzer))
    return index.astype("int32")


def _is_narrow(index: tirx.Expr, analyzer: Analyzer) -> bool:
    bound = analyzer.const_int_bound(index)
    return -INT32_END <= bound.min_value and bound.max_value < INT32_END


def floor_power_of_two(value: int) -> int:
    """The largest power of two that is not above ``value``."""
    return 1 << (value.bit_length() - 1)


def ceil_power_of_two(value: int) -> int:
    """The least power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


COMPARISONS: dict[type[Any], Callable[[int], bool]] = {
    tirx.LT: lambda difference: difference < 0,
    tirx.LE: lambda difference: difference <= 0,
    tirx.GT: lambda difference: difference > 0,
    tirx.GE: lambda difference: difference >= 0,
    tirx.EQ: lambda difference: difference == 0,
    tirx.NE: lambda difference: difference != 0,
}
_MOST_CUTS = 64


def cut_points(
    sch: s_tir.Schedule,  # The schedule that holds the block.
    block: SBlockRV,  # A block with constant extents.
    position: int,  # Position of the iteration variable.
) -> list[int]:
    """Iterations at which a condition on one iteration variable changes its value.

    They ascend, without 0 and the extent: between two of them each comparison is true, false, or
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
