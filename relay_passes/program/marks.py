# SPDX-License-Identifier: Apache-2.0
"""Passes that mark functions of TensorIR for later ones, or remove marks.

``MarkConstants``, ``AnnotateGathers``, ``AllowTF32`` and ``DropPragmaScopes``.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst, GlobalVar

from schedules import attributes

from ..core.element_function import ElementFunction
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
                result.update_func(name, func.with_attr(attributes.CONSTANTS, places))
        return result


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


@tvm.transform.module_pass(opt_level=0, name="AllowTF32")
class AllowTF32:
    """Mark every function, before it is scheduled, so that products and convolutions may use TF32.

    Factors then keep 10 of the 23 bits behind the point; sums and all else stay float32. Has no
    effect before sm_80.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Mark the functions."""
        changed = mod.clone()
        for var, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc):
                changed.update_func(var, func.with_attr(attributes.TF32, True))
        return changed


@tvm.transform.module_pass(opt_level=0, name="DropPragmaScopes")
class DropPragmaScopes:
    """Remove the attribute ``pragma_scope`` from statements.

    Before::

        with T.attr(0, "pragma_scope", "seq"):
            for i in T.parallel(9): ...

    After::

        for i in T.parallel(9): ...

    TVM's scatters have it; on a CPU it means nothing, but LLVM's code generator writes a warning of
    it to standard error in each compilation. The pass is idempotent.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite the functions of TensorIR."""
        result = mod.clone()
        for name, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc):
                result.update_func(
                    name, tvm_ffi.structural_map(func, (tirx.AttrStmt, _without_pragma))
                )
        return result


def _without_pragma(stmt: tirx.AttrStmt) -> tirx.Stmt:
    return stmt.body if stmt.attr_key == "pragma_scope" else stmt
