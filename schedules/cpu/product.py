# SPDX-License-Identifier: Apache-2.0
"""Recognising sums of products: matrix and vector products, batched or not."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from .facts import Access, BlockFacts, uses


@dataclass(frozen=True)
class Product:
    """Which axis is what in ``out[b.., m, n] += left[b.., m, k] * right[b.., k, n]``.

    Parameters
    ----------
    left, right : Access
        The factor that does not depend on ``n``, and the one that does.
    row_axis : int | None
        The spatial axis (its index among the spatial ones) on which only ``left`` depends.
    n, k : int
        Positions of the last spatial and of the last reduced variable.
    """

    left: Access
    right: Access
    row_axis: int | None
    n: int
    k: int


def find_product(sch: s_tir.Schedule, block: SBlockRV, facts: BlockFacts) -> Product | None:
    """Tell the axes of a sum of products apart; None if the block is something else.

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
    Product | None
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
    if any(_mixes(facts, load) for load in factors):
        return None
    rows = [
        index
        for index, s in enumerate(spatial[:-1])
        if left.strides[s] != 0 and right.strides[s] == 0 and facts.extents[s] is not None
    ]
    return Product(left, right, rows[-1] if rows else None, n, k)


def _adds_product(body: tirx.Stmt) -> bool:
    """Whether the block is ``out = out + a * b``, in any order and with casts."""
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


def _mixes(facts: BlockFacts, load: Access) -> bool:
    """Whether an index depends on spatial and reduced variables: a window that slides."""
    variables = [
        [facts.vars[position] for position in facts.positions(kind)] for kind in ("S", "R")
    ]
    return any(
        all(any(uses(index, var) for var in kind) for kind in variables) for index in load.indices
    )
