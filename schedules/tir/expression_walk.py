# SPDX-License-Identifier: Apache-2.0
"""Searches and substitutions in expressions of TensorIR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import tvm_ffi
from tvm import ir, tirx

Node = TypeVar("Node")
Tree = TypeVar("Tree", tirx.Expr, tirx.Stmt)


def nodes(tree: tirx.Expr | tirx.Stmt, *kinds: type[Node]) -> list[Node]:
    """Every node of some kinds, in the order of evaluation."""
    found: list[Node] = []
    tvm_ffi.structural_walk(tree, (kinds, found.append))
    return found


def loads(*expressions: tirx.Expr) -> list[ir.TensorLoad]:
    """Every read of memory in expressions, in the order of evaluation."""
    return [load for expression in expressions for load in nodes(expression, ir.TensorLoad)]


def variables(expression: tirx.Expr) -> set[ir.Var]:
    """The variables in an expression."""
    return set(nodes(expression, ir.Var))


def uses(expression: tirx.Expr, *wanted: ir.Var) -> bool:
    """True if any of the variables occurs in an expression."""
    return not variables(expression).isdisjoint(wanted)


def op_name(expression: tirx.Expr) -> str:
    """Name of the op that an expression calls; empty when it is no call of an op."""
    named = isinstance(expression, ir.Call) and isinstance(expression.op, ir.Op)
    return str(expression.op.name) if named else ""


def extern_name(expression: tirx.Expr) -> str:
    """Name of the external function that an expression calls; empty when it calls none."""
    return str(expression.args[0].value) if op_name(expression) == "tirx.call_extern" else ""


def is_if_then_else(expression: tirx.Expr) -> bool:
    """True if an expression evaluates only one of two branches."""
    return op_name(expression) == "prim.if_then_else"


def substitute(tree: Tree, values: Mapping[ir.Var, tirx.Expr]) -> Tree:
    """Replace variables by expressions of their type."""
    return tvm_ffi.structural_map(tree, (ir.Var, lambda var: values.get(var, var)))
