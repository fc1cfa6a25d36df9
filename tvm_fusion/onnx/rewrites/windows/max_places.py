# SPDX-License-Identifier: Apache-2.0
"""The second output of MaxPool: where the largest element of each window lies in the input.

::

    y = MaxPool(x)
    places = MaxPlaces(x, y)            # the first element of each window that equals its maximum
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx
from tvm import relax, te, tirx

from ...model.graph_edits import attribute
from ...model.tensor_facts import GraphFacts
from ..expansion import Expansion
from .auto_pad import same_pads

MAX_PLACES = "tvm_fusion.MaxPlaces"
"""Operator that :func:`translate_max_places` translates."""


def expand_max_pool(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a MaxPool with places that :func:`max_pool_problem` accepts."""
    if len(node.output) < 2 or max_pool_problem(node, expansion.facts) is not None:
        return
    kept = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
    column_major = kept.pop("storage_order", 0)
    largest = expansion.emit("MaxPool", node.input[0], **kept)
    sizes = (expansion.facts.shape(node.input[0]) or ())[2:]
    ones = [1] * len(sizes)
    pads = same_pads(node, list(sizes)) or attribute(node, "pads", 2 * [0] * len(sizes))
    places = expansion.emit(
        MAX_PLACES,
        node.input[0],
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
                at * stride + step * dilation - pad
                for at, stride, step, dilation, pad in zip(
                    output, strides, window, dilations, pads, strict=True
                )
            ]
            inside = tirx.all(
                *(tirx.all(at >= 0, at < size) for at, size in zip(spots, sizes, strict=True))
            )
            flat = tirx.const(0, "int64")
            for at, size in zip(spots, sizes, strict=True):
                flat = flat * size + at
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
