# SPDX-License-Identifier: Apache-2.0
"""Pass ``AnnotateGather``: gathers may be fused like other injective functions."""

from __future__ import annotations

import tvm
from tvm import IRModule, tirx

from schedules.expression_walk import loads
from schedules.gpu.stages import read_stages

_INJECTIVE = 2
_OPAQUE = 8


@tvm.transform.module_pass(opt_level=0, name="AnnotateGather")
class AnnotateGather:
    """Call functions injective that compute each element from a place they read from memory.

    Before::

        @T.prim_func
        def take(table: (1000, 64), index: (5,), out: (5, 64)):
            T.func_attr({"op_pattern": 8})
            ...
            out[i, j] = table[index[i], j]

    After::

            T.func_attr({"op_pattern": 2})

    It runs between ``AnnotateTIROpPattern``, which calls every indirect read opaque, and
    ``FuseOps``, which then makes one kernel of a lookup, the steps that mend its index, and the
    concatenation of many lookups. For GPUs only: rules for CPUs do not expect it.

    Left alone: reshapes, which are views; reductions, scatters, functions with several outputs, and
    whatever is no plain nest of loops. Applied twice the pass does what it does once.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Change the attribute of the functions of ``mod``."""
        changed = {
            name: func.with_attr("op_pattern", _INJECTIVE)
            for name, func in mod.functions_items()
            if isinstance(func, tirx.PrimFunc) and _is_gather(func)
        }
        result = IRModule(dict(mod.functions_items()), attrs=mod.attrs)
        for name, func in changed.items():
            result.update_func(name, func)
        return result


def _is_gather(func: tirx.PrimFunc) -> bool:
    """Whether TVM calls a function opaque that computes each element of one output by lookups."""
    if "op_pattern" not in func.attrs or int(func.attrs["op_pattern"]) != _OPAQUE:
        return False
    stages = read_stages(func)
    if stages is None or any(stage.reduced for stage in stages):
        return False
    written = [stage for stage in stages if any(stage.output.same_as(p) for p in func.params)]
    return len(written) == 1 and any(_is_indirect(stage.value) for stage in stages)


def _is_indirect(value: tirx.Expr) -> bool:
    """Whether a place is itself read from memory; reshapes, opaque too, stay views."""
    return any(loads(index) for load in loads(value) for index in load.indices)
