# SPDX-License-Identifier: Apache-2.0
"""Replacement of a ConvTranspose's ``output_shape`` by padding; the importer ignores it."""

from __future__ import annotations

import onnx

from ...model.graph_edits import attribute, is_default_domain, set_attributes
from ...model.tensor_facts import GraphFacts


def pad_transposed_convolutions(model: onnx.ModelProto, facts: GraphFacts) -> bool:
    """Replace ``output_shape`` by ``pads`` and ``output_padding`` wherever they can express it.

    Return whether there was one. ONNX infers a shape without spatial dimensions for some of them,
    so that all shapes must be inferred again.
    """
    changed = False
    for node in model.graph.node:
        if not is_default_domain(node) or node.op_type != "ConvTranspose":
            continue
        data, weight = facts.shape(node.input[0]), facts.shape(node.input[1])
        if attribute(node, "output_shape") is None or data is None or weight is None:
            continue
        paddings = _paddings(node, data[2:], weight[2:])
        if paddings is None:
            continue
        pads, extra = paddings
        set_attributes(node, ("output_shape", "auto_pad"), pads=pads, output_padding=extra)
        changed = True
    return changed


def _paddings(
    node: onnx.NodeProto, size: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[list[int], list[int]] | None:
    """``pads`` and ``output_padding`` that give the wanted size, as ONNX distributes them."""
    rank = len(size)
    wanted = attribute(node, "output_shape")[-rank:]
    strides = attribute(node, "strides", [1] * rank)
    dilations = attribute(node, "dilations", [1] * rank)
    extra = list(attribute(node, "output_padding", [0] * rank))
    upper = attribute(node, "auto_pad", "NOTSET") == "SAME_UPPER"
    before, after = [], []
    for i in range(rank):
        full = strides[i] * (size[i] - 1) + (kernel[i] - 1) * dilations[i] + 1 + extra[i]
        total = full - wanted[i]
        if total < 0:
            extra[i] -= total
            total = 0
        if extra[i] >= max(strides[i], dilations[i]):
            return None
        small, large = total // 2, total - total // 2
        before.append(small if upper else large)
        after.append(large if upper else small)
    return before + after, extra
