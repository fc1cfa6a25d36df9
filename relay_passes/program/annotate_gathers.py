# SPDX-License-Identifier: Apache-2.0
"""Pass ``AnnotateGathers``: gathers are injective functions."""

from __future__ import annotations

import tvm
from tvm import IRModule, tirx

from ..core.element_function import ElementFunction

_INJECTIVE, _OPAQUE = 2, 8  # tvm::relax::OpPatternKind


@tvm.transform.module_pass(opt_level=0, name="AnnotateGathers")
class AnnotateGathers:
    """Let ``FuseOps`` put gathers into groups.

    Before::

        @T.prim_func
        def take(table, index, result):
            T.func_attr({"op_pattern": 8})                      # opaque
            ... result[i, j] = table[index[i], j]

    After::

            T.func_attr({"op_pattern": 2})                      # injective

    ``AnnotateTIROpPattern`` calls a function opaque that reads where its data say. Yet each of its
    elements is computed by itself, so the computation of the indices may go into its kernel, and it
    may go into that of a concatenation: the embeddings of a recommender become one kernel.

    It runs after ``AnnotateTIROpPattern`` and before ``FuseOps``. Left alone: functions of more
    than one output, reductions, scatters, and whatever else computes no element by itself. Applied
    twice the pass does what it does once.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Annotate every opaque function that computes its elements one by one."""
        result = mod.clone()
        for name, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or func.attrs.get("op_pattern") != _OPAQUE:
                continue
            if ElementFunction.read(func) is not None:
                result.update_func(name, func.with_attr("op_pattern", _INJECTIVE))
        return result
