# SPDX-License-Identifier: Apache-2.0
"""Rules that write convolutions of sequences and of volumes, and transposed ones, as ``conv2d``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, product
from math import prod
from typing import Any

import numpy as np
import tvm_ffi
from tvm import relax, tirx

from ..core.constants import numbers, tensor_constant
from ..core.expressions import ELEMENTWISE, Value, op_name
from ..core.graph import Graph
from .shapes import UNARY, extents

BINARY = (*ELEMENTWISE, "relax.power")
POINTWISE = (
    *UNARY,
    *("relax.abs", "relax.erf", "relax.exp", "relax.log", "relax.negative", "relax.sqrt"),
    *("relax.rsqrt", "relax.square", "relax.nn.leakyrelu", "relax.nn.softplus"),
)
"""Ops whose first argument is their only tensor."""


def widen_conv1d(graph: Graph, call: relax.Expr) -> Value:
    """Convolutions of sequences as convolutions of images of one row.

    ::

        lv = nn.conv1d(x, w, strides=[2])                # x: [N, C, W], w: [O, I, K]
        gv = nn.gelu(lv + b)                             # b: [1, O, 1]

        lv  = reshape(x, [N, C, 1, W])
        lv1 = nn.conv2d(lv, w', strides=[1, 2])          # w': [O, I, 1, K]
        lv2 = reshape(lv1, [N, O, W'])
        gv  = nn.gelu(lv2 + b)

    The rule ``sink_image`` then moves the reshape behind what is done to each element. Left
    alone: other layouts than NCW, and sequences of unknown length.
    """
    data, weight = call.args
    attrs = call.attrs
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout)
    shapes = [extents(tensor) for tensor in (data, weight, call)]
    is_known = all(shape is not None and isinstance(shape[2], tirx.IntImm) for shape in shapes)
    if layouts != ("NCW", "OIW", "NCW") or not is_known:
        return None
    before, after = [int(pad) for pad in attrs.padding]
    image = graph.emit(
        relax.op.nn.conv2d(
            _as_image(graph, data),
            _as_image(graph, weight),
            strides=[1, int(attrs.strides[0])],
            padding=[0, before, 0, after],
            dilation=[1, int(attrs.dilation[0])],
            groups=int(attrs.groups),
            out_dtype=attrs.out_dtype or None,
        )
    )
    return relax.op.reshape(image, call.ty.shape)


def _as_image(graph: Graph, sequence: relax.Expr) -> relax.Expr:
    """A tensor of three axes with one row."""
    image = row_image(graph, sequence)
    if image is not None:
        return image
    batch, channels, width = sequence.ty.shape.values
    return graph.emit(relax.op.reshape(sequence, [batch, channels, 1, width]))


def row_image(graph: Graph, sequence: relax.Expr) -> relax.Expr | None:
    """The image of one row that ``sequence`` is a reshape of, if a convolution computed it."""
    image = image_of(graph, sequence)
    if image is None or len(sequence.ty.shape) != 3:
        return None
    batch, channels, rows, columns = image.ty.shape.values
    if not isinstance(rows, tirx.IntImm) or int(rows) != 1:
        return None
    same = map(tvm_ffi.structural_equal, [batch, channels, columns], sequence.ty.shape.values)
    return image if all(same) else None


def image_of(graph: Graph, tensor: relax.Expr) -> relax.Expr | None:
    """The image that ``tensor`` is a reshape of, if a convolution computed it."""
    reshape = graph.definition(tensor, "relax.reshape")
    if reshape is None or len(extents(reshape.args[0]) or ()) != 4 or extents(reshape) is None:
        return None
    return reshape.args[0] if _is_of_convolution(graph, reshape.args[0]) else None


def _is_of_convolution(graph: Graph, image: relax.Expr) -> bool:
    """True if a convolution, or element-wise ops on its result, computed an image."""
    while True:
        call = graph.definition(image)
        if op_name(call) not in (*BINARY, *POINTWISE):
            return op_name(call) == "relax.nn.conv2d"
        image = next((one for one in call.args if isinstance(one, relax.Var)), call)


TO_FRAMES, FROM_FRAMES = [2, 0, 1, 3, 4], [1, 2, 0, 3, 4]


def flatten_conv3d(graph: Graph, call: relax.Expr) -> Value:
    """Convolutions of volumes as those of frames, whose channels are those of several frames.

    ::

        gv = nn.conv3d(x, w, padding=[1, 1, 1])          # x: [N, C, D, H, W], w: [O, I, 3, 3, 3]

        lv  = reshape(permute_dims(x, [2, 0, 1, 3, 4]), [D * N, C, H, W])
        lv1 = nn.pad(lv, [N, N, 0, 0, 0, 0, 0, 0])
        lv2 = concat(lv1[: D * N], lv1[N : (D + 1) * N], lv1[2 * N :], axis=1)
        lv3 = nn.conv2d(lv2, w', padding=[1, 1])         # w': [O, 3 * I, 3, 3]
        gv  = permute_dims(reshape(lv3, [D, N, O, H, W]), [1, 2, 0, 3, 4])

    Frames are gathered as often as the kernel is deep, and summed in the registers of one kernel.
    The rule ``sink_image`` then moves the transpose behind what is done to each element, so
    that neighbouring convolutions pass frames to each other. Left alone: other layouts than NCDHW,
    and depths that are not known.
    """
    data, weight = call.args
    attrs = call.attrs
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout)
    shapes = [extents(tensor) or [] for tensor in (data, weight, call)]
    if layouts != ("NCDHW", "OIDHW", "NCDHW") or not all(map(_is_deep, shapes)):
        return None
    front, top, left, back, bottom, right = (int(pad) for pad in attrs.padding)
    image = graph.emit(
        relax.op.nn.conv2d(
            _gather(graph, _as_frames(graph, data), shapes, attrs, (front, back)),
            _flat_weight(graph, weight),
            strides=[int(stride) for stride in attrs.strides[1:]],
            padding=[top, left, bottom, right],
            dilation=[int(step) for step in attrs.dilation[1:]],
            groups=int(attrs.groups),
            out_dtype=attrs.out_dtype or None,
        )
    )
    return from_frames(graph, image, call)


def frame_image(graph: Graph, volume: relax.Expr) -> relax.Expr | None:
    """The frames [D * N, C, H, W] that ``volume`` was made of, if a convolution computed them."""
    turned = graph.definition(volume, "relax.permute_dims")
    if turned is None or turned.attrs.axes is None:
        return None
    if [int(axis) for axis in turned.attrs.axes] != FROM_FRAMES:
        return None
    found = image_of(graph, turned.args[0])
    if found is None:
        return None
    _, *wanted = found.ty.shape.values
    _, _, *given = turned.args[0].ty.shape.values
    return found if all(map(tvm_ffi.structural_equal, wanted, given)) else None


def from_frames(graph: Graph, image: relax.Expr, volume: relax.Expr) -> relax.Expr:
    """The transpose of frames that gives a volume of the shape of ``volume``."""
    batch, channels, depth, *size = volume.ty.shape.values
    apart = graph.emit(relax.op.reshape(image, [depth, batch, channels, *size]))
    return relax.op.permute_dims(apart, FROM_FRAMES)


def _is_deep(shape: list) -> bool:
    return len(shape) == 5 and isinstance(shape[2], tirx.IntImm)


def _as_frames(graph: Graph, volume: relax.Expr) -> relax.Expr:
    image = frame_image(graph, volume)
    if image is not None:
        return image
    batch, channels, depth, *size = volume.ty.shape.values
    turned = graph.emit(relax.op.permute_dims(volume, TO_FRAMES))
    return graph.emit(relax.op.reshape(turned, [depth * batch, channels, *size]))


def _gather(
    graph: Graph, image: relax.Expr, shapes: list[list], attrs: Any, padding: tuple[int, int]
) -> relax.Expr:
    """The frames that each output reads, as its channels; those of a group stay together."""
    (batch, channels, depth, *size), (_, _, taps, *_), (_, _, count, *_) = shapes
    taps, count, groups = int(taps), int(count), int(attrs.groups)
    stride, dilation = int(attrs.strides[0]), int(attrs.dilation[0])
    if (taps, stride, *padding) == (1, 1, 0, 0):
        return image
    clips = [] if isinstance(batch, tirx.IntImm) and int(batch) == 1 else [batch]
    parts = [] if groups == 1 else [groups]
    if clips or parts:
        inside = tirx.floordiv(channels, groups)
        image = graph.emit(relax.op.reshape(image, [depth, *clips, *parts, inside, *size]))
    if any(padding):
        rest = len(clips) + len(parts) + 3
        image = graph.emit(relax.op.nn.pad(image, [*padding, *[0] * 2 * rest]))
    read = []
    for begin in range(0, taps * dilation, dilation):
        end = begin + (count - 1) * stride + 1
        read.append(graph.emit(relax.op.strided_slice(image, [0], [begin], [end], [stride])))
    joined = graph.emit(relax.op.concat(read, 1 + len(clips) + len(parts))) if read[1:] else read[0]
    if clips or parts:
        joined = graph.emit(relax.op.reshape(joined, [count * batch, taps * channels, *size]))
    return joined


def _flat_weight(graph: Graph, weight: relax.Expr) -> relax.Expr:
    """Weights [O, D * I, H, W]."""
    outputs, inputs, taps, *size = weight.ty.shape.values
    turned = graph.emit(relax.op.permute_dims(weight, [0, 2, 1, 3, 4]))
    return graph.emit(relax.op.reshape(turned, [outputs, taps * inputs, *size]))


def sink_image(graph: Graph, call: relax.Expr) -> Value:
    """Element-wise ops on what a convolution of images computed, in front of the way back.

    ::

        lv = reshape(nn.conv2d(x, w), [N, O, W])        # b: [1, O, 1]
        gv = nn.gelu(lv + b)

        lv = nn.gelu(nn.conv2d(x, w) + b')              # b': [1, O, 1, 1]
        gv = reshape(lv, [N, O, W])

    There they stay the convolution's epilogue and meet the next convolution. So do those on
    volumes, which are frames and a transpose. Left alone: element-wise ops that read another
    tensor, which no such convolution computes, and those that broadcast it.
    """
    shape = extents(call)
    if shape is None or len(shape) not in (3, 5):
        return None
    is_row = len(shape) == 3
    find, constant = (row_image, _as_row) if is_row else (frame_image, _as_frame)
    count = 2 if op_name(call) in BINARY else 1
    images = [find(graph, operand) for operand in call.args[:count]]
    if all(image is None for image in images):
        return None
    for place, image in enumerate(images):
        if image is None:
            values = numbers(call.args[place])
            values = None if values is None else constant(values)
            if values is None:
                return None
            images[place] = tensor_constant(values, call.args[place].ty.dtype)
        elif not call.ty.is_base_of(call.args[place].ty):
            return None  # it broadcasts
    operands = [*images, *call.args[count:]]
    result = graph.emit(relax.Call(call.op, operands, call.attrs, call.ty_args))
    return relax.op.reshape(result, shape) if is_row else from_frames(graph, result, call)


def _as_row(values: np.ndarray) -> np.ndarray:
    """A constant that is broadcast to sequences, for images of one row."""
    if values.ndim < 2:
        return values
    return values.reshape(*values.shape[:-1], 1, values.shape[-1])


def _as_frame(values: np.ndarray) -> np.ndarray | None:
    """A constant that is broadcast to volumes, for frames; None if it differs by clip or frame."""
    if values.ndim < 3:
        return values
    *batch, depth = values.shape[-5:-2]
    if depth != 1 or batch[:-1] not in ([], [1]):
        return None
    return values.reshape(*values.shape[:-3], *values.shape[-2:])


OPS: dict[str, tuple[Callable[..., relax.Expr], str, str]] = {
    "relax.nn.conv1d_transpose": (relax.op.nn.conv1d, "NCW", "IOW"),
    "relax.nn.conv2d_transpose": (relax.op.nn.conv2d, "NCHW", "IOHW"),
}


@dataclass(frozen=True)
class Phases:
    """Neighbouring phases of one axis that read the same inputs."""

    low: int  # Offset of the first input from the position of the output.
    # Positions of the weights of each phase in the kernel, in the order of the inputs.
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
    """Transposed convolutions as convolutions of their phases, whose results alternate.

    ::

        gv = nn.conv2d_transpose(x, w, strides=[2, 2])       # x: [N, I, H, W], w: [I, O, 2, 2]

        lv  = nn.conv2d(x, w')                               # w': [O * 2 * 2, I, 1, 1]
        lv1 = reshape(lv, [N, O, 2, 2, H, W])
        gv  = reshape(permute_dims(lv1, [0, 1, 4, 2, 5, 3]), [N, O, 2 * H, 2 * W])

    With strides ``s`` and padding ``p``, an output ``y = s * m + f`` reads the inputs ``m +
    floor((f + p) / s) - t``, each with the weight ``(f + p) mod s + s * t`` (Shi et al., "Is the
    deconvolution layer the same as a convolutional layer?", 2016). Neighbouring phases ``f`` that
    read the same inputs are channels of one convolution. The plain definition multiplies with the
    zeros between inputs, too: ``s * s - 1`` of ``s * s`` products.

    Left alone: weights that are no constants, dilation, kernels smaller than the strides (some
    outputs read nothing), images of unknown size, and other layouts than NCHW and IOHW.
    """
    data, weight = call.args
    attrs, (convolution, layout, kernel_layout) = call.attrs, OPS[call.op.name]
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout)
    values = numbers(weight)
    sizes, outputs = _spatial(data), _spatial(call)
    if values is None or layouts != (layout, kernel_layout, layout) or not sizes or not outputs:
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
    rows = [-(-size // stride) for size, stride in zip(outputs, strides, strict=True)]
    groups, batch = int(attrs.groups), data.ty.shape.values[0]
    channels = values.shape[1] * groups

    def compute(phases: tuple[Phases, ...]) -> relax.Expr:
        """[N, O, *phases, *rows] of some phases of each axis."""
        source, padding = _window(graph, data, sizes, rows, phases)
        packed = tensor_constant(_weights(values, phases, groups), weight.ty.dtype)
        convolved = graph.emit(
            convolution(
                source, packed, padding=padding, groups=groups, out_dtype=attrs.out_dtype or None
            )
        )
        counts = [phase.count for phase in phases]
        return graph.emit(relax.op.reshape(convolved, [batch, channels, *counts, *rows]))

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
    if whole == outputs:
        return image
    places = list(range(2, 2 + count))
    return relax.op.strided_slice(graph.emit(image), places, [0] * count, outputs)


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
