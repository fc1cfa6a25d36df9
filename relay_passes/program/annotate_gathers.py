# SPDX-License-Identifier: Apache-2.0
"""Pass ``AnnotateGathers``: marks gathers as injective functions."""

from __future__ import annotations

import tvm
from tvm import IRModule, tirx

from ..core.element_function import ElementFunction

_INJECTIVE, _OPAQUE = 2, 8  # tvm::relax::OpPatternKind


@tvm.transform.module_pass(opt_level=0, name="AnnotateGathers")
class AnnotateGathers:
    """Let ``FuseOps`` fuse gathers.

    Before::

        @T.prim_func
        def take(table, index, result):
            T.func_attr({"op_pattern": 8})                      # opaque
            ... result[i, j] = table[index[i], j]

    After::

            T.func_attr({"op_pattern": 2})                      # injective

    ``AnnotateTIROpPattern`` marks a function with data-dependent reads as opaque. Yet each of its
    elements is computed independently, so the indices may be computed in its kernel, and it may be
    fused into a concatenation: the embeddings of a recommender become one kernel.

    It runs after ``AnnotateTIROpPattern`` and before ``FuseOps``. Left alone: functions of more
    than one output, reductions, scatters, and all functions that compute no element independently.
    The pass is idempotent.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Annotate every opaque function that computes its elements independently."""
        result = mod.clone()
        for name, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or func.attrs.get("op_pattern") != _OPAQUE:
                continue
            if ElementFunction.read(func) is not None:
                result.update_func(name, func.with_attr("op_pattern", _INJECTIVE))
        return result
