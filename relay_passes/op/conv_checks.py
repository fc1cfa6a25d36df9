# SPDX-License-Identifier: Apache-2.0
"""Argument checks of the convolution ops, with the numbers found and expected."""

from __future__ import annotations

from collections.abc import Sequence

from schedules.errors import OpError
from schedules.workload.conv2d import WORDS, ConvLayer


def check_layer(layer: ConvLayer, suffix: str, op: str) -> None:
    """Reject a layer whose numbers make no convolution."""
    for what, count, values, least in (
        ("strides", 2, layer.strides, 1),
        ("padding", 4, layer.padding, 0),
        ("dilation", 2, layer.dilation, 1),
    ):
        if len(values) != count or min(values) < least:
            raise OpError(
                f"{op}: {what}{suffix} is {tuple(values)}; expected {count} integers >= {least}"
            )
    channels = (layer.in_channels, layer.out_channels)
    if layer.groups < 1 or any(count % layer.groups for count in channels):
        raise OpError(
            f"{op}: groups{suffix} is {layer.groups} for {channels[0]} input and {channels[1]} "
            "output channels; expected a divisor of both"
        )
    if min(*layer.kernel, *channels) < 1:
        raise OpError(
            f"{op}: weight{suffix} has kernel {layer.kernel} for {channels[0]} to {channels[1]} "
            "channels; expected every extent to be at least 1"
        )


def check_packable(layer: ConvLayer, lanes: int, plain_data: bool, suffix: str, op: str) -> None:
    """Reject a layer that has no packed form."""
    if plain_data and layer.groups > 1:
        raise OpError(
            f"{op}: groups{suffix} is {layer.groups} on NCHW data, which has no form in blocks of "
            f"{lanes}; pack the data, or keep this convolution in NCHW"
        )


def packed_weight_shape(
    layer: ConvLayer, lanes: int, plain_data: bool, data_lanes: int | None = None
) -> tuple[int, ...]:
    """Shape of the packed weight of ``layer``.

    ``plain_data`` for a first layer on NCHW data; with ``data_lanes`` in words of two channels.
    """
    out_blocks = -(-layer.out_channels // lanes)
    if layer.is_depthwise:
        return (out_blocks, *layer.kernel, lanes)
    per_group = layer.in_channels // layer.groups
    if data_lanes is not None:
        word = WORDS["bfloat16"]
        words = (data_lanes // word, lanes, word)
        return (out_blocks, -(-per_group // data_lanes), *layer.kernel, *words)
    if layer.group_lanes(lanes):
        return (out_blocks, 1, *layer.kernel, per_group, lanes)
    if plain_data:
        return (out_blocks, per_group, *layer.kernel, 1, lanes)
    step = layer.input_step(lanes)
    return (out_blocks, -(-per_group // step), *layer.kernel, step, lanes)


def check_parameters(
    layer: ConvLayer,
    weight: Sequence[int],
    bias: Sequence[int],
    lanes: int,
    plain_data: bool,
    suffix: str,
    op: str,
    data_lanes: int | None = None,
) -> None:
    """Reject a weight or bias whose shape does not match ``layer``."""
    if lanes:
        expected_weight = packed_weight_shape(layer, lanes, plain_data, data_lanes)
        expected_bias: tuple[int, ...] = (-(-layer.out_channels // lanes), lanes)
    else:
        per_group = layer.in_channels // layer.groups
        expected_weight = (layer.out_channels, per_group, *layer.kernel)
        expected_bias = (layer.out_channels,)
    for name, found, expected in (
        ("weight", tuple(weight), expected_weight),
        ("bias", tuple(bias), expected_bias),
    ):
        if found != expected:
            raise OpError(f"{op}: {name}{suffix} has shape {found}; expected {expected}")


def check_sizes(layers: Sequence[ConvLayer], height: int, width: int, op: str) -> None:
    """Reject an input on which a kernel does not fit once."""
    for layer in layers:
        size = layer.output_size(height, width)
        if min(size) < 1:
            raise OpError(
                f"{op}: {layer} leaves an output of {size[0]}x{size[1]} for an input of "
                f"{height}x{width}; expected the padded input to hold the kernel at least once"
            )
        height, width = size
