# SPDX-License-Identifier: Apache-2.0
"""Pass ``CoalesceReduction``: one op for every reduction; and the report on reductions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import IRModule, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules import attributes
from schedules.errors import OpError
from schedules.tir.extents import constant
from schedules.workload.reduce import normal_axes

from ..core.expressions import Value, is_claimed, op_name
from ..op import coalesced_reduce

Entry = dict[str, Any]


def read_reduction_report(mod: IRModule) -> Entry:
    """Return what passes did to the reductions of ``mod``.

    Returns
    -------
    dict
        ``rewritten``: the number that ``CoalesceReduction`` replaced. ``groups``: a list with an
        entry for each function that ``FuseReductions`` made: the ``function`` that calls it, its
        ``name`` and ``kind`` (``chain``, ``online``, ``stored``: elements that use no results,
        ``sisters``, ``epilogue`` or ``producers``),
        ``outputs`` and ``reduced`` (``M`` and ``N``; None where symbolic), and by the names of what
        they call its ``reductions``, its other ``members``, the ``producers`` that it absorbed, and
        the ``results`` that it returns.
    """
    text = mod.attrs.get(attributes.REDUCTION_REPORT) if mod.attrs else None
    return {"rewritten": 0, "groups": []} if text is None else json.loads(str(text))


def extend_reduction_report(
    mod: IRModule, rewritten: int = 0, groups: Sequence[Entry] = ()
) -> IRModule:
    """A copy of ``mod`` with an extended report; ``mod`` itself if there is nothing to add."""
    if not rewritten and not groups:
        return mod
    report = read_reduction_report(mod)
    report["rewritten"] += rewritten
    report["groups"] += groups
    return mod.with_attr(attributes.REDUCTION_REPORT, json.dumps(report))


_NARROW = ("float16", "bfloat16")
_OPERATORS = {
    f"relax.{name}": name for name in ("sum", "prod", "min", "max", "mean", "argmax", "argmin")
}


@tvm.transform.module_pass(opt_level=0, name="CoalesceReduction")
class CoalesceReduction:
    """Turn the reductions of Relax into ``tvm_fusion.coalesced_reduce``.

    Before::

        lv = R.multiply(x, x)
        lv1 = R.sum(lv, axis=[0, 2])
        lv2 = R.max(y, axis=[1], keepdims=True)
        lv3 = R.variance(z, axis=[0])

    After::

        lv1 = R.tvm_fusion.coalesced_reduce(x, operator="sum_squares", axes=[0, 2])
        lv2 = R.tvm_fusion.coalesced_reduce(y, operator="max", axes=[1], keepdims=True)
        lv = R.tvm_fusion.coalesced_reduce(z, operator="mean", axes=[0], keepdims=True)
        lv4 = R.subtract(z, lv)
        lv5 = R.multiply(lv4, lv4)
        lv3 = R.tvm_fusion.coalesced_reduce(lv5, operator="mean", axes=[0])

    A transposition before a reduction is removed: the reduction reads the untransposed data, and
    its result is transposed where necessary. So the innermost loop scans consecutive addresses.

    It handles ``sum``, ``prod``, ``min``, ``max``, ``mean``, ``argmin``, ``argmax``, ``variance``
    and ``std`` (computed in float32 if the data has 16 bits), ``collapse_sum_to`` and
    ``collapse_sum_like``; everywhere, also in branches and local functions. Every result keeps its
    type. Integers give the same numbers; floats are rounded in another order, 16-bit ones only
    once. NaN wins every comparison, which TVM's own reductions do not guarantee. The module
    attribute ``tvm_fusion.reduction_report`` counts the rewritten reductions.

    Left alone: types that the op does not take (uint16, float8, sums of bool, means of integers),
    data of unknown shape or with several symbolic extents of one kind, extremes of no elements,
    reductions within other ops (softmax, norms), and functions that another pass has claimed. The
    pass is idempotent.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        result, count = mod.clone(), 0
        for name, func in mod.functions_items():
            if isinstance(func, relax.Function):
                rewriter = _Rewriter(mod)
                rewritten = rewriter.visit_expr(func)
                if rewriter.count:
                    result.update_func(name, relax.analysis.remove_all_unused(rewritten))
                    count += rewriter.count
        return extend_reduction_report(result, rewritten=count)


@mutator
class _Rewriter(PyExprMutator):
    """Replaces each reduction."""

    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.count = 0

    def visit_function_(self, func: relax.Function) -> relax.Expr:
        """Skip the functions of other passes, local ones too."""
        if is_claimed(func):
            return func
        return super().visit_function_(func)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Rewrite a call of a reduction, if the op takes its data."""
        call = self.visit_expr_post_order(call)
        rule = _RULES.get(op_name(call) or "")
        if rule is None:
            return call
        try:
            lowered = self.builder_.normalize(rule(self, call))
        except OpError:
            return call
        if not tvm_ffi.structural_equal(lowered.ty, call.ty):
            return call
        self.count += 1
        return lowered


def _reduce(rewriter: PyExprMutator, call: relax.Call) -> relax.Expr:
    """Rewrite ``sum``, ``max`` and the others that the op has by the same name."""
    operator, data = _OPERATORS[call.op.name], call.args[0]
    if operator == "sum":
        factor = _squared(rewriter, data)
        if factor is not None:
            operator, data = "sum_squares", factor
    result = _reduce_in_place(rewriter, call, operator, data)
    if result is not None:
        return result
    return coalesced_reduce(data, operator, call.attrs.axis, keepdims=call.attrs.keepdims)


def _reduce_in_place(
    rewriter: PyExprMutator, call: relax.Call, operator: str, data: relax.Expr
) -> relax.Expr | None:
    """Reduce the operand of a transposition instead of ``data``; transpose the result if needed."""
    transposition: Value = _definition(rewriter, data)
    if op_name(transposition) != "relax.permute_dims":
        return None
    source, ndim = transposition.args[0], data.ty.ndim
    given = transposition.attrs.axes
    order = [int(a) % ndim for a in given] if given is not None else [*range(ndim)][::-1]
    axes = normal_axes(_axis_list(call.attrs.axis), ndim)
    reduced = [order[axis] for axis in axes]
    parallel = [order[axis] for axis in range(ndim) if axis not in axes]
    if operator.startswith("arg") and reduced != sorted(reduced):
        return None  # positions count in the order of the transposed data
    result = coalesced_reduce(source, operator, reduced)
    if parallel != sorted(parallel):
        result = rewriter.builder_.emit(result)
        result = relax.op.permute_dims(result, [sorted(parallel).index(a) for a in parallel])
    if call.attrs.keepdims:
        result = relax.op.reshape(rewriter.builder_.emit(result), call.ty.shape)
    return result


def _variance(rewriter: PyExprMutator, call: relax.Call) -> relax.Expr:
    """The mean of squared differences from the mean: two passes over the data."""
    data, dtype = call.args[0], str(call.args[0].ty.dtype)
    axes, keepdims = call.attrs.axis, call.attrs.keepdims
    coalesced_reduce(data, "mean", axes)  # fails before anything is emitted
    if dtype in _NARROW:
        data = rewriter.builder_.emit(relax.op.astype(data, "float32"))
    mean = rewriter.builder_.emit(coalesced_reduce(data, "mean", axes, keepdims=True))
    difference = rewriter.builder_.emit(relax.op.subtract(data, mean))
    squares = rewriter.builder_.emit(relax.op.multiply(difference, difference))
    result = coalesced_reduce(squares, "mean", axes, keepdims=keepdims)
    if call.op.name == "relax.std":
        result = relax.op.sqrt(rewriter.builder_.emit(result))
    if dtype in _NARROW:
        result = relax.op.astype(rewriter.builder_.emit(result), dtype)
    return result


def _collapse(rewriter: PyExprMutator, call: relax.Call) -> relax.Expr:
    """The sum over the axes that a broadcast added."""
    data, shape, target = call.args[0], _extents(call.args[0].ty), _extents(call.ty)
    if shape is None or target is None:
        raise OpError(f"{call.op.name}: expected known extents")
    new = len(shape) - len(target)
    kept = [constant(extent) == 1 != constant(shape[new + i]) for i, extent in enumerate(target)]
    axes = [*range(new), *(new + i for i, is_one in enumerate(kept) if is_one)]
    result = coalesced_reduce(data, "sum", axes, keepdims=new == 0)
    if new and any(kept):
        result = relax.op.reshape(rewriter.builder_.emit(result), target)
    return result


def _squared(rewriter: PyExprMutator, data: relax.Expr) -> Value:
    """``x`` if ``data`` is ``x * x`` or ``square(x)``."""
    value = _definition(rewriter, data)
    name = op_name(value)
    if name == "relax.square":
        return value.args[0]
    if name == "relax.multiply" and value.args[0].same_as(value.args[1]):
        return value.args[0]
    return None


def _definition(rewriter: PyExprMutator, data: relax.Expr) -> Value:
    return rewriter.lookup_binding(data) if isinstance(data, relax.Var) else None


def _axis_list(axis: Value) -> list[int] | None:
    if axis is None:
        return None
    return [axis] if isinstance(axis, int) else [int(each) for each in axis]


def _extents(ty: relax.Type) -> list | None:
    is_known = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    return list(ty.shape.values) if is_known else None


_RULES: dict[str, Callable[[PyExprMutator, relax.Call], relax.Expr]] = {
    **dict.fromkeys(_OPERATORS, _reduce),
    "relax.variance": _variance,
    "relax.std": _variance,
    "relax.collapse_sum_to": _collapse,
    "relax.collapse_sum_like": _collapse,
}
