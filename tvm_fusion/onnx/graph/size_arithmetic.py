# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on symbolic sizes, from which exporters compute the shapes of Reshape and Expand.

::

    rows = Mul(Squeeze(Shape(x)), heads)        # the expression  batch * 4
    shape = Reshape(rows, [-1])                 # the shape  [batch * 4]

TVM's converters have expressions for single sizes and shapes for vectors of them; some only take
both. Here these are computed by numpy, whose elements are expressions. For all other nodes sizes
become tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from onnx import TensorProto
from tvm import relax, te, tirx
from tvm.sym import Analyzer

TAKES_SHAPES = frozenset(
    """Cast CastLike Concat ConstantOfShape Expand Gather Reshape Resize Shape Slice Squeeze
    Where""".split()
)
"""Operators that TVM's converters take with shapes as inputs."""

_TAKES_SIZES = TAKES_SHAPES - {"Where"} | {"Range"}
"""Operators that it translates with single sizes."""

_COMPUTES_SIZES = frozenset("Add Div Mod Mul Pow Sub".split())
"""Operators whose results it computes if all inputs are single sizes and constants."""

_MOST = 16
"""Sizes of a shape; longer vectors are numbers of another meaning, and tensors."""

_LIMIT = 2**31
"""No size is as large."""


def translate_sizes(
    builder: relax.BlockBuilder, op: str, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr | None:
    """Result of a node whose inputs are sizes and constants.

    Parameters
    ----------
    builder : relax.BlockBuilder
        Builder of the function that the node is part of.
    op : str
        The node's operator.
    inputs : sequence
        Its inputs; None for those that it does not have.
    attributes : dict
        Its attributes.

    Returns
    -------
    relax.Expr or None
        A single size as an expression, several as a shape, a matrix or a range as a tensor, a
        comparison as a constant; None if an input is a tensor of the model, all are constant, or
        the operator is left to TVM's converters.
    """
    found = [_values(each) for each in inputs if each is not None]
    values = [value for value in found if value is not None]
    if len(values) < len(found) or not any(value.dtype == object for value in values):
        return None
    if op == "Equal":
        return _equal(*values)
    if op == "Range":
        return _range(builder, *(value.item() for value in values))
    function = _OPERATORS.get(op)
    result = function and function(attributes, *values)
    if result is None or result.size > _MOST:
        return None
    simplify = Analyzer().simplify
    sizes = [simplify(_as_int64(size)) for size in result.ravel()]
    if result.ndim > 1:
        return _tensor(builder, sizes, result.shape)
    return relax.prim_value(sizes[0]) if result.ndim == 0 else relax.ShapeExpr(sizes)


def _range(builder: relax.BlockBuilder, start: Any, limit: Any, step: Any) -> relax.Expr | None:
    """The integers from ``start`` on, whose count is an expression of the sizes."""
    start, limit, step = map(_as_int64, (start, limit, step))
    if not isinstance(step, tirx.IntImm) or not step.value:
        return None
    count = tirx.floordiv(limit - start + step - (1 if step.value > 0 else -1), step)
    count = _analyzer(count).simplify(tirx.max(count, tirx.const(0, "int64")))

    def elements(first: Any, count: Any) -> te.Tensor:
        return te.compute((count,), lambda place: first + place * step, name="range")

    return builder.emit_te(elements, start, count, primfunc_name_hint="range")


def _equal(left: np.ndarray, right: np.ndarray) -> relax.Expr | None:
    """Whether sizes are equal, if that is so, or is not so, whatever they are."""
    result = []
    pairs = np.broadcast(left, right)
    for one, other in pairs:
        difference = Analyzer().simplify(_as_int64(one) - _as_int64(other))
        bound = _analyzer(difference).const_int_bound(difference)
        if bound.min_value <= 0 <= bound.max_value and bound.min_value < bound.max_value:
            return None
        result.append(bound.min_value == bound.max_value == 0)
    return relax.const(np.array(result, bool).reshape(pairs.shape))


def _analyzer(expr: Any) -> Analyzer:
    """An analyzer that knows that sizes are not negative."""
    analyzer = Analyzer()
    for size in tirx.analysis.undefined_vars(expr):
        analyzer.bind(size, tvm.ir.Range(0, _LIMIT))
    return analyzer


def as_tensors(builder: relax.BlockBuilder, op: str, inputs: Sequence[Any]) -> list[Any]:
    """Inputs of a node with tensors in place of sizes, unless TVM's converters take these."""
    if op in _COMPUTES_SIZES and all(map(_is_single, inputs)):
        return list(inputs)
    return [
        each if each is None or op in _kept(each) else as_tensor(builder, each) for each in inputs
    ]


def as_tensor(builder: relax.BlockBuilder, expr: Any) -> Any:
    """A size or a shape as a tensor; all else as it is."""
    if isinstance(expr, relax.ShapeExpr):
        return _tensor(builder, list(expr.values), (len(expr.values),))
    if tvm.ir.is_prim_expr(expr):
        return _tensor(builder, [expr], ())
    return expr


def _kept(expr: Any) -> frozenset[str]:
    """Operators that TVM's converters take with such an input."""
    return TAKES_SHAPES if isinstance(expr, relax.ShapeExpr) else _TAKES_SIZES


def _is_single(expr: Any) -> bool:
    """Return whether an input is a single size or a constant of one element."""
    if isinstance(expr, tvm.ir.GenericConst):
        return expr.value.numpy().size == 1
    return tvm.ir.is_prim_expr(expr)


def _tensor(builder: relax.BlockBuilder, sizes: list[Any], shape: Sequence[int]) -> relax.Expr:
    """Expressions as a tensor that a kernel fills."""
    if not sizes:
        return relax.const(np.empty(shape, np.int64))

    def filled(*sizes: Any) -> te.Tensor:
        def element(*places: Any) -> Any:
            place = 0
            for index, extent in zip(places, shape, strict=True):
                place = place * extent + index
            result = sizes[-1]
            for number, size in enumerate(sizes[:-1]):
                result = tirx.Select(place == number, size, result)
            return result

        return te.compute(shape, element, name="sizes")

    return builder.emit_te(filled, *sizes, primfunc_name_hint="sizes")


def _values(expr: Any) -> np.ndarray | None:
    """Whole numbers of an input: an array of expressions if it is of sizes; None of a tensor."""
    if isinstance(expr, tvm.ir.GenericConst):
        value = expr.value.numpy()
        return value if value.dtype.kind == "i" else None
    if isinstance(expr, relax.ShapeExpr):
        return _objects(list(expr.values))
    if tvm.ir.is_prim_expr(expr) and str(expr.ty) == "int64":
        return _objects(expr)
    return None


def _objects(values: Any) -> np.ndarray:
    result = np.empty(np.shape(values) if isinstance(values, list) else (), object)
    result[...] = values
    return result


def _as_int64(size: Any) -> tirx.Expr:
    return size if tvm.ir.is_prim_expr(size) else tirx.const(int(size), "int64")


def _divide(left: Any, right: Any) -> Any:
    return tirx.truncdiv(_as_int64(left), _as_int64(right))


def _binary(function: Callable[[Any, Any], Any]) -> Callable[..., np.ndarray | None]:
    """Element by element, of values that broadcast."""
    over_all = np.frompyfunc(function, 2, 1)

    def apply(attributes: dict[str, Any], left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return _objects_of(over_all(left, right))

    return apply


def _objects_of(result: Any) -> np.ndarray:
    """An array again: numpy returns a single element without one."""
    return result if isinstance(result, np.ndarray) else _objects(result)


def _reshape(attributes: dict[str, Any], data: np.ndarray, shape: np.ndarray) -> np.ndarray | None:
    return None if shape.dtype == object else data.reshape(shape.tolist())


def _squeeze(attributes: dict[str, Any], data: np.ndarray, *axes: np.ndarray) -> np.ndarray:
    return np.squeeze(data, tuple(axes[0].tolist()) if axes else None)


def _unsqueeze(attributes: dict[str, Any], data: np.ndarray, axes: np.ndarray) -> np.ndarray:
    return np.expand_dims(data, tuple(axes.ravel().tolist()))


def _gather(attributes: dict[str, Any], data: np.ndarray, indices: np.ndarray) -> np.ndarray | None:
    return None if indices.dtype == object else _objects_of(data[indices])


def _negative(attributes: dict[str, Any], data: np.ndarray) -> np.ndarray:
    return _objects_of(-data)


def _cast(attributes: dict[str, Any], data: np.ndarray) -> np.ndarray | None:
    return data if attributes["to"] == TensorProto.INT64 else None


def _concat(attributes: dict[str, Any], *parts: np.ndarray) -> np.ndarray:
    return np.concatenate([part.astype(object) for part in parts])


_OPERATORS: dict[str, Callable[..., np.ndarray | None]] = {
    "Add": _binary(lambda left, right: left + right),
    "Cast": _cast,
    "Concat": _concat,
    "Div": _binary(_divide),
    "Gather": _gather,
    "Max": _binary(lambda left, right: tirx.max(_as_int64(left), _as_int64(right))),
    "Min": _binary(lambda left, right: tirx.min(_as_int64(left), _as_int64(right))),
    "Mul": _binary(lambda left, right: left * right),
    "Neg": _negative,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Sub": _binary(lambda left, right: left - right),
    "Unsqueeze": _unsqueeze,
}
"""Operators, and functions of their attributes and the values of their inputs."""
