# SPDX-License-Identifier: Apache-2.0
"""Replacement of ``auto_pad`` by explicit padding, and padding with a number from data.

The importer rounds SAME_LOWER down, not up, and pads with constants only.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ...model.graph_edits import attribute, is_default_domain, set_attributes
from ...model.tensor_facts import GraphFacts
from ..expansion import Expansion

POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})


def pad_pools(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Replace ``auto_pad`` by ``pads`` in every pooling whose spatial size is known."""
    for node in model.graph.node:
        if not is_default_domain(node) or node.op_type not in POOLS:
            continue
        dims = facts.dims(node.input[0])
        if dims is None or None in dims[2:]:
            continue
        pads = same_pads(node, [dim for dim in dims[2:] if dim is not None])
        if pads is not None:
            set_attributes(node, ("auto_pad",), pads=pads)


def expand_pad(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a Pad with a number from data: ``Where(Pad(1) == 1, Pad(x), value)``."""
    x, pads, value, axes = [*node.input, "", ""][:4]
    is_constant = attribute(node, "mode", b"constant") in (b"constant", "constant")
    if not value or not is_constant or expansion.facts.constant(value) is not None:
        return
    ones = expansion.emit(
        "ConstantOfShape",
        expansion.emit("Shape", x),
        value=numpy_helper.from_array(np.ones(1, np.int32)),
    )
    inside, padded = (expansion.emit("Pad", name, pads, "", axes) for name in (ones, x))
    is_inside = expansion.emit("Equal", inside, expansion.number(1, TensorProto.INT32))
    expansion.finish(expansion.emit("Where", is_inside, padded, value))


def same_pads(node: onnx.NodeProto, size: list[int]) -> list[int] | None:
    """Padding before and after each dimension by ``auto_pad``; None without a mode for it."""
    mode = attribute(node, "auto_pad", "NOTSET")
    totals = _totals(node, size) if mode in ("SAME_LOWER", "SAME_UPPER") else None
    if totals is None:
        return None
    small = [total // 2 for total in totals]
    large = [total - total // 2 for total in totals]
    return small + large if mode == "SAME_UPPER" else large + small


def _totals(node: onnx.NodeProto, size: list[int]) -> list[int] | None:
    """Padding of each dimension; None if attributes are of another rank."""
    ones = [1] * len(size)
    windows = [attribute(node, name, ones) for name in ("kernel_shape", "strides", "dilations")]
    if any(len(window) != len(size) for window in windows):
        return None
    totals = []
    for extent, kernel, stride, dilation in zip(size, *windows, strict=True):
        last = (extent - 1) // stride * stride
        totals.append(max(0, last + (kernel - 1) * dilation + 1 - extent))
    return totals
