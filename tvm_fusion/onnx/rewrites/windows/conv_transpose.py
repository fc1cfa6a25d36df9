# SPDX-License-Identifier: Apache-2.0
"""Replacement of a ConvTranspose's ``output_shape``, and of ``auto_pad``, by padding.

The importer ignores the former, and ONNX adds ``output_padding`` to the size that the latter keeps,
where ONNX Runtime takes it off again.
"""

from __future__ import annotations

import onnx

from ...model.graph_edits import attribute, is_default_domain, set_attributes
from ...model.tensor_facts import GraphFacts


def pad_transposed_convolutions(model: onnx.ModelProto, facts: GraphFacts) -> bool:
    """Name ``pads`` and ``output_padding`` wherever they can express the size that is asked for.

    Return whether there was one. ONNX infers other shapes for some of them, so that all shapes must
    be inferred again.
    """
    changed = False
    for node in model.graph.node:
        if not is_default_domain(node) or node.op_type != "ConvTranspose":
            continue
        data, weight = facts.shape(node.input[0]), facts.shape(node.input[1])
        if data is None or weight is None or not _asks_for_size(node):
            continue
        paddings = _paddings(node, data[2:], weight[2:])
        if paddings is None:
            continue
        pads, extra = paddings
        set_attributes(node, ("output_shape", "auto_pad"), pads=pads, output_padding=extra)
        changed = True
    return changed


def _asks_for_size(node: onnx.NodeProto) -> bool:
    """Return whether a node has the size of its result, or keeps one that ONNX adds to."""
    is_same = attribute(node, "auto_pad", "NOTSET") in ("SAME_LOWER", "SAME_UPPER")
    is_same = is_same and any(attribute(node, "output_padding", []))
    return is_same or attribute(node, "output_shape") is not None


def _paddings(
    node: onnx.NodeProto, size: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[list[int], list[int]] | None:
    """``pads`` and ``output_padding`` that give the wanted size, as ONNX distributes them."""
    rank = len(size)
    strides = attribute(node, "strides", [1] * rank)
    same = [extent * stride for extent, stride in zip(size, strides, strict=True)]
    wanted = attribute(node, "output_shape", same)[-rank:]
    dilations = attribute(node, "dilations", [1] * rank)
    extra = list(attribute(node, "output_padding", [0] * rank))
    upper = attribute(node, "auto_pad", "NOTSET") == "SAME_UPPER"
    before, after = [], []
    for i in range(rank):
        full = strides[i] * (size[i] - 1) + (kernel[i] - 1) * dilations[i] + 1 + extra[i]
        total = full - wanted[i]
        if total < 0 and attribute(node, "output_shape") is not None:
            extra[i] -= total
        total = max(total, 0)
        if extra[i] >= max(strides[i], dilations[i]):
            return None
        small, large = total // 2, total - total // 2
        before.append(small if upper else large)
        after.append(large if upper else small)
    return before + after, extra
