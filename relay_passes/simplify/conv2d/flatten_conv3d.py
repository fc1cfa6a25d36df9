# SPDX-License-Identifier: Apache-2.0
"""Convolutions of volumes as convolutions of frames, whose channels are those of several frames.

::

    gv = nn.conv3d(x, w, padding=[1, 1, 1])          # x: [N, C, D, H, W], w: [O, I, 3, 3, 3]

    lv  = reshape(permute_dims(x, [2, 0, 1, 3, 4]), [D * N, C, H, W])
    lv1 = nn.pad(lv, [N, N, 0, 0, 0, 0, 0, 0])
    lv2 = concat(lv1[: D * N], lv1[N : (D + 1) * N], lv1[2 * N :], axis=1)
    lv3 = nn.conv2d(lv2, w', padding=[1, 1])         # w': [O, 3 * I, 3, 3]
    gv  = permute_dims(reshape(lv3, [D, N, O, H, W]), [1, 2, 0, 3, 4])

Frames are gathered as often as the kernel is deep, and summed in the registers of one kernel. The
rule :mod:`.sink_image` then moves the transpose behind what is done to each element, so that
neighbouring convolutions pass frames to each other. Left alone: other layouts than NCDHW, and
depths that are not known.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import relax, tirx

from ...core.expressions import Value
from ...core.graph import Graph
from .widen_conv1d import extents, image_of

TO_FRAMES, FROM_FRAMES = [2, 0, 1, 3, 4], [1, 2, 0, 3, 4]


def flatten_conv3d(graph: Graph, call: relax.Expr) -> Value:
    """Rewrite the convolution ``call``."""
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
