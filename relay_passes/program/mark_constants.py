# SPDX-License-Identifier: Apache-2.0
"""Pass ``MarkConstants``: tells schedule rules which arguments of a kernel are constants."""

from __future__ import annotations

import tvm
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst, GlobalVar

from schedules.schedule_rule import CONSTANTS

from ..core.expressions import op_name


@tvm.transform.module_pass(opt_level=0, name="MarkConstants")
class MarkConstants:
    """List the parameters of each function of TensorIR that are constants in all of its calls.

    Before::

        @T.prim_func
        def matmul(x, w, y): ...

        y = R.call_tir(cls.matmul, (x, metadata["relax.expr.Constant"][0]), ...)

    After::

        @T.prim_func
        def matmul(x, w, y):
            T.func_attr({"tvm_fusion.constants": [1]})
            ...

    Left alone: functions that are scheduled, and those that something other than ``R.call_tir``
    refers to. It runs before ``ApplyRules``. The pass is idempotent.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Mark all functions."""
        constants: dict[str, set[int]] = {}

        def look(expr: relax.Expr) -> None:
            if isinstance(expr, relax.Call) and op_name(expr) == "relax.call_tir":
                found = {
                    place
                    for place, argument in enumerate(expr.args[1].fields)
                    if isinstance(argument, GenericConst)
                }
                name = expr.args[0].name_hint
                constants[name] = constants.get(name, found) & found
            elif isinstance(expr, relax.Call) and op_name(expr) is not None:
                for argument in expr.args:
                    if isinstance(argument, GlobalVar):
                        constants[argument.name_hint] = set()

        for func in mod.functions.values():
            if isinstance(func, relax.Function):
                relax.analysis.post_order_visit(func, look)
        result = mod.clone()
        for name, func in mod.functions_items():
            places = sorted(constants.get(name.name_hint, ()))
            is_open = isinstance(func, tirx.PrimFunc) and "tirx.is_scheduled" not in func.attrs
            if is_open and places:
                result.update_func(name, func.with_attr(CONSTANTS, places))
        return result
