# SPDX-License-Identifier: Apache-2.0
"""Analysis of the results of a Relax function: memory that nothing else refers to."""

from __future__ import annotations

import tvm
from tvm import relax

_MAKE_NEW = ("relax.call_tir", "relax.call_tir_with_grad", "relax.call_dps_packed")


def fresh_outputs(mod: tvm.IRModule, name: str = "main") -> tuple[bool, ...]:
    """For each result, return whether every call of the function creates it.

    Such a result can be handed out without copying it. Any other may be a constant of the model,
    which a caller must not be able to change, or a view of something; False is always safe.

    Parameters
    ----------
    mod : tvm.IRModule
        Its kernels are calls of ``call_tir`` already.
    name : str
        The function.
    """
    body = mod[name].body
    values = {
        binding.var: binding.value
        for block in body.blocks
        for binding in block.bindings
        if isinstance(binding, relax.VarBinding)
    }
    result = _follow(body.body, values)
    fields = result.fields if isinstance(result, relax.Tuple) else [result]
    return tuple(_is_new(field, values) for field in fields)


def _follow(value: relax.Expr, values: dict[relax.Var, relax.Expr]) -> relax.Expr:
    """Follow a variable through other variables to its value."""
    while isinstance(value, relax.Var) and value in values:
        value = values[value]
    return value


def _is_new(value: relax.Expr, values: dict[relax.Var, relax.Expr]) -> bool:
    value = _follow(value, values)
    if isinstance(value, relax.TupleGetItem):
        source = _follow(value.tuple_value, values)
        if isinstance(source, relax.Tuple):
            return _is_new(source.fields[value.index], values)
        return _is_new(source, values)
    is_call = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
    return is_call and value.op.name in _MAKE_NEW
