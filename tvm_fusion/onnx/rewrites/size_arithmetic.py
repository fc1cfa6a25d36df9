# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on symbolic sizes, from which exporters compute the shapes of Reshape and Expand.

::

    rows = Mul(Squeeze(Shape(x)), heads)        # the expression  batch * 4
    shape = Reshape(rows, [-1])                 # the shape  [batch * 4]

TVM's importer has expressions for single sizes and shapes for vectors of them; of the nodes that
take both it translates some only. Here these are computed by numpy, whose elements are expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.sym import Analyzer


def translate_sizes(
    op: str, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr | None:
    """Result of a node whose inputs are sizes and constants.

    Parameters
    ----------
    op : str
        The node's operator.
    inputs : sequence
        Its inputs; None for those that it does not have.
    attributes : dict
        Its attributes.

    Returns
    -------
    relax.Expr or None
        A single size as an expression, several as a shape; None if an input is a tensor of the
        model, all are constant, or the operator is left to TVM's importer.
    """
    function = _OPERATORS.get(op)
    values = [_values(each) for each in inputs if each is not None]
    is_open = any(value is not None and value.dtype == object for value in values)
    if function is None or not is_open or any(value is None for value in values):
        return None
    result = function(attributes, *values)
    if result is None or result.ndim > 1:
        return None
    simplify = Analyzer().simplify
    sizes = [simplify(_as_int64(size)) for size in result.ravel()]
    return relax.prim_value(sizes[0]) if result.ndim == 0 else relax.ShapeExpr(sizes)


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


def _concat(attributes: dict[str, Any], *parts: np.ndarray) -> np.ndarray:
    return np.concatenate([part.astype(object) for part in parts])


_OPERATORS: dict[str, Callable[..., np.ndarray | None]] = {
    "Add": _binary(lambda left, right: left + right),
    "Concat": _concat,
    "Div": _binary(_divide),
    "Gather": _gather,
    "Mul": _binary(lambda left, right: left * right),
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Sub": _binary(lambda left, right: left - right),
    "Unsqueeze": _unsqueeze,
}
"""Operators, and functions of their attributes and the values of their inputs."""
