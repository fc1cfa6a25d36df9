# SPDX-License-Identifier: Apache-2.0
"""Pass ``ConfigureReductions``: the configuration of each GPU kernel of reductions."""

from __future__ import annotations

import zlib

import numpy as np
import tvm
import tvm_ffi
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst, GlobalVar
from tvm.target import Target

from schedules.gpu import CoalescedReduce
from schedules.gpu.core.machine import gpu_target
from schedules.tuning.records import Records
from schedules.workload.workspace_layout import MARK

from ..core.expressions import op_name

_KEPT = frozenset(["global_symbol", "tirx.is_scheduled"])
"""Attributes of functions whose signature others may know."""


@tvm.transform.module_pass(opt_level=0, name="ConfigureReductions")
class ConfigureReductions:
    """Choose threads, splits and finish of every group of reductions, and add what they need.

    Before::

        lv = R.call_tir(cls.fused_negative_coalesced_sum, (x,), ...)

        @T.prim_func
        def fused_negative_coalesced_sum(x: T.Buffer((1048576,), "float32"), ...): ...

    After, where several blocks share an output and the last one combines their results::

        lv = R.call_tir(cls.fused_negative_coalesced_sum, (metadata["..."][0], x), ...)

        @T.prim_func
        def fused_negative_coalesced_sum(
            workspace: T.Buffer((2656,), "int32"), x: T.Buffer((1048576,), "float32"), ...
        ):
            T.func_attr({"tvm_fusion.reduce_config": '{"finish": "last_block", ...}'})
            ...

    It runs after ``FuseTIR`` and before the schedule rules. ``CoalescedReduce`` reads the
    attribute; where there is none, it chooses a configuration without a workspace. A record of a
    function's workload decides before the rule's own choice. All calls of a
    function have one workspace, which calls on several streams may use at the same time.

    Left alone: functions that are public or scheduled, and modules for other targets than ``cuda``
    and ``opencl``. The pass is idempotent.

    Parameters
    ----------
    target : Target | None
        Target of the module; the current target if None.
    records : Records | None
        Winners of tuning jobs.
    """

    def __init__(self, target: Target | None = None, records: Records | None = None) -> None:
        self.target = target
        self.records = records

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Configure the functions of TensorIR and extend their calls."""
        target = gpu_target(self.target)
        if target is None:
            return mod
        rule, functions = CoalescedReduce(self.records), dict(mod.functions_items())
        extended: dict[GlobalVar, tuple[GlobalVar, GenericConst]] = {}
        for name, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc) and not _KEPT.intersection(func.attrs.keys()):
                functions[name] = configured = rule.configure(func, target)
                if len(configured.params) > len(func.params):
                    new = relax.BlockBuilder().add_func(functions.pop(name), name.name_hint)
                    functions[new] = configured
                    extended[name] = new, _workspace(name.name_hint, configured.params[0])

        def extend(call: relax.Call) -> relax.Call:
            if op_name(call) != "relax.call_tir" or call.args[0] not in extended:
                return call
            callee, workspace = extended[call.args[0]]
            arguments = relax.Tuple([workspace, *call.args[1].fields])
            args = [callee, arguments, *call.args[2:]]
            found = relax.Call(call.op, args, call.attrs, call.ty_args)
            return relax.BlockBuilder().normalize(found)

        for name, func in mod.functions_items():
            if extended and isinstance(func, relax.Function):
                functions[name] = tvm_ffi.structural_map(func, (relax.Call, extend))
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _workspace(name: str, param: tirx.Buffer) -> GenericConst:
    """Zeros, and a word that differs by function, with a tag for which nobody waits.

    The virtual machine merges equal constants, but the tickets of one kernel may be where another
    has partial results.
    """
    content = np.zeros(int(param.shape[0]), "int32")
    content[-2:] = zlib.crc32(name.encode()) >> 1, MARK
    return relax.const(content)
