# SPDX-License-Identifier: Apache-2.0
"""Pass ``ShortenNames``: no private function has an endless name."""

from __future__ import annotations

import hashlib

import tvm
from tvm import IRModule, relax
from tvm.ir import GlobalVar
from tvm.relax.expr_functor import PyExprMutator, mutator

LONGEST = 120
_DIGITS = 8


@tvm.transform.module_pass(opt_level=0, name="ShortenNames")
class ShortenNames:
    """Cut the names of fused functions.

    Before::

        lv = R.call_tir(cls.fused_take_less_add_where_take_..._concat, (x,), ...)

    After, a name of at most 120 characters that ends with a digest of the whole::

        lv = R.call_tir(cls.fused_take_less_add_where_take_1b9d02c4, (x,), ...)

    ``FuseOps`` strings together the names of all that it fuses; the files and tables that carry the
    name of a kernel do not take hundreds of them. Functions with a ``global_symbol`` keep theirs,
    for somebody may call them by it. Applied twice the pass does what it does once.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rename functions and what calls them."""
        names = {
            old: GlobalVar(_short(old.name_hint))
            for old, func in mod.functions_items()
            if len(old.name_hint) > LONGEST and "global_symbol" not in func.attrs
        }
        if not names:
            return mod
        for old, new in names.items():
            relax.expr._update_type(new, old.ty)
        rename = _Rename(names)
        functions = {
            names.get(old, old): rename.visit_expr(func)
            if isinstance(func, relax.Function)
            else func
            for old, func in mod.functions_items()
        }
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


@mutator
class _Rename(PyExprMutator):
    """Replaces global variables."""

    def __init__(self, names: dict[GlobalVar, GlobalVar]) -> None:
        super().__init__()
        self._names = names

    def visit_global_var_(self, op: GlobalVar) -> GlobalVar:
        """The new variable, if there is one."""
        return self._names.get(op, op)


def _short(name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    return f"{name[: LONGEST - _DIGITS - 1].rstrip('_')}_{digest}"
