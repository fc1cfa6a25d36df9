# SPDX-License-Identifier: Apache-2.0
"""Steps of several rows of which some are at a border.

Rows share their loads only where these depend on no condition. What holds for a whole row is
therefore tested once for the rows of a step: of a stencil with a fixed border, most steps have no
row at it. The others are computed row by row, with all conditions::

    before: for i in range(1024):             after: for i in range(1024):
                for r in range(4):                       if 0 < i * 4 and i * 4 + 3 < 4095:
                    for j in range(256):                     for j in range(256):
                        o[i * 4 + r, j] = ...                    for r in T.unroll(4): ...
                                                         else:
                                                             for r in range(4):
                                                                 for j in range(256): ...
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx

from schedules import attributes
from schedules.tir.expression_walk import is_if_then_else, loads, nodes, substitute, uses
from schedules.tir.index_math import factor_of, simplified

from ..overlapping_tails import conjuncts
from ..truncated_tails import fresh

_ORDERS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def is_interval(block: s_tir.SBlock, row: ir.Var, lanes: Sequence[ir.Var]) -> bool:
    """Return whether the rows that fulfil all conditions on rows alone are an interval.

    Parameters
    ----------
    block : SBlock
        An injective block.
    row : Var
        Its iteration variable along the rows.
    lanes : Sequence[Var]
        Those along a row.

    Returns
    -------
    bool
        False, too, if a condition depends on rows and lanes together, or on what the block binds.
    """
    conditions = _conditions(block.body)
    bound = [binding.var for binding in nodes(block.body, tirx.Bind, tirx.Let)]
    if nodes(block.body, tirx.IfThenElse) or any(uses(each, *bound) for each in conditions):
        return False
    return all(
        isinstance(condition, _ORDERS)
        and _of_rows(condition, lanes)
        and factor_of(row, simplified(condition.a - condition.b)) is not None
        for condition in conditions
        if uses(condition, row)
    )


def _conditions(body: tirx.Stmt) -> list[ir.Expr]:
    """What must hold, each by itself, for the first branches of ``if_then_else``."""
    branches = filter(is_if_then_else, nodes(body, ir.Call))
    return [condition for branch in branches for condition in conjuncts(branch.args[0])]


def _of_rows(condition: ir.Expr, lanes: Sequence[ir.Var]) -> bool:
    return not loads(condition) and not uses(condition, *lanes)


def unroll_steps(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Compute the rows of steps together where no condition on rows fails.

    Parameters
    ----------
    func : PrimFunc
        A scheduled function. A loop that is annotated with ``STEP`` is around loops, one after the
        other, over the vectors of a row of an injective block whose conditions on rows are
        intervals (:func:`is_interval`). The annotation is a list: the positions of the block's
        iteration variables along a row.

    Returns
    -------
    PrimFunc
        The function without these annotations.
    """

    def rewrite(loop: tirx.For) -> tirx.Stmt:
        if attributes.STEP not in loop.annotations:
            return loop
        positions = [int(position) for position in loop.annotations[attributes.STEP]]
        tests = _tests(loop, positions)
        plain = tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)
        together = tvm_ffi.structural_map(
            _inward(plain, loop.body),
            (s_tir.SBlockRealize, lambda realize: _without_conditions(realize, positions)),
        )
        return tirx.IfThenElse(tirx.all(*tests), together, fresh(plain)) if tests else together

    return tvm_ffi.structural_map(func, (tirx.For, rewrite))


def _tests(loop: tirx.For, positions: Sequence[int]) -> list[ir.Expr]:
    """The conditions on rows for the first and for the last row of a step.

    They hold for the rows between, too, since those that fulfil them are an interval.
    """
    realize = nodes(loop, s_tir.SBlockRealize)[0]
    axes = [axis.var for axis in realize.block.iter_vars]
    values = dict(zip(axes, realize.iter_values, strict=True))
    lanes = _lanes(realize, positions)
    found: dict[str, ir.Expr] = {}
    for condition in _conditions(realize.block.body):
        if not _of_rows(condition, lanes):
            continue
        for row in (loop.min, loop.min + loop.extent - 1):
            test = simplified(substitute(substitute(condition, values), {loop.loop_var: row}))
            found[str(test)] = test
    return list(found.values())


def _lanes(realize: s_tir.SBlockRealize, positions: Sequence[int]) -> list[ir.Var]:
    return [realize.block.iter_vars[position].var for position in positions]


def _inward(rows: tirx.For, body: tirx.Stmt) -> tirx.Stmt:
    """The body with the loop over rows, unrolled, around each of its vectors."""
    if isinstance(body, tirx.SeqStmt):
        return tirx.SeqStmt([_inward(rows, each) for each in body.seq])
    if isinstance(body, tirx.For) and body.kind == tirx.ForKind.SERIAL:
        inner = _inward(rows, body.body)
        return tirx.For(body.loop_var, body.min, body.extent, body.kind, inner)
    return fresh(tirx.For(rows.loop_var, rows.min, rows.extent, tirx.ForKind.UNROLLED, body))


def _without_conditions(
    realize: s_tir.SBlockRealize, positions: Sequence[int]
) -> s_tir.SBlockRealize:
    """The block where all conditions on rows hold."""
    lanes = _lanes(realize, positions)

    def rewrite(call: ir.Call) -> ir.Expr:
        if not is_if_then_else(call):
            return call
        left = [each for each in conjuncts(call.args[0]) if not _of_rows(each, lanes)]
        return tirx.if_then_else(tirx.all(*left), *call.args[1:]) if left else call.args[1]

    return tvm_ffi.structural_map(realize, (ir.Call, rewrite))
