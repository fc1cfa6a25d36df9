# SPDX-License-Identifier: Apache-2.0
"""Rows of a stencil that are computed together, since they read the same, some of them at a border.

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

A filter reads most of its inputs, and computes most of its inlined stages, again for the next row.
With several rows in one step LLVM keeps in registers what they share::

    before: for i, j in T.grid(1024, 64):          after: for i, j in T.grid(256, 64):
                for v in T.vectorized(16):                    for r in T.unroll(4):
                    o[i, j * 16 + v] = ...                        for v in T.vectorized(16):
                                                                      o[i * 4 + r, j * 16 + v] = ...

A product that two rows share would no longer be rounded together with its sum, which makes other
bits than those of a single row. So sums of products are explicit multiply-adds in every filter,
however few rows it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.tirx.op import fma

from schedules import attributes
from schedules.cpu.core.machine import CPUInfo
from schedules.tir.expression_walk import is_if_then_else, loads, nodes, substitute, uses
from schedules.tir.extents import constant
from schedules.tir.index_math import factor_of, simplified

from .blocks import Access, BlockFacts
from .tails import conjuncts, fresh

_ORDERS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def is_interval(
    block: s_tir.SBlock,  # An injective block.
    row: ir.Var,  # Its iteration variable along the rows.
    lanes: Sequence[ir.Var],  # Variables along a row.
) -> bool:
    """Return whether the rows that fulfil all conditions on rows alone are an interval.

    Also false if a condition depends on rows and lanes together, or on what the block binds.
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
    """Conditions, each by itself, that the first branches of ``if_then_else`` require."""
    branches = filter(is_if_then_else, nodes(body, ir.Call))
    return [condition for branch in branches for condition in conjuncts(branch.args[0])]


def _of_rows(condition: ir.Expr, lanes: Sequence[ir.Var]) -> bool:
    return not loads(condition) and not uses(condition, *lanes)


def unroll_steps(
    # A scheduled function. A loop that is annotated with ``STEP`` is around loops, one after the
    # other, over the vectors of a row of an injective block whose conditions on rows are intervals
    # (:func:`is_interval`). The annotation is a list: the positions of the block's iteration
    # variables along a row.
    func: tirx.PrimFunc,
) -> tirx.PrimFunc:
    """Compute the rows of steps together where no condition on rows fails.

    Returns the function without these annotations.
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
    tests: dict[str, ir.Expr] = {}
    for condition in _conditions(realize.block.body):
        if not _of_rows(condition, lanes):
            continue
        for row in (loop.min, loop.min + loop.extent - 1):
            test = simplified(substitute(substitute(condition, values), {loop.loop_var: row}))
            tests[str(test)] = test
    return list(tests.values())


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


ROWS = 4
"""Rows of a step at least: more would need more streams from memory than are prefetched."""

_WORTHWHILE = 0.8  # Share of the loads that is left; 0.79 of a stencil of 7 points.
_FLOATS = ("float32", "float64")


def shared_rows(
    block: s_tir.SBlock,  # An injective block.
    facts: BlockFacts,
    # Its loops in groups that are fused; the last one is vectorised.
    groups: Sequence[Sequence[int]],
) -> int | None:
    """Choose the loop whose iterations share the most loads.

    Returns the position of the loop, alone in its group, whose conditions hold for an interval of
    it; None if less than a quarter of the loads is saved, or the addresses of some are not known to
    be linear.
    """
    lane = groups[-1][-1]
    moving = [load for load in facts.loads if load.strides[lane] != 0]
    if not moving or any(stride is None for load in moving for stride in load.strides):
        return None
    if not is_filter(facts):
        return None
    along = [facts.vars[k] for k in groups[-1]]
    rows = [
        group[0]
        for group in groups[:-1]
        if len(group) == 1 and (not facts.guards or is_interval(block, facts.vars[group[0]], along))
    ]
    left = {k: _share_left(moving, k) for k in rows if facts.volume([k]) >= 2 * ROWS}
    best = min(left, key=left.__getitem__, default=None)
    return best if best is not None and left[best] <= _WORTHWHILE else None


def rows_of_step(cpu: CPUInfo, facts: BlockFacts, row: int) -> int:
    """Rows of a step: more where pixels, which are converted, are not awaited from memory."""
    is_pixel = tvm_ffi.dtype(str(facts.store.buffer.dtype)).bits < 32
    is_computed = is_pixel and cpu.num_vector_registers >= 32
    return 2 * ROWS if is_computed and facts.volume([row]) >= 4 * ROWS else ROWS


def _share_left(loads: Sequence[Access], row: int) -> float:
    """Loads of several rows together, a load of each of them alone."""
    bases: dict[ir.Var, tirx.Expr] = {}
    places: set[tuple[ir.Var, tuple[int | None, ...], int | str]] = set()
    for load in loads:
        base = bases.setdefault(load.buffer, load.offset)
        ahead = constant(simplified(load.offset - base))
        # A load that is no shifted copy of the first one shares nothing with it.
        place = str(load.offset) if ahead is None else ahead
        places.add((load.buffer, load.strides, place))
    together = set()
    for buffer, strides, at in places:
        for step in range(ROWS):
            stride = strides[row] or 0
            moved = step * stride + at if isinstance(at, int) else (at, step)
            together.add((buffer, strides, moved))
    return len(together) / (ROWS * len(places))


def is_filter(facts: BlockFacts) -> bool:
    """Return whether a block computes an element in floats from several places of a tensor."""
    if facts.float_bytes < 4:
        return False
    places = {(load.buffer, str(load.offset)) for load in facts.loads}
    return len(places) > len({buffer for buffer, _ in places})


def multiply_add(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make the sums of products of blocks with ``MULTIPLY_ADD`` explicit multiply-adds."""

    def rewrite(block: s_tir.SBlock) -> s_tir.SBlock:
        if attributes.MULTIPLY_ADD not in block.annotations:
            return block
        return tvm_ffi.structural_map(block, [(tirx.Add, _sum), (tirx.Sub, _difference)])

    return tvm_ffi.structural_map(func, (s_tir.SBlock, rewrite))


def _is_product(value: tirx.Expr) -> bool:
    return isinstance(value, tirx.Mul)


def _sum(node: tirx.Add) -> tirx.Expr:
    if str(node.ty.dtype) not in _FLOATS:
        return node
    if _is_product(node.a):
        return fma(node.a.a, node.a.b, node.b)
    return fma(node.b.a, node.b.b, node.a) if _is_product(node.b) else node


def _difference(node: tirx.Sub) -> tirx.Expr:
    if str(node.ty.dtype) not in _FLOATS:
        return node
    if _is_product(node.a):
        return fma(node.a.a, node.a.b, -node.b)
    return fma(-node.b.a, node.b.b, node.a) if _is_product(node.b) else node
