# SPDX-License-Identifier: Apache-2.0
"""Pass ``ApplyRules``: every function of TensorIR gets a schedule."""

from __future__ import annotations

from tvm import IRModule, tirx
from tvm.ir.transform import PassContext, module_pass
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target

from schedules.schedule_rule import schedule_function


@module_pass(opt_level=0, name="ApplyRules")
class ApplyRules:
    """Schedule each function by the first rule that takes it.

    Before::

        @T.prim_func
        def add(...): ...                       # as legalization made it

    After, with the rule's name::

        @T.prim_func
        def add(...):
            T.func_attr({"tirx.is_scheduled": True, "tvm_fusion.rule": "Elementwise"})
            ...

    As TVM's ``ApplyDefaultSchedule``, for the target of the function or else the current one, but a
    rule that fails is told of by the kernel's name and passed over
    (:func:`schedules.schedule_rule.schedule_function`). Functions that are scheduled, and those
    that no rule takes, stay as they are.

    Parameters
    ----------
    *rules : ScheduleRule
        The rules, in the order in which they are asked.
    """

    def __init__(self, *rules: ScheduleRule):
        self.rules = rules

    def transform_module(self, mod: IRModule, _: PassContext) -> IRModule:
        """Return the module with its functions scheduled."""
        functions = dict(mod.functions_items())
        for var, func in functions.items():
            if isinstance(func, tirx.PrimFunc) and not func.attrs.get("tirx.is_scheduled", False):
                target = func.attrs.get("target") or Target.current(allow_none=False)
                functions[var] = schedule_function(var.name_hint, func, target, self.rules)
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
