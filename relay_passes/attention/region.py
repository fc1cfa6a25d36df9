# SPDX-License-Identifier: Apache-2.0
"""The bindings that are one attention, and the PrimFunc that computes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from tvm import relax, te, tirx
from tvm.ir import GenericConst

from ..core.constants import array_of
from ..core.expressions import TUPLE_GET_ITEM, Value, op_name
from ..core.graph import Graph
from ..core.prim_functions import lowered_function

_NAME = "attention"
MOVES = ("relax.permute_dims", "relax.reshape")
"""Ops behind the second product that its kernel does on the way, beside conversions."""
_LAYOUT = (
    *MOVES,
    "relax.broadcast_to",
    "relax.expand_dims",
    "relax.squeeze",
    "relax.strided_slice",
)
_ARITHMETIC = ("relax.add", "relax.subtract", "relax.multiply", "relax.divide")
_ELEMENTWISE = (
    *_ARITHMETIC,
    "relax.astype",
    "relax.clip",
    "relax.maximum",
    "relax.minimum",
    "relax.tanh",
    "relax.where",
)


@dataclass(frozen=True)
class AttentionRegion:
    """Bindings from queries, keys and values to the output.

    Attributes
    ----------
    sources : list[relax.Var]
        What queries, keys and values are computed from by changes of layout, each once.
    values : dict[relax.Var, relax.Expr]
        Value bound to each variable of the region, in an order of evaluation.
    """

    sources: list[relax.Var]
    values: dict[relax.Var, relax.Expr]


def read_region(graph: Graph, last: relax.Expr) -> AttentionRegion | None:
    """The region that ends with the value ``last`` of the graph's current variable, if it is one.

    ::

        matmul(softmax(f(matmul(query, key))), value)

    with element-wise ``f``, and changes of layout before the factors and behind the product. What
    lies between the products has no other reader. Further moves of the output belong to the
    region, so that it ends with the last of them.
    """
    if _moves_on(graph):
        return None
    chain: dict[relax.Var, relax.Expr] = {graph.current: last}
    product = last
    while op_name(product) in (*MOVES, "relax.astype"):
        product = _only_reader(graph, product.args[0], chain)
    if op_name(product) != "relax.matmul":
        return None
    weight = _only_reader(graph, product.args[0], chain)
    while op_name(weight) == "relax.astype":
        weight = _only_reader(graph, weight.args[0], chain)
    if op_name(weight) != "relax.nn.softmax" or not _is_last_axis(weight):
        return None
    scores = _find_scores(graph, weight.args[0], chain)
    if scores is None:
        return None
    values: dict[relax.Var, relax.Expr] = {}
    found = [_source(graph, e, values) for e in (*scores.args, product.args[1])]
    sources = [source for source in dict.fromkeys(found) if isinstance(source, relax.Var)]
    return AttentionRegion(sources, {**values, **dict(reversed(chain.items()))})


def _moves_on(graph: Graph) -> bool:
    """Return whether the only reader of the current variable moves or converts it."""
    readers = graph.users(graph.current)
    return len(readers) == 1 and op_name(readers[0]) in (*MOVES, "relax.astype")


def _only_reader(graph: Graph, expr: relax.Expr, chain: dict[relax.Var, relax.Expr]) -> Value:
    """The value of a variable that nothing else reads, noted in ``chain``; else None."""
    value = graph.definition(expr)
    if value is None or not graph.has_one_use(expr):
        return None
    chain[expr] = value
    return value


def _is_last_axis(softmax: relax.Expr) -> bool:
    return int(softmax.attrs.axis) in (-1, softmax.args[0].ty.ndim - 1)


def _find_scores(graph: Graph, expr: relax.Expr, chain: dict[relax.Var, relax.Expr]) -> Value:
    """The product that ``expr`` is computed from element by element; notes what lies between."""
    value = graph.definition(expr)
    if value is None or not graph.has_one_use(expr):
        return None
    if op_name(value) == "relax.matmul":
        chain[expr] = value
        return value
    if op_name(value) not in _ELEMENTWISE:
        return None
    for argument in value.args:
        if not isinstance(argument, relax.Var):
            continue
        inner: dict[relax.Var, relax.Expr] = {expr: value}
        scores = _find_scores(graph, argument, inner)
        if scores is not None:
            chain.update(inner)
            return scores
    return None


def _source(graph: Graph, expr: relax.Expr, values: dict[relax.Var, relax.Expr]) -> relax.Expr:
    """Return what a factor is computed from by changes of layout and scaling, noted in order."""
    value = graph.definition(expr)
    if value is None:
        return expr
    if op_name(value) == TUPLE_GET_ITEM:
        value = _slice_of_split(graph, value)
    if op_name(value) not in _LAYOUT and not _is_scaling(value):
        return expr
    source = _source(graph, value.args[0], values)
    values[expr] = value
    return source


def _is_scaling(value: Value) -> bool:
    if op_name(value) not in ("relax.multiply", "relax.divide"):
        return False
    return isinstance(value.args[1], GenericConst) and value.args[1].ty.ndim == 0


def _slice_of_split(graph: Graph, item: relax.TupleGetItem) -> Value:
    """A field of a split as a slice of what is split."""
    split = graph.definition(item.tuple_value, "relax.split")
    whole, part = getattr(split, "args", [None])[0], item.ty
    if split is None or not isinstance(part, relax.TensorType) or part.shape is None:
        return None
    axis = int(split.attrs.axis) % part.ndim
    fields = [field.shape.values[axis] for field in split.ty.fields[: item.index + 1]]
    if not all(isinstance(extent, tirx.IntImm) for extent in fields):
        return None
    begin, size = sum(map(int, fields[:-1])), int(fields[-1])
    return relax.op.strided_slice(whole, [axis], [begin], [begin + size])


def prim_func(
    values: Mapping[relax.Var, relax.Expr],
) -> tuple[tirx.PrimFunc, list[relax.Expr]] | None:
    """The unscheduled function of the last of some values, and the tensors to call it with.

    None where it has symbolic extents that do not follow from the shapes of its inputs.
    """
    inputs = _inputs(values)
    lowered = lowered_function(_function(values, inputs), _NAME)
    return None if lowered is None else (lowered, inputs)


def _inputs(values: Mapping[relax.Var, relax.Expr]) -> list[relax.Expr]:
    """Variables and constants from outside; numbers in arithmetic are a part of the function."""
    inputs: dict[relax.Expr, None] = {}
    for value in values.values():
        for argument in value.args[1:2] if is_causal(value) else value.args:
            is_number = op_name(value) in _ARITHMETIC and _is_number(argument)
            is_tensor = isinstance(argument.ty, relax.TensorType)
            if is_tensor and argument not in values and not is_number:
                inputs[argument] = None
    return list(inputs)


def _is_number(expr: relax.Expr) -> bool:
    return isinstance(expr, GenericConst) and expr.ty.ndim == 0


def is_causal(value: relax.Expr) -> bool:
    """Return whether a value replaces the scores of keys behind the query by a number.

    The mask is a constant: a lower triangle, whose last row has all keys.
    """
    if op_name(value) != "relax.where" or not _is_number(value.args[2]):
        return False
    mask = value.args[0]
    if not isinstance(mask, GenericConst) or str(mask.ty.dtype) != "bool" or mask.ty.ndim < 2:
        return False
    array = array_of(mask)
    rows, columns = array.shape[-2:]
    triangle = np.tri(rows, columns, columns - rows, dtype=bool)
    same_shape = [*map(int, array.shape[-2:])] == [*value.ty.shape.values[-2:]]
    return same_shape and rows <= columns and bool((array == triangle).all())


def _causal(scores: te.Tensor, least: float) -> te.Tensor:
    """The scores of keys up to the query, a number for the others, without a mask in memory."""
    ahead = scores.shape[-1] - scores.shape[-2]

    def element(*at: tirx.Expr) -> tirx.Expr:
        past = at[-1] <= at[-2] + ahead
        return tirx.Select(past, scores(*at), tirx.const(least, scores.dtype))

    return te.compute(scores.shape, element, name="causal")


def _function(
    values: Mapping[relax.Var, relax.Expr], inputs: Iterable[relax.Expr]
) -> relax.BlockBuilder:
    """A module with a function that ``FuseTIR`` makes a PrimFunc of."""
    local = {tensor: relax.Var(f"p{k}", tensor.ty) for k, tensor in enumerate(inputs)}
    params = list(local.values())
    builder = relax.BlockBuilder()
    with builder.function(_NAME, params, {"Primitive": True}, private=True):
        with builder.dataflow():
            for var, value in values.items():
                if is_causal(value):
                    least = float(array_of(value.args[2]))
                    result = builder.emit_te(_causal, local[value.args[1]], least)
                else:
                    result = builder.emit(_copy(value, local))
                local[var] = result
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    return builder


def _copy(value: relax.Expr, local: Mapping[relax.Expr, relax.Expr]) -> relax.Expr:
    arguments = [local.get(argument, argument) for argument in value.args]
    return relax.Call(value.op, arguments, value.attrs, value.ty_args)
