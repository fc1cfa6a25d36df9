# SPDX-License-Identifier: Apache-2.0
"""Folding of constant zero padding over the spatial axes into the convolution behind it.

::

    conv2d(pad(x, top, left, bottom, right), w, padding=p)   ->   conv2d(x, w, padding=p + pad)

``pad`` is ``relax.nn.pad`` or the PrimFunc that TVM's ONNX importer emits for Pad and ``auto_pad``.
Left alone: other values and modes, negative extents, padded batches or channels, and a padding
that anything but a convolution reads.
"""

from __future__ import annotations

from tvm import relax

from ...core.expressions import Value, op_name
from ...core.graph import Graph
from .. import tir_patterns
from .conv2d_operands import is_plain_conv2d, padding_of, with_padding


def fold_pad(graph: Graph, call: relax.Expr) -> Value:
    """Let the convolution ``call`` pad by itself."""
    match = zero_padding(graph, graph.definition(call.args[0]))
    if match is None or not is_plain_conv2d(call):
        return None
    data, before, after = match
    if len(before) != 4 or any((*before[:2], *after[:2])):
        return None
    if not all(is_plain_conv2d(user) for user in graph.users(call.args[0])):
        return None
    added = (*before[2:], *after[2:])
    padding = [old + new for old, new in zip(padding_of(call), added, strict=True)]
    return with_padding(call, data, padding)


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
    match = None if call is None else tir_patterns.padding_of(graph, call)
    if match is None or match[1].value != 0:
        return None
    return match[0], match[1].before, match[1].after


def _number(value: object) -> float:
    return float(getattr(value, "value", value))  # type: ignore[arg-type]
