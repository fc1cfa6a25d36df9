# SPDX-License-Identifier: Apache-2.0
"""Shared values of an expression in a form that TVM's analyzer gets through in linear time.

The analyzer visits the value of each ``let`` several times, and replaces the variables of pure
ones by their values, as a tree: nested lets and lets that use each other cost it exponential time.
:func:`store_with_bindings` keeps values apart and makes them read memory, which stops that.
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx


def store_with_bindings(store: tirx.BufferStore, value: ir.Expr) -> tirx.Stmt:
    """Store an expression in place of another, with its lets as statements before the store.

    The first becomes the rest::

        y[0] = f(let a = (let b = x[0] + 1 in b * b) in a * a)

        b = x[0] + 1
        a = select(true, b * b, x[0])
        y[0] = f(a * a)

    Parameters
    ----------
    store : BufferStore
        Where to store.
    value : Expr
        An expression with pure lets, each of a variable of its own.

    Returns
    -------
    Stmt
        The same in effect. A let inside a branch of ``if_then_else`` stays in that branch. TVM does
        not see that the selects are constant, LLVM does.
    """
    values: dict[ir.Var, ir.Expr] = {}

    def strip(let: tirx.Let) -> ir.Expr:
        values[let.var] = let.value
        return let.body

    def keep_inside(call: ir.Call) -> ir.Expr:
        if not _is_branch(call):
            return call
        condition, *branches = call.args
        return tirx.if_then_else(condition, *[_define(branch, values) for branch in branches])

    stripped = tvm_ffi.structural_map(value, ((tirx.Let, strip), (ir.Call, keep_inside)))
    bindings = [tirx.Bind(var, definition) for var, definition in _needed(stripped, values)]
    stored = tirx.BufferStore(store.buffer, stripped, store.indices)
    return tirx.SeqStmt([*bindings, stored]) if bindings else stored


def _is_branch(call: ir.Call) -> bool:
    return isinstance(call.op, ir.Op) and call.op.name == "prim.if_then_else"


def _define(expr: ir.Expr, values: dict[ir.Var, ir.Expr]) -> ir.Expr:
    """Put the definitions that an expression needs before it."""
    for var, definition in reversed(_needed(expr, values)):
        expr = tirx.Let(var, definition, expr)
    return expr


def _needed(expr: ir.Expr, values: dict[ir.Var, ir.Expr]) -> list[tuple[ir.Var, ir.Expr]]:
    """Take the definitions that an expression needs from ``values``, each after what it uses."""
    ordered: list[tuple[ir.Var, ir.Expr]] = []

    def need(user: ir.Expr) -> None:
        used: list[ir.Var] = []
        tvm_ffi.structural_walk(user, (ir.Var, used.append))
        for var in used:
            if var in values:
                definition = values.pop(var)
                need(definition)
                ordered.append((var, definition))

    need(expr)
    reads = [_first_read(definition) for _, definition in ordered]
    read = next((read for read in reads if read is not None), None)
    return [(var, _reading(definition, read)) for var, definition in ordered]


def _first_read(expr: ir.Expr) -> ir.Expr | None:
    """A float32 read that is safe wherever ``expr`` is: a load, or a branch around one."""
    found: list[ir.Expr] = []

    def take(read: ir.Expr) -> tvm_ffi.WalkResult:
        if str(read.ty.dtype) == "float32":
            found.append(read)
        return tvm_ffi.WalkResult.SKIP

    def look_into(call: ir.Call) -> tvm_ffi.WalkResult | None:
        return take(call) if _is_branch(call) else None

    tvm_ffi.structural_walk(expr, ((ir.TensorLoad, take), (ir.Call, look_into)), order="pre")
    return next((read for read in found if _reads(read)), None)


def _reads(expr: ir.Expr) -> bool:
    found: list[ir.Expr] = []
    tvm_ffi.structural_walk(expr, (ir.TensorLoad, found.append))
    return bool(found)


def _reading(value: ir.Expr, read: ir.Expr | None) -> ir.Expr:
    """The value in a form that reads memory; only LLVM knows that 1 has one bit."""
    dtype = str(value.ty.dtype)
    if read is None or dtype not in ("float32", "int32") or _reads(value):
        return value
    one = tirx.IntImm("int32", 1)
    other = read if dtype == "float32" else tirx.reinterpret(dtype, read)
    return tirx.Select(tirx.popcount(one).equal(one), value, other)
