# SPDX-License-Identifier: Apache-2.0
"""Convolutions: transposed ones, and those of moved windows.

Padding takes the place of a ConvTranspose's ``output_shape`` and ``auto_pad``: TVM's converter
ignores the former, and ONNX adds ``output_padding`` to the size that the latter keeps,
where ONNX Runtime takes it off again.

The windows of DeformConv are gathered between the pixels, then multiplied by the weights::

    windows[n, c, k, i, j] = mask[n, k, i, j] * x[n, c, place(k, i, j) + offset[n, k, i, j]]
    y = weights [groups, out / groups, c / groups * k] @ windows [n, groups, c / groups * k, i * j]

A pixel outside the image is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from tvm import relax, te, tirx

from ..model.expansion import Expansion
from ..model.graph_edits import attribute, set_attributes
from ..model.tensor_facts import GraphFacts
from .casts import widen_sum
from .operator import Operator


def pad_transposed(expansion: Expansion) -> None:
    """Name ``pads`` and ``output_padding`` where they can express the size that is asked for."""
    node, facts = expansion.node, expansion.facts
    data, weight = facts.shape(node.input[0]), facts.shape(node.input[1])
    if data is None or weight is None or not _asks_for_size(node):
        return
    paddings = _paddings(node, data[2:], weight[2:])
    if paddings is None:
        return
    pads, extra = paddings
    padded = onnx.NodeProto()
    padded.CopyFrom(node)
    set_attributes(padded, ("output_shape", "auto_pad"), pads=pads, output_padding=extra)
    expansion.nodes.append(padded)


def transposed_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why a ConvTranspose has not the size that it asks for, if so."""
    wanted = attribute(node, "output_shape")
    return None if wanted is None else f"no padding gives its output_shape {list(wanted)}"


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
    sizes = attribute(node, "output_shape", same)[-rank:]
    dilations = attribute(node, "dilations", [1] * rank)
    extra = list(attribute(node, "output_padding", [0] * rank))
    upper = attribute(node, "auto_pad", "NOTSET") == "SAME_UPPER"
    before, after = [], []
    for i in range(rank):
        full = strides[i] * (size[i] - 1) + (kernel[i] - 1) * dilations[i] + 1 + extra[i]
        total = full - sizes[i]
        if total < 0 and attribute(node, "output_shape") is not None:
            extra[i] -= total
        total = max(total, 0)
        if extra[i] >= max(strides[i], dilations[i]):
            return None
        small, large = total // 2, total - total // 2
        before.append(small if upper else large)
        after.append(large if upper else small)
    return before + after, extra


def translate_deform_conv(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """A convolution of NCHW whose windows are moved by offsets, and weighted by a mask."""
    x, weight, offset, bias, mask = [*inputs, None, None][:5]
    batch, channels, _, _ = (int(size) for size in x.ty.shape)
    filters, _, *kernel = (int(size) for size in weight.ty.shape)
    _, _, rows, columns = (int(size) for size in offset.ty.shape)
    pads = list(attributes.get("pads", [0] * 4))
    places = _Places(
        kernel,
        list(attributes.get("strides", [1, 1])),
        list(attributes.get("dilations", [1, 1])),
        pads[:2],
        channels // attributes.get("offset_group", 1),
    )
    given = [x, offset] if mask is None else [x, offset, mask]
    windows = builder.emit_te(places.gather, *given, primfunc_name_hint="deformed_windows")
    groups = attributes.get("group", 1)
    terms = channels // groups * math.prod(kernel)
    right = builder.emit(relax.op.reshape(windows, (batch, groups, terms, rows * columns)))
    left = builder.emit(relax.op.reshape(weight, (groups, filters // groups, terms)))
    product = builder.emit(relax.op.matmul(left, right))
    result = builder.emit(relax.op.reshape(product, (batch, filters, rows, columns)))
    if bias is None:
        return result
    column = builder.emit(relax.op.reshape(bias, (filters, 1, 1)))
    return relax.op.add(result, column)


@dataclass(frozen=True)
class _Places:
    """Places of windows: sizes along rows and columns, and the channels of an offset group."""

    kernel: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    pads: Sequence[int]
    channels: int

    def gather(self, x: te.Tensor, offset: te.Tensor, mask: te.Tensor | None = None) -> te.Tensor:
        """The windows, [batch, channels, kernel, rows, columns]."""
        batch, channels, _, _ = x.shape
        count = math.prod(self.kernel)

        def element(n: Any, c: Any, k: Any, i: Any, j: Any) -> tirx.Expr:
            tap = c // self.channels * count + k
            steps = k // self.kernel[1], k % self.kernel[1]
            place = [
                _place(
                    index * self.strides[axis] - self.pads[axis] + step * self.dilations[axis],
                    offset(n, 2 * tap + axis, i, j),
                    x.shape[2 + axis],
                    offset.dtype,
                )
                for axis, (index, step) in enumerate(zip((i, j), steps, strict=True))
            ]
            value = _between(x, n, c, place)
            return value if mask is None else value * mask(n, tap, i, j)

        shape = (batch, channels, count, *offset.shape[2:])
        return te.compute(shape, element, name="deformed_windows")


def _place(start: Any, offset: tirx.Expr, size: Any, dtype: str) -> tirx.Expr:
    """A place along an axis; those far outside lie just outside, so that it fits an integer."""
    place = tirx.Cast(dtype, start) + offset
    last = tirx.Cast(dtype, size)
    return tirx.max(tirx.min(place, last), tirx.const(-1.0, dtype))


def _between(x: te.Tensor, n: Any, c: Any, place: Sequence[tirx.Expr]) -> tirx.Expr:
    """The value of an image between four pixels."""
    floors = [tirx.floor(value) for value in place]
    first = [tirx.Cast("int32", value) for value in floors]
    rest = [value - floor for value, floor in zip(place, floors, strict=True)]
    total: Any = 0
    for down in (0, 1):
        for right in (0, 1):
            corner = [first[0] + down, first[1] + right]
            shares = [
                part if moved else 1 - part for part, moved in zip(rest, (down, right), strict=True)
            ]
            inside = tirx.all(
                *(tirx.all(at >= 0, at < x.shape[2 + axis]) for axis, at in enumerate(corner))
            )
            pixel = tirx.if_then_else(inside, x(n, c, *corner), tirx.const(0, x.dtype))
            total = total + shares[0] * shares[1] * pixel
    return total


def deform_conv_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why windows cannot be gathered, if any."""
    for name in node.input[:3]:
        if facts.shape(name) is None:
            return f"the shape of {name!r} is only known at run time"
    if len(facts.shape(node.input[0]) or ()) != 4:
        return "it is not of two dimensions"
    kernel, weight = attribute(node, "kernel_shape"), facts.shape(node.input[1]) or ()
    if kernel is not None and list(kernel) != list(weight[2:]):
        return f"its kernel_shape is {list(kernel)}, and its weights have {list(weight[2:])}"
    return None


OPERATORS = (
    Operator("Conv"),
    Operator("ConvTranspose", reshape=pad_transposed, check=transposed_problem),
    Operator(
        "DeformConv", widen=widen_sum, check=deform_conv_problem, translate=translate_deform_conv
    ),
)
