# SPDX-License-Identifier: Apache-2.0
"""Limits of the fused template: the pairs of packed convolutions that it takes."""

from __future__ import annotations

from schedules.workload.conv2d import Conv2DKernel, ConvLayer


def unsupported(layer2: ConvLayer) -> str | None:
    """Reason why the template cannot take a pair with such a second layer; None if it can."""
    if layer2.groups != 1:
        return "the second layer has groups; the template reduces over all its input channels"
    return None


def takes_plain(kernel: Conv2DKernel, data: bool, out: bool) -> bool:
    """Return whether the template can pack the data, or unpack the output, of a packed kernel."""
    if len(kernel.layers) != 2 or None in (kernel.height, kernel.width):
        return False
    layer1, layer2 = kernel.layers
    if kernel.data_layout == "NCHW" or unsupported(layer2) is not None:
        return False
    size = int(kernel.height or 1), int(kernel.width or 1)
    takes_data, takes_out = plain_sides(layer1, layer2, size, kernel.lanes)
    return (takes_data or not data) and (takes_out or not out)


def plain_sides(
    layer1: ConvLayer, layer2: ConvLayer, size: tuple[int, int], lanes: int
) -> tuple[bool, bool]:
    """Return whether a pair on an image of ``size`` could pack its data, and unpack its output."""
    if lanes < 2 or lanes & (lanes - 1):  # transposes in registers need a power of two
        return False, False
    top, _, bottom, _ = layer1.padding
    rows = (layer1.kernel[0] - 1) * layer1.dilation[0] + 1 - max(top, bottom)
    pixels = min(rows, size[0]) * size[1]
    data = layer1.group_lanes(lanes) > 0 and layer2.is_pointwise and pixels >= lanes
    return data, layer2.is_pointwise
