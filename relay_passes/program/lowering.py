# SPDX-License-Identifier: Apache-2.0
"""Passes from ops to scheduled functions, and marks of functions that others read on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import tvm
import tvm_ffi
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst, GlobalVar, Op
from tvm.ir.transform import PassContext, module_pass
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target

from schedules import attributes
from schedules.schedule_rule import schedule_function

from ..core.expressions import op_name
from ..core.prim_functions import ElementFunction
from ..op.legalizations import exact_legalizations

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


@tvm.transform.module_pass(opt_level=0, name="LegalizeCalls")
class LegalizeCalls:
    """Replace calls of ops by calls of functions of TensorIR.

    Before::

        y = R.add(x, x)

    After::

        y = R.call_tir(add, (x, x), out_ty=R.Tensor((2, 8), "float32"))

    The error of a call is raised once all others are replaced: TVM's pass, left in the midst of a
    function, prints a warning on standard error that no Python code can catch.

    Parameters
    ----------
    rules : Mapping[str, callable]
        Legalizations that take the place of those registered, and of those of
        ``op/legalizations.py``.

    Raises
    ------
    Exception
        What the first legalization that failed had raised.
    """

    def __init__(self, rules: Mapping[str, Legalize] | None = None) -> None:
        self.rules = rules or {}

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Return the legalized module."""
        errors: list[Exception] = []

        def rule(legalize: Legalize, builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
            try:
                return legalize(builder, call)
            except Exception as error:  # TVM raises anything from ValueError to tvm.error
                errors.append(error)
                return call

        guarded = {
            name: functools.partial(rule, legalize)
            for name, legalize in {**_registered(), **exact_legalizations(), **self.rules}.items()
        }
        mod = relax.transform.LegalizeOps(guarded)(mod)
        if errors:
            raise errors[0]
        return mod


def _registered() -> dict[str, Legalize]:
    """Legalizations of all ops that have one."""
    known = {name: Op.get(name).get_attr("FLegalize") for name in Op.list_op_names()}
    return {name: legalize for name, legalize in known.items() if legalize is not None}


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


@tvm.transform.module_pass(opt_level=0, name="HalfPrecision")
class HalfPrecision:
    """Cast operands of products and convolutions to float16; their sums stay float32.

    Before::

        y = R.matmul(x, w)                                         # float32

    After::

        y = R.astype(R.matmul(R.astype(x, "float16"), w16, out_dtype="float32"), "float16")

    TVM's ``ToMixedPrecision`` says what is float16 between them: element-wise ops, pools and
    changes of layout are, norms, softmax and sums are not. It fails on ``clip``, whose bounds are
    no tensors, so that becomes a minimum of a maximum first. Equal casts become one; those of
    constants are left to ``SimplifyInference``. The types of ``main`` stay as they are.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite ``main``."""
        function = _ClipToMinimum().visit_expr(mod["main"])
        changed = mod.clone()
        changed.update_func(mod.get_global_var("main"), function)
        passes = [
            relax.transform.ToMixedPrecision(out_dtype="float32"),
            relax.transform.EliminateCommonSubexpr(),
        ]
        return tvm.transform.Sequential(passes)(changed)


@mutator
class _ClipToMinimum(PyExprMutator):
    """Writes ``clip`` with tensors as bounds."""

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Rewrite one call."""
        call = self.visit_expr_post_order(call)
        if op_name(call) != "relax.clip":
            return call
        x, low, high = call.args
        least, greatest = (relax.const(bound.value, str(x.ty.dtype)) for bound in (low, high))
        return relax.op.minimum(relax.op.maximum(x, least), greatest)


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
                fixed = {
                    place
                    for place, argument in enumerate(expr.args[1].fields)
                    if isinstance(argument, GenericConst)
                }
                name = expr.args[0].name_hint
                constants[name] = constants.get(name, fixed) & fixed
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
