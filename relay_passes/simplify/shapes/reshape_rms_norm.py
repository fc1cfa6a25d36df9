# SPDX-License-Identifier: Apache-2.0
"""A norm over all axes gets an axis in front that it leaves alone.

::

    rms_norm(x, weight, axes=[0, 1])   ->   reshape(rms_norm(reshape(x, (1, m, n)), weight, [1, 2]))

TVM's own kernel wants one: it has no expression for a mean that is a single number.
"""

from __future__ import annotations

from tvm import relax

from ...core.expressions import Value
from ...core.graph import Graph


def reshape_rms_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``rms_norm`` over all axes of its data."""
    data, weight = call.args
    shape = data.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or len(call.attrs.axes) != len(shape.values):
        return None
    rows = graph.emit(relax.op.reshape(data, [1, *shape.values]))
    axes = [int(axis) % len(shape.values) + 1 for axis in call.attrs.axes]
    norm = graph.emit(relax.op.nn.rms_norm(rows, weight, axes, float(call.attrs.epsilon)))
    return relax.op.reshape(norm, shape)
