# SPDX-License-Identifier: Apache-2.0
"""Pass ``ShortenNames``: limits the length of private functions' names."""

from __future__ import annotations

import hashlib

import tvm
from tvm import IRModule, relax
from tvm.ir import GlobalVar

from ..core.called_functions import calling

LONGEST = 120
_DIGITS = 8


@tvm.transform.module_pass(opt_level=0, name="ShortenNames")
class ShortenNames:
    """Cut the names of fused functions.

    Before::

        lv = R.call_tir(cls.fused_take_less_add_where_take_..._concat, (x,), ...)

    After, a name of at most 120 characters that ends with a digest of the whole::

        lv = R.call_tir(cls.fused_take_less_add_where_take_1b9d02c4, (x,), ...)

    ``FuseOps`` concatenates the names of all functions that it fuses, which makes names of kernels
    too long for files and tables. Functions with a ``global_symbol`` keep theirs, since they may be
    called by it. The pass is idempotent.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rename functions and their calls."""
        names = {
            old: GlobalVar(_short(old.name_hint))
            for old, func in mod.functions_items()
            if len(old.name_hint) > LONGEST and "global_symbol" not in func.attrs
        }
        if not names:
            return mod
        for old, new in names.items():
            relax.expr._update_type(new, old.ty)
        functions = {
            names.get(var, var): func
            for var, func in calling(dict(mod.functions_items()), names).items()
        }
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _short(name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    return f"{name[: LONGEST - _DIGITS - 1].rstrip('_')}_{digest}"
