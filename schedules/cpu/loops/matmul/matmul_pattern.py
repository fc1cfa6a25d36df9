# SPDX-License-Identifier: Apache-2.0
"""Recognising sums of products: matrix and vector products, batched or not."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from schedules.tir.expression_walk import nodes, uses
from schedules.tir.index_math import factor_of

from ...nests.blocks import Access, BlockFacts


@dataclass(frozen=True)
class MatmulAxes:
    """Axes of ``out[b.., m, n] += left[b.., m, k] * right[b.., k, n]``.

    Parameters
    ----------
    left, right : Access
        The factor that does not depend on ``n``, and the one that does.
    row_axis : int | None
        The spatial axis on which only ``left`` depends; counted as ``open_reduction`` does.
    n, k : int
        Positions of the last spatial and of the last reduced variable.
    """

    left: Access
    right: Access
    row_axis: int | None
    n: int
    k: int


def find_product(sch: s_tir.Schedule, block: SBlockRV, facts: BlockFacts) -> MatmulAxes | None:
    """Find the axes of a sum of products; None if the block is something else.

    Parameters
    ----------
    sch : Schedule
        The schedule that holds the block.
    block : SBlockRV
        The block.
    facts : BlockFacts
        Its facts.

    Returns
    -------
    MatmulAxes | None
        The factors and axes. Windows that slide (convolutions) are no products.
    """
    spatial, reduced = facts.positions("S"), facts.positions("R")
    if not spatial or len(facts.loads) != 2 or not _adds_product(sch.get(block).body):
        return None
    n, k = spatial[-1], reduced[-1]
    factors = sorted(facts.loads, key=lambda load: load.strides[n] != 0)
    left, right = factors
    if left.strides[n] != 0 or right.strides[n] == 0 or facts.store.strides[n] != 1:
        return None
    if any(load.strides[r] in (0, None) for load in factors for r in reduced):
        return None
    if any(_slides(facts, load) for load in factors):
        return None
    rows = [
        index - len(spatial)
        for index, s in enumerate(spatial[:-1])
        if left.strides[s] != 0 and right.strides[s] == 0 and facts.extents[s] is not None
    ]
    return MatmulAxes(left, right, rows[-1] if rows else None, n, k)


def _adds_product(body: tirx.Stmt) -> bool:
    """Return whether the block is ``out = out + a * b``, in any order and with casts."""
    if not isinstance(body, tirx.BufferStore) or not isinstance(body.value, tirx.Add):
        return False
    sides = [_strip_cast(body.value.a), _strip_cast(body.value.b)]
    products = [side for side in sides if isinstance(side, tirx.Mul)]
    sums = [
        side
        for side in sides
        if isinstance(side, ir.TensorLoad) and side.source.same_as(body.buffer)
    ]
    return (
        len(products) == 1
        and len(sums) == 1
        and all(
            isinstance(_strip_cast(factor), ir.TensorLoad)
            for factor in (products[0].a, products[0].b)
        )
    )


def _strip_cast(expr: ir.Expr) -> ir.Expr:
    return expr.value if isinstance(expr, tirx.Cast) else expr


def _slides(facts: BlockFacts, load: Access) -> bool:
    """Return whether a window slides over the load, so that neighbouring outputs share elements."""
    return any(_overlaps(facts, index) for index in load.indices)


def _overlaps(facts: BlockFacts, index: ir.Expr) -> bool:
    """Return whether a spatial step moves an index by less than the reduced axes span."""
    steps: list[int] = []
    span = 1
    for k in (*facts.positions("S"), *facts.positions("R")):
        if not uses(index, facts.vars[k]):
            continue
        factor, extent = factor_of(facts.vars[k], index), facts.extents[k]
        if factor is None:
            return True
        if facts.kinds[k] == "S":
            steps.append(abs(factor))
        elif extent is None:
            return True
        else:
            span += abs(factor) * (extent - 1)
    return span > 1 and any(step < span for step in steps)


def separate_groups(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Split a variable of which a load uses only the quotient, as a grouped convolution does.

    ``x[o // 8 * 4 + k]`` with ``o`` over 32 becomes ``x[g * 4 + k]`` with ``g`` over 4, which makes
    the groups a batch of products.

    Parameters
    ----------
    sch : Schedule
        The schedule.
    block : SBlockRV
        A reduction in normal form; it stays in normal form.

    Returns
    -------
    bool
        Whether there was such a variable. The buffer that is written keeps its shape, so tiles of
        the new variables must divide them.
    """
    stmt = sch.get(block)
    quotients = nodes(stmt.body, tirx.FloorDiv)
    spatial = [axis for axis in stmt.iter_vars if axis.iter_type == tirx.IterVar.DataPar]
    for position, axis in enumerate(spatial[:-1]):
        sizes = {
            int(quotient.b)
            for quotient in quotients
            if quotient.a.same_as(axis.var) and isinstance(quotient.b, tirx.IntImm)
        }
        extent = axis.dom.extent
        if len(sizes) == 1 and isinstance(extent, tirx.IntImm) and not int(extent) % min(sizes):
            rank, dtype = len(stmt.iter_vars), str(axis.var.ty.dtype)
            index_map = _split_map(rank, position, min(sizes), dtype)
            sch.transform_block_layout(block, index_map)
            return True
    return False


def _split_map(rank: int, position: int, size: int, dtype: str) -> tirx.IndexMap:
    def split(*axes: ir.Expr) -> list[ir.Expr]:
        parts = [tirx.floordiv(axes[position], size), tirx.floormod(axes[position], size)]
        return [*axes[:position], *parts, *axes[position + 1 :]]

    return tirx.IndexMap.from_func(split, ndim=rank, index_dtype=dtype)
