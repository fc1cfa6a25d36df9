# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions as convolutions of their phases, whose results alternate.

::

    gv = nn.conv2d_transpose(x, w, strides=[2, 2])       # x: [N, I, H, W], w: [I, O, 2, 2]

    lv  = nn.conv2d(x, w')                               # w': [O * 2 * 2, I, 1, 1]
    lv1 = reshape(lv, [N, O, 2, 2, H, W])
    gv  = reshape(permute_dims(lv1, [0, 1, 4, 2, 5, 3]), [N, O, 2 * H, 2 * W])

With strides ``s`` and padding ``p``, an output ``y = s * m + f`` reads the inputs
``m + floor((f + p) / s) - t``, each with the weight ``(f + p) mod s + s * t`` (Shi et al., "Is the
deconvolution layer the same as a convolutional layer?", 2016). Neighbouring phases ``f`` that read
the same inputs are channels of one convolution. The plain definition multiplies with the zeros
between inputs, too: ``s * s - 1`` of ``s * s`` products.

Left alone: weights that are no constants, dilation, kernels smaller than the strides (some outputs
read nothing), images of unknown size, and other layouts than NCHW and IOHW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, product
from math import prod
from typing import Any

import numpy as np
from tvm import relax, tirx

from ...core.constants import numbers, tensor_constant
from ...core.expressions import Value
from ...core.graph import Graph

OPS: dict[str, tuple[Callable[..., relax.Expr], str, str]] = {
    "relax.nn.conv1d_transpose": (relax.op.nn.conv1d, "NCW", "IOW"),
    "relax.nn.conv2d_transpose": (relax.op.nn.conv2d, "NCHW", "IOHW"),
}


@dataclass(frozen=True)
class Phases:
    """Neighbouring phases of one axis that read the same inputs.

    Parameters
    ----------
    low : int
        Offset of the first input from the position of the output.
    taps : tuple[tuple[int, ...], ...]
        For each phase the positions of its weights in the kernel, in the order of the inputs.
    """

    low: int
    taps: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """Number of phases."""
        return len(self.taps)

    @property
    def kernel(self) -> int:
        """Inputs that a phase reads."""
        return len(self.taps[0])


def split_conv_transpose(graph: Graph, call: relax.Expr) -> Value:
    """Rewrite the transposed convolution ``call``."""
    data, weight = call.args
    attrs, (convolution, layout, kernel_layout) = call.attrs, OPS[call.op.name]
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout)
    values = numbers(weight)
    sizes, wanted = _spatial(data), _spatial(call)
    if values is None or layouts != (layout, kernel_layout, layout) or not sizes or not wanted:
        return None
    if any(int(step) != 1 for step in attrs.dilation):
        return None
    strides = [int(stride) for stride in attrs.strides]
    axes = [
        _phases(kernel, stride, int(before))
        for kernel, stride, before in zip(values.shape[2:], strides, attrs.padding, strict=False)
    ]
    if not all(axes):
        return None
    rows = [-(-size // stride) for size, stride in zip(wanted, strides, strict=True)]
    groups, batch = int(attrs.groups), data.ty.shape.values[0]
    channels = values.shape[1] * groups

    def compute(phases: tuple[Phases, ...]) -> relax.Expr:
        """[N, O, *phases, *rows] of some phases of each axis."""
        source, padding = _window(graph, data, sizes, rows, phases)
        packed = tensor_constant(_weights(values, phases, groups), weight.ty.dtype)
        found = graph.emit(
            convolution(
                source, packed, padding=padding, groups=groups, out_dtype=attrs.out_dtype or None
            )
        )
        counts = [phase.count for phase in phases]
        return graph.emit(relax.op.reshape(found, [batch, channels, *counts, *rows]))

    def join(axis: int, chosen: tuple[Phases, ...]) -> relax.Expr:
        if axis == len(axes):
            return compute(chosen)
        parts = [join(axis + 1, (*chosen, phases)) for phases in axes[axis]]
        return parts[0] if len(parts) == 1 else graph.emit(relax.op.concat(parts, 2 + axis))

    count = len(axes)
    order = [place for axis in range(count) for place in (2 + count + axis, 2 + axis)]
    turned = graph.emit(relax.op.permute_dims(join(0, ()), [0, 1, *order]))
    whole = [row * stride for row, stride in zip(rows, strides, strict=True)]
    image = relax.op.reshape(turned, [batch, channels, *whole])
    if whole == wanted:
        return image
    places = list(range(2, 2 + count))
    return relax.op.strided_slice(graph.emit(image), places, [0] * count, wanted)


def _spatial(tensor: relax.Expr) -> list[int] | None:
    shape = tensor.ty.shape
    if not isinstance(shape, relax.ShapeExpr):
        return None
    extents = shape.values[2:]
    known = all(isinstance(extent, tirx.IntImm) for extent in extents)
    return [int(extent) for extent in extents] if known else None


def _phases(kernel: int, stride: int, before: int) -> list[Phases]:
    """Phases of an axis in order; none if a phase has no weights."""
    if kernel < stride:
        return []
    found: list[tuple[int, tuple[int, ...]]] = []
    for phase in range(stride):
        start, offset = (phase + before) % stride, (phase + before) // stride
        taps = tuple(range(start, kernel, stride))[::-1]
        found.append((offset - len(taps) + 1, taps))
    runs = groupby(found, key=lambda one: (one[0], len(one[1])))
    return [Phases(low, tuple(taps for _, taps in run)) for (low, _), run in runs]


def _weights(values: np.ndarray, phases: tuple[Phases, ...], groups: int) -> np.ndarray:
    """Weights of a convolution, [O * phases, I / groups, *inputs], of [I, O / groups, *kernel]."""
    inputs, outputs = values.shape[0] // groups, values.shape[1]
    grouped = np.moveaxis(values.reshape(groups, inputs, *values.shape[1:]), 1, 2)
    counts, kernel = [phase.count for phase in phases], [phase.kernel for phase in phases]
    result = np.empty((groups, outputs, *counts, inputs, *kernel))
    for place in product(*map(range, counts)):
        taps = [phase.taps[at] for phase, at in zip(phases, place, strict=True)]
        chosen = grouped
        for axis, positions in enumerate(taps):
            chosen = np.take(chosen, positions, 3 + axis)
        result[(slice(None), slice(None)) + place] = chosen
    return result.reshape(groups * outputs * prod(counts), inputs, *kernel)


def _window(
    graph: Graph, data: relax.Expr, sizes: list[int], rows: list[int], phases: tuple[Phases, ...]
) -> tuple[relax.Expr, list[int]]:
    """Return the inputs that phases read, and the zeros around them."""
    begin = [max(phase.low, 0) for phase in phases]
    beyond = [
        phase.low + row + phase.kernel - 1 - size
        for phase, row, size in zip(phases, rows, sizes, strict=True)
    ]
    end = [size + min(after, 0) for size, after in zip(sizes, beyond, strict=True)]
    if any(begin) or end != sizes:
        places: Any = list(range(2, 2 + len(sizes)))
        data = graph.emit(relax.op.strided_slice(data, places, begin, end))
    before = [max(-phase.low, 0) for phase in phases]
    return data, [*before, *(max(after, 0) for after in beyond)]
