# SPDX-License-Identifier: Apache-2.0
"""Searches and substitutions in expressions of TensorIR."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import tvm_ffi
from tvm import ir, tirx


def loads(expression: tirx.Expr) -> list[ir.TensorLoad]:
    """Every read of memory in an expression, in the order of evaluation."""
    found: list[ir.TensorLoad] = []
    tvm_ffi.structural_walk(expression, (ir.TensorLoad, found.append))
    return found


def substitute(expression: tirx.Expr, values: Mapping[ir.Var, tirx.Expr]) -> tirx.Expr:
    """Replace variables by expressions of their type."""
    return tvm_ffi.structural_map(expression, (ir.Var, lambda var: values.get(var, var)))


def uses(expression: tirx.Expr, variables: Collection[ir.Var]) -> bool:
    """Return whether any of the variables occurs in an expression."""
    found: list[ir.Var] = []
    tvm_ffi.structural_walk(expression, (ir.Var, found.append))
    return any(var in variables for var in found)
