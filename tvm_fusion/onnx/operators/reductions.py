# SPDX-License-Identifier: Apache-2.0
"""Reductions, and axes that are only known at run time.

Some are written by others::

    of no axes:                          Abs(x), Mul(x, x), Log(x) or x, as of one element
    ReduceMean of integers:              Cast(ReduceSum(Cast(x, int64)) / count)
    L2, LogSum, LogSumExp of integers:   in double, cast back
    ReduceLogSumExp:                     Log(ReduceSum(Exp(x - m))) + m,
                                         where m is ReduceMax(x), or 0 where that is infinite

Where axes of reductions, CumSum and CumProd are only known at run time, all results that the
model's shapes allow are computed, and the axes choose one of them::

    y = ReduceSum(x, axes)          s = Concat(Unsqueeze(ReduceSum(x, [0])), Unsqueeze(...), ...)
                            ->      y = Gather(s, place of axes among the candidates)

A reduction needs the shape that the model declares of its result: axes that give another one are an
error of the call. There are few candidates, mostly one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from tvm import relax

from ..model.expansion import AXES_ARE_INPUTS, Expansion
from ..model.graph_edits import attribute, node_label
from ..model.tensor_facts import INTEGER_TYPES, GraphFacts
from .casts import widen, widen_sum
from .indexing import set_message
from .operator import Operator, operators

REDUCTIONS = tuple(
    f"Reduce{name}" for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()
)

_FRACTIONAL = ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
"""Reductions whose results are no integers, even of integers."""


def expand_reduction(expansion: Expansion) -> None:
    """Replace a reduction that TVM's converter would compute otherwise."""
    kind = expansion.facts.dtype(expansion.input(0))
    if _keeps_all_axes(expansion):
        expansion.finish(_of_each(expansion, kind))
    elif expansion.node.op_type == "ReduceMean" and kind in INTEGER_TYPES:
        _mean_of_integers(expansion, kind)
    elif expansion.node.op_type == "ReduceLogSumExp":
        _log_sum_exp(expansion, kind)
    elif expansion.node.op_type in _FRACTIONAL and kind in INTEGER_TYPES:
        wide = TensorProto.DOUBLE
        x = expansion.emit("Cast", expansion.input(0), to=wide)
        _finish(expansion, _reduced(expansion, expansion.node.op_type, x), wide)
    elif expansion.node.op_type in ("ReduceMax", "ReduceMin") and kind == TensorProto.BOOL:
        # TVM knows no largest and no smallest bool.
        widen(expansion, TensorProto.INT32, [TensorProto.BOOL])


def _reduced(expansion: Expansion, op_type: str, x: str) -> str:
    """Reduce a tensor over the axes of the node, which are kept."""
    axes = expansion.get("axes")
    if expansion.opset < AXES_ARE_INPUTS and op_type != "ReduceSum":
        given = {} if axes is None else {"axes": axes}
        return expansion.emit(op_type, x, **given)
    name = expansion.input(1)
    if axes is not None:
        name = expansion.constant("axes", np.array(axes, np.int64))
    return expansion.emit(op_type, x, *filter(None, [name]))


def _finish(expansion: Expansion, result: str, kind: int) -> None:
    """Let a result with all axes be the node's, of another type."""
    if kind != expansion.facts.dtype(expansion.input(0)):
        result = expansion.emit("Cast", result, to=expansion.facts.dtype(expansion.input(0)))
    if not expansion.get("keepdims", 1):
        axes = _axes(expansion)
        names = [expansion.constant("kept", np.array(axes, np.int64))] if axes else []
        result = expansion.emit("Squeeze", result, *names)
    expansion.finish(result)


def _mean_of_integers(expansion: Expansion, kind: int) -> None:
    wide = kind if kind == TensorProto.UINT64 else TensorProto.INT64
    x = expansion.emit("Cast", expansion.input(0), to=wide)
    shape = expansion.facts.shape(expansion.input(0))
    if shape is None:
        one = onnx.numpy_helper.from_array(np.ones(1, helper.tensor_dtype_to_np_dtype(wide)))
        ones = expansion.emit("ConstantOfShape", expansion.emit("Shape", x), value=one)
        count = _reduced(expansion, "ReduceSum", ones)
    else:
        axes = _axes(expansion) or range(len(shape))
        count = expansion.number(math.prod(shape[axis] for axis in axes), wide)
    total = _reduced(expansion, "ReduceSum", x)
    _finish(expansion, expansion.emit("Div", total, count), wide)


def _log_sum_exp(expansion: Expansion, kind: int) -> None:
    wide = TensorProto.DOUBLE if kind in INTEGER_TYPES else kind
    x = expansion.input(0) if wide == kind else expansion.emit("Cast", expansion.input(0), to=wide)
    largest = _reduced(expansion, "ReduceMax", x)
    is_infinite = expansion.emit("IsInf", largest)
    shift = expansion.emit("Where", is_infinite, expansion.number(0, wide), largest)
    exponentials = expansion.emit("Exp", expansion.emit("Sub", x, shift))
    total = _reduced(expansion, "ReduceSum", exponentials)
    result = expansion.emit("Add", expansion.emit("Log", total), shift)
    _finish(expansion, result, wide)


def _axes(expansion: Expansion) -> list[int]:
    """Axes of a node if they are constant; none stand for all."""
    if expansion.input(1):
        value = expansion.facts.constant(expansion.input(1))
        return [] if value is None else value.tolist()
    return list(expansion.get("axes", []))


def _keeps_all_axes(expansion: Expansion) -> bool:
    """Return whether a node reduces no axis."""
    if not expansion.get("noop_with_empty_axes", 0):
        return False
    axes = expansion.facts.constant(expansion.input(1))
    return not expansion.input(1) or (axes is not None and not axes.size)


def _of_each(expansion: Expansion, kind: int) -> str:
    """The reduction of each element by itself."""
    x = expansion.input(0)
    if expansion.node.op_type in ("ReduceL1", "ReduceL2"):
        return expansion.emit("Abs", x)
    if expansion.node.op_type == "ReduceSumSquare":
        return expansion.emit("Mul", x, x)
    if expansion.node.op_type != "ReduceLogSum":
        return expansion.emit("Identity", x)
    if kind not in INTEGER_TYPES:
        return expansion.emit("Log", x)
    wide = expansion.emit("Log", expansion.emit("Cast", x, to=TensorProto.DOUBLE))
    return expansion.emit("Cast", wide, to=kind)


_MOST_CANDIDATES = 8
_MOST_DIMENSIONS = 8


def choose_reduction(expansion: Expansion) -> None:
    """Choose among the results of a reduction whose axes depend on data."""
    facts = expansion.facts
    if not expansion.input(1) or facts.constant(expansion.input(1)) is not None:
        return
    shape, result = facts.shape(expansion.input(0)), facts.shape(expansion.node.output[0])
    count = facts.shape(expansion.input(1))
    if shape is None or result is None or count is None or len(count) != 1:
        return
    keeps = bool(expansion.get("keepdims", 1))
    fitting = _candidates(shape, count[0], result, keeps)
    if not 0 < len(fitting) <= _MOST_CANDIDATES or len(shape) > _MOST_DIMENSIONS:
        return
    # Each set of axes is a sum of powers of two, which no axis twice gives.
    table = np.full(1 << len(shape), len(fitting), np.int64)
    for number, axes in enumerate(fitting):
        table[sum(1 << axis for axis in axes)] = number
    powers = expansion.constant("powers", np.array([1 << axis for axis in range(len(shape))]))
    about = f"{node_label(expansion.node)} ({expansion.node.op_type}) has axes"
    bits = expansion.emit("Gather", powers, expansion.input(1))
    bounds = f"{about} out of bounds; {expansion.input(0)!r} has the shape {shape}"
    set_message(expansion.nodes[-1], bounds)
    code = expansion.emit("ReduceSum", bits, keepdims=0)
    place = expansion.emit("Gather", expansion.constant("places", table), code)
    message = f"{about} that do not give the shape {result} of its result"
    set_message(expansion.nodes[-1], message)
    results = [_with_axes(expansion, np.array(axes, np.int64)) for axes in fitting]
    _choose(expansion, results, place, message)


def _candidates(
    shape: Sequence[int], count: int, result: Sequence[int], keeps: bool
) -> list[tuple[int, ...]]:
    """Sets of so many axes that reduce a shape to another one."""
    candidates = []
    for axes in itertools.combinations(range(len(shape)), count):
        kept = [1 if axis in axes else size for axis, size in enumerate(shape)]
        left = kept if keeps else [size for axis, size in enumerate(shape) if axis not in axes]
        if list(left) == list(result):
            candidates.append(axes)
    return candidates


def choose_scan(expansion: Expansion) -> None:
    """Choose among the results of a CumSum or a CumProd whose axis depends on data."""
    facts = expansion.facts
    if not expansion.input(1) or facts.constant(expansion.input(1)) is not None:
        return
    shape, sizes = facts.shape(expansion.input(0)), facts.shape(expansion.input(1))
    if shape is None or sizes is None or math.prod(sizes) != 1:
        return
    if not 0 < len(shape) <= _MOST_CANDIDATES:
        return
    no_sizes = expansion.constant("scalar", np.zeros(0, np.int64))
    place = expansion.emit("Reshape", expansion.input(1), no_sizes)
    axes = range(len(shape))
    results = [_with_axes(expansion, np.array(axis, np.int64)) for axis in axes]
    about = f"{node_label(expansion.node)} ({expansion.node.op_type}) has an axis out of bounds"
    message = f"{about}; {expansion.input(0)!r} has the shape {shape}"
    _choose(expansion, results, place, message)


def _with_axes(expansion: Expansion, axes: np.ndarray) -> str:
    """The node with constant axes."""
    result = expansion.emit(
        expansion.node.op_type, expansion.input(0), expansion.constant("axes", axes)
    )
    expansion.nodes[-1].attribute.extend(expansion.node.attribute)
    return result


def _choose(expansion: Expansion, results: Sequence[str], place: str, message: str) -> None:
    """Let the result at a place be the node's; another place is an error with the message."""
    first = expansion.constant("first", np.zeros(1, np.int64))
    rows = [expansion.emit("Unsqueeze", result, first) for result in results]
    chosen = expansion.emit("Gather", expansion.emit("Concat", *rows, axis=0), place, axis=0)
    set_message(expansion.nodes[-1], message)
    expansion.finish(chosen)


def translate_cumulative_product(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Products of the elements up to each one."""
    data, axis = inputs[0], attributes["axis"]
    is_reversed = bool(attributes.get("reverse", 0))
    data = builder.normalize(relax.op.flip(data, axis)) if is_reversed else data
    is_exclusive = bool(attributes.get("exclusive", 0))
    result = relax.op.cumprod(data, axis, str(data.ty.dtype), is_exclusive)
    return relax.op.flip(builder.normalize(result), axis) if is_reversed else result


def name_axis(expansion: Expansion) -> None:
    """Give a CumProd its constant axis as an attribute."""
    axis = expansion.facts.constant(expansion.input(1))
    if axis is not None and axis.size == 1:
        kept = {name: expansion.get(name, 0) for name in ("exclusive", "reverse")}
        number = int(axis.item())
        expansion.finish(expansion.emit("CumProd", expansion.input(0), axis=number, **kept))


def _axes_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    if len(node.input) > 1 and facts.depends_on_data(node.input[1]):
        return (
            f"its axes {node.input[1]!r} depend on data, and the shape of its result is not known; "
            "expected constant axes, or a model that declares that shape"
        )
    return None


def _scan_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    dims = facts.dims(node.input[0])
    value = facts.constant(node.input[1]) if len(node.input) > 1 else None
    if value is not None and value.size != 1:
        return f"its axis is {value.tolist()}; expected one number"
    axis = attribute(node, "axis") if value is None else value.item()
    if axis is None or dims is None or -len(dims) <= axis < len(dims):
        return None
    return f"its axis is {axis}; expected one of {len(dims)} dimensions"


OPERATORS = (
    *operators("ArgMax ArgMin"),
    *(
        Operator(
            name,
            widen=widen_sum if name in _FRACTIONAL else None,
            choose=choose_reduction,
            expand=expand_reduction,
            check=_axes_problem,
        )
        for name in REDUCTIONS
    ),
    Operator("CumSum", choose=choose_scan, check=_scan_problem),
    Operator(
        "CumProd",
        choose=choose_scan,
        expand=name_axis,
        shape_inputs=(1,),
        check=_scan_problem,
        translate=translate_cumulative_product,
    ),
)
