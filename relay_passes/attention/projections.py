# SPDX-License-Identifier: Apache-2.0
"""Products of one input with several weights as one product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from ..core.constants import array_of, tensor_constant
from ..core.expressions import op_name
from ..core.graph import Graph


@dataclass(frozen=True)
class Projection:
    """``x @ weight``, then sums with vectors and conversions, none of which has another reader.

    Parameters
    ----------
    product : relax.Call
        Product of a variable and a constant matrix.
    steps : tuple[relax.Call, ...]
        What follows: ``astype``, or ``add`` of a constant vector.
    """

    product: relax.Call
    steps: tuple[relax.Call, ...]

    @property
    def width(self) -> int:
        """Columns of the result."""
        return int(self.product.args[1].ty.shape.values[1])

    @property
    def vectors(self) -> list[np.ndarray]:
        """Biases, in order."""
        added = [step for step in self.steps if op_name(step) == "relax.add"]
        return [np.broadcast_to(array_of(_vector(step)), (self.width,)) for step in added]

    def is_like(self, other: Projection) -> bool:
        """True if both can be columns of one product."""
        same_input = self.product.args[0].same_as(other.product.args[0])
        return same_input and self._kinds == other._kinds

    @property
    def _kinds(self) -> list[tuple[str | None, str]]:
        return [(op_name(step), str(step.ty.dtype)) for step in (self.product, *self.steps)]


def combine(graph: Graph, sources: Sequence[relax.Var]) -> dict[relax.Var, relax.Expr]:
    """Emit products that compute several of ``sources`` at once.

    The weights and vectors of products with one input are concatenated. Worth it only where slices
    of the result cost nothing, because their readers read them in place.

    Returns
    -------
    dict[relax.Var, relax.Expr]
        From each of the sources that is computed so to the slice of a product that it is.
    """
    found = {source: read_projection(graph, source) for source in sources}
    left = {source: projection for source, projection in found.items() if projection is not None}
    slices: dict[relax.Var, relax.Expr] = {}
    while left:
        first = next(iter(left.values()))
        alike = {s: projection for s, projection in left.items() if projection.is_like(first)}
        left = {s: projection for s, projection in left.items() if s not in alike}
        if len(alike) > 1:
            slices |= _emit(graph, alike)
    return slices


def read_projection(graph: Graph, source: relax.Var) -> Projection | None:
    """The projection that a variable is, if nothing but the current region reads it."""
    steps: list[relax.Call] = []
    expr: relax.Expr = source
    while True:
        value = graph.definition(expr, "relax.matmul", "relax.astype", "relax.add")
        if value is None or not graph.has_one_use(expr):
            return None
        if op_name(value) == "relax.matmul":
            break
        steps.append(value)
        vector = _vector(value) if op_name(value) == "relax.add" else None
        if op_name(value) == "relax.add" and vector is None:
            return None
        expr = next(e for e in value.args if not e.same_as(vector))
    data, weight = value.args
    is_matrix = isinstance(weight, GenericConst) and weight.ty.ndim == 2
    if not is_matrix or not isinstance(data, relax.Var) or data.ty.ndim < 2:
        return None
    return Projection(value, tuple(reversed(steps)))


def _vector(add: relax.Call) -> relax.Expr | None:
    """The constant vector that is added."""
    found = [e for e in add.args if isinstance(e, GenericConst) and e.ty.ndim <= 1]
    return found[0] if len(found) == 1 else None


def _emit(graph: Graph, alike: dict[relax.Var, Projection]) -> dict[relax.Var, relax.Expr]:
    projections = list(alike.values())
    first = projections[0].product
    matrices = [array_of(projection.product.args[1]) for projection in projections]
    weight = tensor_constant(np.concatenate(matrices, axis=1), first.args[1].ty.dtype)
    result = graph.emit(relax.op.matmul(first.args[0], weight, first.attrs.out_dtype or None))
    vectors = iter(zip(*(projection.vectors for projection in projections), strict=True))
    for step in projections[0].steps:
        if op_name(step) == "relax.astype":
            result = graph.emit(relax.op.astype(result, step.ty.dtype))
        else:
            vector = tensor_constant(np.concatenate(next(vectors)), step.ty.dtype)
            result = graph.emit(relax.op.add(result, vector))
    axis, begin, slices = first.ty.ndim - 1, 0, {}
    for source, projection in alike.items():
        end = begin + projection.width
        slices[source] = relax.op.strided_slice(result, [axis], [begin], [end])
        begin = end
    return slices
