# SPDX-License-Identifier: Apache-2.0
"""Mean and variance as two reductions of one chain.

::

    mean       = R.mean(x, axes, keepdims=True)
    difference = R.subtract(x, mean)
    squares    = R.multiply(difference, difference)
    variance   = R.mean(squares, axes, keepdims=True)

The mean of squares minus the square of the mean would need one pass over the data and lose all
digits where the mean is large; a kernel that holds a row on chip also reads the data once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import relax

from ..core.graph import Graph
from .precision import number


@dataclass(frozen=True)
class Moments:
    """Bindings of the chain; ``difference`` has the data's shape, the others extent 1 in ``axes``.

    ``variance`` is not bound yet.
    """

    mean: relax.Var
    difference: relax.Var
    variance: relax.Expr


def emit_moments(
    graph: Graph, data: relax.Expr, axes: Sequence[int], *, keepdims: bool = True
) -> Moments:
    """Bind the chain of ``data``; existing bindings of it are reused."""
    mean = graph.emit_once(relax.op.mean(data, list(axes), keepdims=True))
    difference = graph.emit_once(relax.op.subtract(data, mean))
    squares = graph.emit_once(relax.op.multiply(difference, difference))
    return Moments(mean, difference, relax.op.mean(squares, list(axes), keepdims=keepdims))


def normalized(
    graph: Graph, difference: relax.Expr, variance: relax.Expr, epsilon: float
) -> relax.Expr:
    """``difference / sqrt(variance + epsilon)``, not bound yet, with one root a row."""
    shifted = graph.emit_once(relax.op.add(variance, number(epsilon, difference)))
    return relax.op.multiply(difference, graph.emit_once(relax.op.rsqrt(shifted)))


def scale_and_shift(
    graph: Graph, value: relax.Expr, gamma: relax.Expr | None, beta: relax.Expr | None
) -> relax.Expr:
    """``value * gamma + beta``, not bound yet; operands that are None are left out."""
    if gamma is not None:
        value = relax.op.multiply(graph.emit(value), gamma)
    if beta is not None:
        value = relax.op.add(graph.emit(value), beta)
    return value
