# SPDX-License-Identifier: Apache-2.0
"""Replacement of the functions that Relax functions call."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax
from tvm.ir import BaseFunc, GlobalVar
from tvm.relax.expr_functor import PyExprMutator, mutator


def calling(
    functions: Mapping[GlobalVar, BaseFunc], names: Mapping[GlobalVar, GlobalVar]
) -> dict[GlobalVar, BaseFunc]:
    """Return functions whose calls are to the new variables of ``names``; others stay."""
    rename = _Rename(names)
    return {
        var: rename.visit_expr(func) if isinstance(func, relax.Function) else func
        for var, func in functions.items()
    }


@mutator
class _Rename(PyExprMutator):
    """Replaces global variables."""

    def __init__(self, names: Mapping[GlobalVar, GlobalVar]) -> None:
        super().__init__()
        self._names = names

    def visit_global_var_(self, op: GlobalVar) -> GlobalVar:
        """The new variable, if there is one."""
        return self._names.get(op, op)
