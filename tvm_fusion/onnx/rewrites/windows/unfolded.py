# SPDX-License-Identifier: Apache-2.0
"""Write Col2Im, MaxUnpool and SpaceToDepth, which move the elements of windows.

::

    Col2Im:     y = ConvTranspose(Reshape(x, [batch, channels * window, rows, columns]), identity)
    MaxUnpool:  y = Reshape(ScatterElements(zeros, Reshape(places, [-1]), Reshape(x, [-1])))

    SpaceToDepth:  y = Reshape(Transpose(Reshape(x, [n, c, rows, block, columns, block])))
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import helper

from ...model.graph_edits import attribute
from ...model.tensor_facts import GraphFacts
from ..expansion import Expansion


def expand_col2im(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a Col2Im that :func:`unfolded_problem` accepts."""
    facts = expansion.facts
    if unfolded_problem(node, facts) is not None:
        return
    x, image_name, block_name = node.input
    image, block = ([int(v) for v in facts.constant(n)] for n in (image_name, block_name))  # type: ignore[union-attr]
    rank, window = len(image), math.prod(block)
    strides, dilations = (attribute(node, n, [1] * rank) for n in ("strides", "dilations"))
    pads = attribute(node, "pads", [0] * 2 * rank)
    padded = [image[i] + pads[i] + pads[rank + i] for i in range(rank)]
    spans = [dilations[i] * (block[i] - 1) + 1 for i in range(rank)]
    counts = [(padded[i] - spans[i]) // strides[i] + 1 for i in range(rank)]
    batch, rows, _ = facts.shape(x) or (0, 0, 0)
    channels = rows // window
    dtype = helper.tensor_dtype_to_np_dtype(facts.dtype(x))
    identity = np.tile(np.eye(window, dtype=dtype), (channels, 1)).reshape(rows, 1, *block)
    shape = expansion.constant("shape", np.array([batch, rows, *counts], np.int64))
    result = expansion.emit(
        "ConvTranspose",
        expansion.emit("Reshape", x, shape),
        expansion.constant("identity", identity),
        group=channels,
        kernel_shape=block,
        strides=strides,
        dilations=dilations,
        pads=pads,
        output_padding=[(padded[i] - spans[i]) % strides[i] for i in range(rank)],
    )
    expansion.finish(result)


def expand_space_to_depth(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a SpaceToDepth of an image whose size is known; ONNX has a body for the newest."""
    dims, block = expansion.facts.dims(node.input[0]), attribute(node, "blocksize")
    if dims is None or len(dims) != 4 or None in dims[1:]:
        return
    channels, height, width = (dim or 0 for dim in dims[1:])
    rows, columns = height // block, width // block
    split = np.array([0, channels, rows, block, columns, block])
    joined = np.array([0, channels * block**2, rows, columns])
    is_inner = attribute(node, "mode", "DCR") == "CRD"
    result = expansion.emit("Reshape", node.input[0], expansion.constant("split", split))
    order = [0, 1, 3, 5, 2, 4] if is_inner else [0, 3, 5, 1, 2, 4]
    result = expansion.emit("Transpose", result, perm=order)
    expansion.finish(expansion.emit("Reshape", result, expansion.constant("joined", joined)))


def expand_max_unpool(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a MaxUnpool that :func:`unfolded_problem` accepts."""
    facts = expansion.facts
    if unfolded_problem(node, facts) is not None:
        return
    x, places = node.input[:2]
    shape = _unpooled(node, facts)
    dtype = helper.tensor_dtype_to_np_dtype(facts.dtype(x))
    size, flat = math.prod(shape), expansion.constant("flat", np.array([-1], np.int64))
    zeros = expansion.constant("zeros", np.zeros(size, dtype))
    indices, values = (expansion.emit("Reshape", name, flat) for name in (places, x))
    count = math.prod(facts.shape(x) or ())
    facts.declare(indices, onnx.TensorProto.INT64, [count])
    filled = expansion.emit("ScatterElements", zeros, indices, values, axis=0)
    expansion.finish(
        expansion.emit("Reshape", filled, expansion.constant("shape", np.array(shape, np.int64)))
    )


def unfolded_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why windows cannot be put back, if any."""
    for name in filter(None, node.input[1 + (node.op_type == "MaxUnpool") :]):
        if facts.constant(name) is None:
            return f"its input {name!r} depends on data; expected a constant"
    shape = facts.shape(node.input[0])
    if shape is None:
        return f"the shape of {node.input[0]!r} is only known at run time"
    if node.op_type == "Col2Im":
        image, block = (facts.constant(name) for name in node.input[1:3])
        if image is None or block is None or not 1 <= len(image) <= 3 or len(shape) != 3:
            return f"its image_shape is {image}; expected one to three sizes"
        window = math.prod(block.tolist())
        return (
            None
            if shape[1] % window == 0
            else f"{shape[1]} rows do not divide into windows of {window}"
        )
    given = facts.constant(node.input[2]) if len(node.input) > 2 else None
    wanted = _unpooled(node, facts)
    if given is not None and given.tolist() != wanted:
        return f"its output_shape is {given.tolist()}; runtimes disagree on others than {wanted}"
    return None


def _unpooled(node: onnx.NodeProto, facts: GraphFacts) -> list[int]:
    """The shape of the image that was pooled, by the attributes."""
    batch, channels, *sizes = facts.shape(node.input[0]) or ()
    kernel = attribute(node, "kernel_shape")
    rank = len(sizes)
    strides = attribute(node, "strides", [1] * rank)
    pads = attribute(node, "pads", [0] * 2 * rank)
    spatial = [
        (sizes[i] - 1) * strides[i] + kernel[i] - pads[i] - pads[rank + i] for i in range(rank)
    ]
    return [batch, channels, *spatial]
