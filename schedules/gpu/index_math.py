# SPDX-License-Identifier: Apache-2.0
"""Index expressions in int64; TVM narrows them to int32 where their bounds allow."""

from __future__ import annotations

from tvm import tirx
from tvm.sym import Analyzer

from ..reduce_workload import Extent

_ANALYZER = Analyzer()


def i64(value: Extent) -> tirx.Expr:
    """An int64 expression."""
    return tirx.const(value, "int64") if isinstance(value, int) else value.astype("int64")


def ceildiv(value: Extent, divisor: int) -> tirx.Expr:
    """``value / divisor`` rounded up."""
    if isinstance(value, int):
        return i64(-(-value // divisor))
    return simplified((i64(value) + i64(divisor - 1)) // i64(divisor))


def simplified(expression: tirx.Expr) -> tirx.Expr:
    """The expression after TVM's simplification."""
    return _ANALYZER.simplify(expression)
