# SPDX-License-Identifier: Apache-2.0
"""Pools, their paddings and places, and windows put back.

Explicit padding takes the place of ``auto_pad``, of which TVM's converter rounds SAME_LOWER down,
not up. The second output of MaxPool is where the largest element of each window lies in the input::

    y = MaxPool(x)
    places = MaxPlaces(x, y)            # the first element of each window that equals its maximum

LpPool and GlobalLpPool are written by powers, so that whole ones become products::

    y = Pow(AveragePool(Pow(Abs(x), p)) * window, 1 / p)

Col2Im and MaxUnpool move the elements of windows::

    Col2Im:     y = ConvTranspose(Reshape(x, [batch, channels * window, rows, columns]), identity)
    MaxUnpool:  y = Reshape(ScatterElements(zeros, Reshape(places, [-1]), Reshape(x, [-1])))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from tvm import relax, te, tirx

from ..model.expansion import Expansion, conv_attributes
from ..model.graph_edits import attribute, set_attributes
from ..model.tensor_facts import GraphFacts
from .casts import widen_overlaps, widen_sum
from .operator import Operator, operators


def pad_pool(expansion: Expansion) -> None:
    """Replace ``auto_pad`` by ``pads`` in a pool whose spatial size is known."""
    dims = expansion.facts.dims(expansion.input(0))
    if dims is None or None in dims[2:]:
        return
    pads = same_pads(expansion.node, [dim for dim in dims[2:] if dim is not None])
    if pads is not None:
        set_attributes(expansion.node, ("auto_pad",), pads=pads)


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


MAX_PLACES = "tvm_fusion.MaxPlaces"
"""Operator that :func:`translate_max_places` translates."""


def expand_max_pool(expansion: Expansion) -> None:
    """Replace a MaxPool with places that :func:`max_pool_problem` accepts."""
    pad_pool(expansion)
    node, facts = expansion.node, expansion.facts
    if len(node.output) < 2 or max_pool_problem(node, facts) is not None:
        return
    kept = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
    column_major = kept.pop("storage_order", 0)
    largest = expansion.emit("MaxPool", expansion.input(0), **kept)
    sizes = (facts.shape(expansion.input(0)) or ())[2:]
    ones = [1] * len(sizes)
    pads = expansion.get("pads", 2 * [0] * len(sizes))
    places = expansion.emit(
        MAX_PLACES,
        expansion.input(0),
        largest,
        kernel_shape=kept["kernel_shape"],
        strides=kept.get("strides", ones),
        dilations=kept.get("dilations", ones),
        pads=list(pads)[: len(sizes)],
        storage_order=column_major,
    )
    expansion.finish(largest, places)


def max_pool_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why the places of maxima cannot be computed, if they are asked for."""
    if len(node.output) < 2 or facts.shape(node.input[0]) is not None:
        return None
    return f"its output {node.output[1]!r} needs the shape of {node.input[0]!r}"


def translate_max_places(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Index of each maximum among all elements of the input, int64."""
    names = ("kernel_shape", "strides", "dilations", "pads")
    kernel, strides, dilations, pads = (list(attributes[name]) for name in names)
    is_column_major = bool(attributes.get("storage_order", 0))

    def places(x: te.Tensor, largest: te.Tensor) -> te.Tensor:
        sizes = [int(size) for size in x.shape[2:]]
        plane = math.prod(sizes)
        none = tirx.const(plane, "int64")
        window = [te.reduce_axis((0, size), f"step{axis}") for axis, size in enumerate(kernel)]

        def first(n: Any, c: Any, *output: Any) -> tirx.Expr:
            spots = [
                corner * stride + step * dilation - pad
                for corner, stride, step, dilation, pad in zip(
                    output, strides, window, dilations, pads, strict=True
                )
            ]
            inside = tirx.all(
                *(
                    tirx.all(corner >= 0, corner < size)
                    for corner, size in zip(spots, sizes, strict=True)
                )
            )
            flat = tirx.const(0, "int64")
            for corner, size in zip(spots, sizes, strict=True):
                flat = flat * size + corner
            # The condition guards the read, too.
            value = tirx.if_then_else(
                inside,
                tirx.Select(x(n, c, *spots) == largest(n, c, *output), flat, none),
                none,
            )
            return te.min(value, axis=window)

        found = te.compute(largest.shape, first, name="first_maximum")

        def index(n: Any, c: Any, *output: Any) -> tirx.Expr:
            # A window whose maximum is no number has no such element.
            place = tirx.min(found(n, c, *output), none - 1)
            if is_column_major:
                place = _turned(place, sizes)
            return (tirx.Cast("int64", n) * int(x.shape[1]) + c) * plane + place

        return te.compute(largest.shape, index, name="max_places")

    return builder.emit_te(places, *inputs, primfunc_name_hint="max_places")


def _turned(place: tirx.Expr, sizes: Sequence[int]) -> tirx.Expr:
    """An index with the last axis slowest, of one with the first axis slowest."""
    result, step, rest = tirx.const(0, "int64"), math.prod(sizes), place
    for size in reversed(sizes):
        step //= size
        result = result + tirx.floormod(rest, size) * step
        rest = tirx.floordiv(rest, size)
    return result


def expand_p_norm(expansion: Expansion) -> None:
    """Replace a pool of p-norms, but one that :func:`p_norm_problem` refuses."""
    if expansion.node.op_type == "LpPool":
        pad_pool(expansion)
    facts, x = expansion.facts, expansion.input(0)
    dims, kind, power = facts.dims(x), facts.dtype(x), expansion.get("p", 2)
    if dims is None or p_norm_problem(expansion.node, facts) is not None:
        return
    size = expansion.emit("Abs", x)
    facts.declare(size, kind, dims)
    if power != 1:
        size = expansion.emit("Pow", size, expansion.number(power, kind))
        facts.declare(size, kind, dims)
    if expansion.node.op_type == "GlobalLpPool":
        axes = expansion.constant("axes", np.arange(2, len(dims)))
        total = expansion.emit("ReduceSum", size, axes, keepdims=1)
    else:
        given = conv_attributes(expansion.node)
        mean = expansion.emit("AveragePool", size, count_include_pad=1, **given)
        window = math.prod(given["kernel_shape"])
        total = expansion.emit("Mul", mean, expansion.number(window, kind))
    if power == 2:
        total = expansion.emit("Sqrt", total)
    elif power != 1:
        total = expansion.emit("Pow", total, expansion.number(1 / power, kind))
    expansion.finish(total)


def p_norm_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why norms cannot be pooled, if any: a mean has no whole last window."""
    return "its ceil_mode is 1" if attribute(node, "ceil_mode", 0) else None


def expand_col2im(expansion: Expansion) -> None:
    """Replace a Col2Im that :func:`unfolded_problem` accepts."""
    facts = expansion.facts
    if unfolded_problem(expansion.node, facts) is not None:
        return
    x, image_name, block_name = expansion.node.input
    image, block = ([int(v) for v in facts.constant(n)] for n in (image_name, block_name))  # type: ignore[union-attr]
    rank, window = len(image), math.prod(block)
    strides, dilations = (expansion.get(n, [1] * rank) for n in ("strides", "dilations"))
    pads = expansion.get("pads", [0] * 2 * rank)
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


def expand_max_unpool(expansion: Expansion) -> None:
    """Replace a MaxUnpool that :func:`unfolded_problem` accepts."""
    facts = expansion.facts
    if unfolded_problem(expansion.node, facts) is not None:
        return
    x, places = expansion.node.input[:2]
    shape = _unpooled(expansion.node, facts)
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


OPERATORS = (
    Operator("AveragePool", expand=pad_pool),
    Operator("Col2Im", widen=widen_overlaps, expand=expand_col2im, check=unfolded_problem),
    *operators("GlobalAveragePool GlobalMaxPool"),
    Operator("GlobalLpPool", widen=widen_sum, expand=expand_p_norm),
    Operator("LpPool", widen=widen_sum, expand=expand_p_norm, check=p_norm_problem),
    Operator("MaxPool", outputs=2, expand=expand_max_pool, check=max_pool_problem),
    Operator("MaxUnpool", expand=expand_max_unpool, check=unfolded_problem),
    Operator(MAX_PLACES, translate=translate_max_places),
)
