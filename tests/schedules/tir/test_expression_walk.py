# SPDX-License-Identifier: Apache-2.0
"""Tests of searches and replacements in expressions and statements."""

from __future__ import annotations

import tvm_ffi
from tvm import tirx

from schedules.tir.expression_walk import (
    is_if_then_else,
    loads,
    nodes,
    op_name,
    substitute,
    uses,
    variables,
)

X, Y, Z = (tirx.Var(name, "int64") for name in "xyz")
A = tirx.decl_buffer((8,), "int64", "a", layout=None)


def test_nodes_of_a_kind_stand_in_the_order_of_evaluation() -> None:
    store = tirx.BufferStore(A, X // 3 + Y // 5, [Z])
    assert [int(node.b) for node in nodes(store, tirx.FloorDiv)] == [3, 5]
    assert nodes(store, tirx.Mul) == []


def test_loads_of_several_expressions_with_those_in_indices() -> None:
    inner = A[X]
    assert len(loads(A[inner] + Y, A[Z])) == 3
    assert loads(X + Y) == []


def test_variables_are_found_once_each() -> None:
    assert variables(X * Y + X) == {X, Y}
    assert variables(tirx.const(1, "int64")) == set()


def test_uses_any_of_the_variables() -> None:
    assert uses(X + Y, Y) and uses(X + Y, Z, X)
    assert not uses(X + Y, Z) and not uses(X + Y)
    assert not uses(X, tirx.Var("x", "int64"))


def test_substitution_in_expressions_and_statements() -> None:
    assert tvm_ffi.structural_equal(substitute(X + Y, {X: Z * 2}), Z * 2 + Y)
    store = tirx.BufferStore(A, X, [Y])
    changed = substitute(store, {X: Z, Y: X})
    assert changed.value.same_as(Z) and changed.indices[0].same_as(X)
    assert substitute(store, {Z: X}).same_as(store)


def test_ops_have_names_and_other_expressions_none() -> None:
    chosen = tirx.if_then_else(X > Y, X, Y)
    assert op_name(tirx.exp(tirx.Var("x", "float32"))) == "tirx.exp"
    assert op_name(X + Y) == "" and op_name(X) == ""
    assert is_if_then_else(chosen) and not is_if_then_else(tirx.Select(X > Y, X, Y))
