# SPDX-License-Identifier: Apache-2.0
"""Order of bindings that become one: each after what it reads, and circles refused."""

from __future__ import annotations

import pytest
from tvm import relax

from relay_passes.reduction.tir_calls import BlockOrder, Unit
from schedules.errors import OpError


def _order() -> tuple[BlockOrder, list[relax.Var]]:
    """``a`` is read by ``b``, both by ``c``."""
    x = relax.Var("x", relax.TensorType([4], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            a = builder.emit(relax.op.exp(x), "a")
            b = builder.emit(relax.op.negative(a), "b")
            c = builder.emit_output(relax.op.add(a, b), "c")
        builder.emit_func_output(c)
    block = builder.get()["main"].body.blocks[0]
    return BlockOrder(block), [binding.var for binding in block.bindings]


def test_units_come_after_what_they_read() -> None:
    order, (a, b, c) = _order()
    units = [Unit((var,), frozenset([var]), turn) for turn, var in enumerate((c, b, a))]
    assert [unit.computes for unit in order.sort(units)] == [(a,), (b,), (c,)]


def test_a_circle_is_refused() -> None:
    order, (a, b, c) = _order()
    assert not order.is_convex([a, c], {})
    units = [Unit((a, c), frozenset([a, c]), 0), Unit((b,), frozenset([b]), 1)]
    with pytest.raises(OpError, match="bindings a, c, b depend on each other in a cycle"):
        order.sort(units)
