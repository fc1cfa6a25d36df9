# SPDX-License-Identifier: Apache-2.0
"""Replacement of a reduction over a stack of tensors by a chain of element-wise ops.

::

    sum(stack((a, b, c), axis=0), axis=[0])   ->   (a + b) + c
    max(stack((a, b), axis=0), axis=[0])      ->   maximum(a, b)        min likewise

TVM's ONNX importer writes Sum, Max and Min in this way. The stack must have no other reader.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import GenericConst

from ...core.expressions import Value
from ...core.graph import Graph

_ELEMENTWISE = {
    "relax.sum": relax.op.add,
    "relax.max": relax.op.maximum,
    "relax.min": relax.op.minimum,
}


def unstack_reduction(graph: Graph, call: relax.Expr) -> Value:
    """Rewrite the reduction ``call`` of a stack."""
    stack = graph.definition(call.args[0], "relax.stack")
    if stack is None or call.attrs.keepdims or not graph.has_one_use(call.args[0]):
        return None
    axes = call.attrs.axis
    if axes is None or [int(axis) for axis in axes] != [int(stack.attrs.axis or 0)]:
        return None
    if not isinstance(stack.args[0], relax.Tuple):
        return None
    tensors = sorted(stack.args[0].fields, key=lambda t: isinstance(t, GenericConst))
    result = tensors[0]
    for index, tensor in enumerate(tensors[1:], start=2):
        combined = _ELEMENTWISE[call.op.name](result, tensor)
        result = combined if index == len(tensors) else graph.emit(combined)
    return result
