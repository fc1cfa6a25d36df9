# SPDX-License-Identifier: Apache-2.0
"""Recognition of a ``call_tir`` by its body, never by its name.

TVM's ONNX importer emits Clip and Pad as PrimFuncs built from ``topi.maximum``, ``topi.minimum``
and ``topi.nn.pad``. A body is first read for its parameters (a bound, the extents of a padding),
then compared as a whole with what TOPI builds from these parameters: any difference means unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm_ffi
from tvm import relax, te, tirx, topi
from tvm.ir import TensorLoad
from tvm.sym import Analyzer

from ..core.constants import numbers, uniform
from ..core.expressions import Value, op_name
from ..core.graph import Graph

_EXTREMA = {tirx.Max: topi.maximum, tirx.Min: topi.minimum}


@dataclass(frozen=True)
class Bound:
    """``maximum(x, value)`` if ``is_lower``, else ``minimum``; None: the second argument."""

    is_lower: bool
    value: float | None


@dataclass(frozen=True)
class Padding:
    """Elements of ``value`` before and after the data along each axis."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    value: float


def bound_of(graph: Graph, call: relax.Expr) -> tuple[relax.Expr, bool, float] | None:
    """``(x, is_lower, value)`` if ``call`` bounds every element of ``x`` by one number."""
    func = _prim_func(graph, call)
    bound = None if func is None else graph.remember(func, _read_bound)
    if bound is None:
        return None
    operands = call.args[1].fields
    value = bound.value if bound.value is not None else uniform(numbers(operands[1]))
    if value is None or not call.ty.is_base_of(operands[0].ty):
        return None
    return operands[0], bound.is_lower, value


def padding_of(graph: Graph, call: relax.Expr) -> tuple[relax.Expr, Padding] | None:
    """``(x, padding)`` if ``call`` pads ``x`` with a constant; a copy pads by nothing."""
    func = _prim_func(graph, call)
    padding = None if func is None else graph.remember(func, _read_padding)
    return None if padding is None else (call.args[1].fields[0], padding)


def zero_padding(
    graph: Graph, call: Value
) -> tuple[relax.Expr, tuple[int, ...], tuple[int, ...]] | None:
    """``(x, before, after)`` if ``call`` pads the axes of ``x`` with zeros."""
    if op_name(call) == "relax.nn.pad":
        width = [int(extent) for extent in call.attrs.pad_width]
        if call.attrs.pad_mode != "constant" or _number(call.attrs.pad_value) != 0:
            return None
        if min(width, default=0) < 0:
            return None
        return call.args[0], tuple(width[::2]), tuple(width[1::2])
    match = None if call is None else padding_of(graph, call)
    if match is None or match[1].value != 0:
        return None
    return match[0], match[1].before, match[1].after


def _number(value: object) -> float:
    return float(getattr(value, "value", value))  # type: ignore[arg-type]


def _prim_func(graph: Graph, call: relax.Expr) -> tirx.PrimFunc | None:
    """The function of a ``call_tir`` with one result, of at least one tensor."""
    if op_name(call) != "relax.call_tir" or len(call.args) != 2:
        return None
    if not isinstance(call.args[1], relax.Tuple) or not isinstance(call.ty, relax.TensorType):
        return None
    func = graph.mod[call.args[0]]
    count = len(call.args[1].fields)
    if not isinstance(func, tirx.PrimFunc) or not count or len(func.params) != count + 1:
        return None
    return func if _is_buffer(func.params[0]) and _is_buffer(func.params[-1]) else None


def _is_buffer(param: tirx.Var) -> bool:
    return isinstance(param.ty, tirx.buffer.BufferType)


def _read_bound(func: tirx.PrimFunc) -> Bound | None:
    stored = _stored(func)
    arguments = _arguments(func)
    tensors = [argument for argument in arguments if isinstance(argument, te.Tensor)]
    if type(stored) not in _EXTREMA or len(tensors) > 2:
        return None
    if any(isinstance(argument, te.Tensor) for argument in arguments[len(tensors) :]):
        return None
    if len(tensors) == 1 and not isinstance(stored.b, tirx.FloatImm):
        return None
    second = tensors[1] if len(tensors) == 2 else stored.b
    if not _computes(func, [*arguments, _EXTREMA[type(stored)](tensors[0], second)]):
        return None
    value = None if len(tensors) == 2 else float(stored.b.value)
    return Bound(isinstance(stored, tirx.Max), value)


def _read_padding(func: tirx.PrimFunc) -> Padding | None:
    arguments = _arguments(func)
    if any(isinstance(argument, te.Tensor) for argument in arguments[1:]):
        return None
    data = arguments[0]
    load, value = _stored(func), tirx.const(0.0, data.dtype)
    if op_name(load) == "prim.if_then_else":
        _, load, value = load.args
    if not isinstance(load, TensorLoad) or not isinstance(value, tirx.FloatImm):
        return None
    extents = _padding_extents(func, load)
    if extents is None:
        return None
    before, after = extents
    if not _computes(func, [*arguments, topi.nn.pad(data, before, after, value)]):
        return None
    return Padding(tuple(before), tuple(after), float(value.value))


def _stored(func: tirx.PrimFunc) -> Value:
    """The value that a body consisting of one loop nest around one store stores."""
    body = func.body
    while not isinstance(body, tirx.BufferStore):
        body = getattr(getattr(body, "block", body), "body", None)
        if body is None:
            return None
    return body.value


def _arguments(func: tirx.PrimFunc) -> list[te.Tensor | tirx.Var]:
    """Fresh tensors for the buffers of ``func``, its result excluded, and its shape variables."""
    return [
        te.placeholder(param.ty.shape, str(param.ty.dtype)) if _is_buffer(param) else param
        for param in func.params[:-1]
    ]


def _padding_extents(func: tirx.PrimFunc, load: TensorLoad) -> tuple[list[int], list[int]] | None:
    """Number of elements before and after the data along each axis."""
    inner, outer = func.params[0].ty.shape, func.params[-1].ty.shape
    if len(inner) != len(outer) or len(inner) != len(load.indices):
        return None
    analyzer = Analyzer()
    before, after = [], []
    for index, inner_extent, outer_extent in zip(load.indices, inner, outer, strict=True):
        variables = tirx.analysis.undefined_vars(index)
        if len(variables) != 1:
            return None
        left = analyzer.simplify(variables[0] - index)
        right = analyzer.simplify(outer_extent - inner_extent - left)
        if not isinstance(left, tirx.IntImm) or not isinstance(right, tirx.IntImm):
            return None
        before.append(int(left))
        after.append(int(right))
    return (before, after) if min(before + after, default=0) >= 0 else None


def _computes(func: tirx.PrimFunc, tensors: list[te.Tensor | tirx.Var]) -> bool:
    """Return whether ``func`` is, up to names and attributes, the computation of ``tensors``.

    Its loops may count in int64, as Relax makes them, or in the type of the tensors' extents.
    """
    for index_dtype in ("int64", None):
        expected = te.create_prim_func(tensors, index_dtype_override=index_dtype)
        bare = [tirx.PrimFunc(f.params, f.body, f.ret_type) for f in (func, expected)]
        if tvm_ffi.structural_equal(*bare):
            return True
    return False
