# SPDX-License-Identifier: Apache-2.0
"""Convolution pairs of Table 3.2 of the dissertation on layer fusion, as records and as ONNX.

``PAIRS`` holds the 39 pairs of the five networks that the dissertation measures (27 begin with a
depthwise convolution); ``MNASNET_B1_PAIRS`` holds the six of MNasNet-B1 in the same table. The
table writes the inputs as (N, H, W, C); the models are in NCHW.

``GROUPED_PAIRS`` are not in the table: layers in groups, and kernels that are large or one row or
column. Gates and norms between their layers are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx

from examples.models import GraphBuilder
from schedules.workload.conv2d import Activation, ConvLayer, FusedConv2DWorkload


@dataclass(frozen=True)
class LayerPair:
    """One row of the table.

    Parameters
    ----------
    name : str
        Name of the pair in the table.
    network : str
        The network that the pair is taken from; empty for none.
    workload : FusedConv2DWorkload
        Both layers, for batch 1.
    """

    name: str
    network: str
    workload: FusedConv2DWorkload


# name: input (height, width, channels), layer 1, layer 2; a layer is (kernel size, output channels
# or multiplier of a depthwise layer, stride, "dw-conv", "conv" or a number of groups, activation).
_Layer = tuple[int | tuple[int, int], int, int, str | int, str]
_Row = tuple[tuple[int, int, int], _Layer, _Layer]

_MOBILENET_V1: dict[str, _Row] = {
    "mv1_1": ((112, 112, 32), (3, 1, 1, "dw-conv", "relu"), (1, 64, 1, "conv", "relu")),
    "mv1_2": ((112, 112, 64), (3, 1, 2, "dw-conv", "relu"), (1, 128, 1, "conv", "relu")),
    "mv1_3": ((56, 56, 128), (3, 1, 1, "dw-conv", "relu"), (1, 128, 1, "conv", "relu")),
    "mv1_4": ((56, 56, 128), (3, 1, 2, "dw-conv", "relu"), (1, 256, 1, "conv", "relu")),
    "mv1_5": ((28, 28, 256), (3, 1, 1, "dw-conv", "relu"), (1, 256, 1, "conv", "relu")),
    "mv1_6": ((28, 28, 256), (3, 1, 2, "dw-conv", "relu"), (1, 512, 1, "conv", "relu")),
    "mv1_7-11": ((14, 14, 512), (3, 1, 1, "dw-conv", "relu"), (1, 512, 1, "conv", "relu")),
    "mv1_12": ((14, 14, 512), (3, 1, 2, "dw-conv", "relu"), (1, 1024, 1, "conv", "relu")),
    "mv1_13": ((7, 7, 1024), (3, 1, 1, "dw-conv", "relu"), (1, 1024, 1, "conv", "relu")),
}
_MOBILENET_V2: dict[str, _Row] = {
    "mv2_1": ((112, 112, 32), (3, 1, 1, "dw-conv", "relu6"), (1, 16, 1, "conv", "bias")),
    "mv2_2_1": ((112, 112, 96), (3, 1, 2, "dw-conv", "relu6"), (1, 24, 1, "conv", "bias")),
    "mv2_2_2": ((56, 56, 144), (3, 1, 1, "dw-conv", "relu6"), (1, 24, 1, "conv", "bias")),
    "mv2_3_1": ((56, 56, 144), (3, 1, 2, "dw-conv", "relu6"), (1, 32, 1, "conv", "bias")),
    "mv2_3_2": ((28, 28, 192), (3, 1, 1, "dw-conv", "relu6"), (1, 32, 1, "conv", "bias")),
    "mv2_4_1": ((28, 28, 192), (3, 1, 2, "dw-conv", "relu6"), (1, 64, 1, "conv", "bias")),
    "mv2_4_2": ((14, 14, 384), (3, 1, 1, "dw-conv", "relu6"), (1, 64, 1, "conv", "bias")),
    "mv2_5_1": ((14, 14, 384), (3, 1, 1, "dw-conv", "relu6"), (1, 96, 1, "conv", "bias")),
    "mv2_5_2": ((14, 14, 576), (3, 1, 1, "dw-conv", "relu6"), (1, 96, 1, "conv", "bias")),
    "mv2_6_1": ((14, 14, 576), (3, 1, 2, "dw-conv", "relu6"), (1, 160, 1, "conv", "bias")),
    "mv2_6_2": ((7, 7, 960), (3, 1, 1, "dw-conv", "relu6"), (1, 160, 1, "conv", "bias")),
    "mv2_7": ((7, 7, 960), (3, 1, 1, "dw-conv", "relu6"), (1, 320, 1, "conv", "bias")),
}
_MNASNET_A1: dict[str, _Row] = {
    "mna1_1": ((112, 112, 32), (3, 1, 1, "dw-conv", "relu"), (1, 16, 1, "conv", "bias")),
    "mna1_2_1": ((112, 112, 96), (3, 1, 2, "dw-conv", "relu"), (1, 24, 1, "conv", "bias")),
    "mna1_2_2": ((56, 56, 144), (3, 1, 1, "dw-conv", "relu"), (1, 24, 1, "conv", "bias")),
    "mna1_4_1": ((28, 28, 240), (3, 1, 2, "dw-conv", "relu"), (1, 80, 1, "conv", "bias")),
    "mna1_4_2": ((14, 14, 480), (3, 1, 1, "dw-conv", "relu"), (1, 80, 1, "conv", "bias")),
    "mna1_7": ((7, 7, 960), (3, 1, 1, "dw-conv", "relu"), (1, 320, 1, "conv", "bias")),
}
# The table calls these first layers "conv" with a multiplier of 1: they are depthwise.
_MNASNET_B1: dict[str, _Row] = {
    "mnb1_3_1": ((56, 56, 72), (5, 1, 2, "dw-conv", "relu"), (1, 40, 1, "conv", "bias")),
    "mnb1_3_2": ((28, 28, 240), (5, 1, 1, "dw-conv", "relu"), (1, 40, 1, "conv", "bias")),
    "mnb1_5_1": ((14, 14, 480), (3, 1, 1, "dw-conv", "relu"), (1, 112, 1, "conv", "bias")),
    "mnb1_5_2": ((14, 14, 672), (3, 1, 1, "dw-conv", "relu"), (1, 112, 1, "conv", "bias")),
    "mnb1_6_1": ((14, 14, 672), (5, 1, 2, "dw-conv", "relu"), (1, 160, 1, "conv", "bias")),
    "mnb1_6_2": ((7, 7, 960), (5, 1, 1, "dw-conv", "relu"), (1, 160, 1, "conv", "bias")),
}
_RESNET_18: dict[str, _Row] = {
    "res_2x": ((56, 56, 64), (3, 64, 1, "conv", "relu"), (3, 64, 1, "conv", "bias")),
    "res_3x": ((28, 28, 128), (3, 128, 1, "conv", "relu"), (3, 128, 1, "conv", "bias")),
    "res_4x": ((14, 14, 256), (3, 256, 1, "conv", "relu"), (3, 256, 1, "conv", "bias")),
    "res_5x": ((7, 7, 512), (3, 512, 1, "conv", "relu"), (3, 512, 1, "conv", "bias")),
    "res_2x_s2": ((56, 56, 64), (3, 64, 2, "conv", "relu"), (3, 64, 1, "conv", "bias")),
    "res_3x_s2": ((28, 28, 128), (3, 128, 2, "conv", "relu"), (3, 128, 1, "conv", "bias")),
    "res_4x_s2": ((14, 14, 256), (3, 256, 2, "conv", "relu"), (3, 256, 1, "conv", "bias")),
    "res_5x_s2": ((7, 7, 512), (3, 512, 2, "conv", "relu"), (3, 512, 1, "conv", "bias")),
}
_RESNET_50: dict[str, _Row] = {
    "res_2x_b2": ((56, 56, 64), (3, 64, 1, "conv", "relu"), (1, 256, 1, "conv", "relu")),
    "res_3x_b2": ((28, 28, 128), (3, 128, 1, "conv", "relu"), (1, 512, 1, "conv", "relu")),
    "res_4x_b2": ((14, 14, 256), (3, 256, 1, "conv", "relu"), (1, 1024, 1, "conv", "relu")),
    "res_5x_b2": ((7, 7, 512), (3, 512, 1, "conv", "relu"), (1, 2048, 1, "conv", "relu")),
}
_EIGHT_GROUPS: dict[str, _Row] = {
    "groups_8": ((28, 28, 64), (3, 64, 1, 8, "relu"), (1, 128, 1, "conv", "relu")),
}
_RESNEXT_50: dict[str, _Row] = {
    "rnx_2": ((56, 56, 128), (3, 128, 1, 32, "relu"), (1, 256, 1, "conv", "bias")),
    "rnx_3_s2": ((56, 56, 256), (3, 256, 2, 32, "relu"), (1, 512, 1, "conv", "bias")),
    "rnx_3": ((28, 28, 256), (3, 256, 1, 32, "relu"), (1, 512, 1, "conv", "bias")),
    "rnx_4": ((14, 14, 512), (3, 512, 1, 32, "relu"), (1, 1024, 1, "conv", "bias")),
    "rnx_5": ((7, 7, 1024), (3, 1024, 1, 32, "relu"), (1, 2048, 1, "conv", "bias")),
}
_REGNET_Y: dict[str, _Row] = {
    "rgy_1_s2": ((112, 112, 48), (3, 48, 2, 6, "relu"), (1, 48, 1, "conv", "bias")),
    "rgy_2": ((28, 28, 104), (3, 104, 1, 13, "relu"), (1, 104, 1, "conv", "bias")),
    "rgy_3": ((14, 14, 208), (3, 208, 1, 26, "relu"), (1, 208, 1, "conv", "bias")),
    "rgy_4": ((7, 7, 440), (3, 440, 1, 55, "relu"), (1, 440, 1, "conv", "bias")),
}
_SHUFFLENET: dict[str, _Row] = {
    "shf_2": ((28, 28, 60), (3, 1, 1, "dw-conv", "bias"), (1, 240, 1, 3, "bias")),
    "shf_3": ((14, 14, 120), (3, 1, 1, "dw-conv", "bias"), (1, 480, 1, 3, "bias")),
}
_CONVNEXT: dict[str, _Row] = {
    "cnx_1": ((56, 56, 96), (7, 1, 1, "dw-conv", "bias"), (1, 384, 1, "conv", "bias")),
    "cnx_3": ((14, 14, 384), (7, 1, 1, "dw-conv", "bias"), (1, 1536, 1, "conv", "bias")),
}
_INCEPTION: dict[str, _Row] = {
    "inc_128": ((17, 17, 128), ((1, 7), 128, 1, "conv", "relu"), ((7, 1), 192, 1, "conv", "relu")),
    "inc_192": ((17, 17, 192), ((1, 7), 192, 1, "conv", "relu"), ((7, 1), 192, 1, "conv", "relu")),
}


def _layer(in_channels: int, layer: _Layer) -> ConvLayer:
    size, channels, stride, kind, post_op = layer
    kernel = size if isinstance(size, tuple) else (size, size)
    depthwise = kind == "dw-conv"
    groups = kind if isinstance(kind, int) else 1
    return ConvLayer(
        in_channels=in_channels,
        out_channels=in_channels * channels if depthwise else channels,
        kernel=kernel,
        strides=(stride, stride),
        padding=((kernel[0] - 1) // 2, (kernel[1] - 1) // 2) * 2,
        groups=in_channels if depthwise else groups,
        activation=Activation("none" if post_op == "bias" else post_op),
    )


def _pairs(network: str, rows: dict[str, _Row]) -> dict[str, LayerPair]:
    pairs = {}
    for name, ((height, width, channels), first, second) in rows.items():
        layer1 = _layer(channels, first)
        layer2 = _layer(layer1.out_channels, second)
        workload = FusedConv2DWorkload(1, height, width, layer1, layer2)
        pairs[name] = LayerPair(name, network, workload)
    return pairs


PAIRS: dict[str, LayerPair] = {
    **_pairs("MobileNet-V1", _MOBILENET_V1),
    **_pairs("MobileNet-V2", _MOBILENET_V2),
    **_pairs("MNasNet-A1", _MNASNET_A1),
    **_pairs("ResNet-18", _RESNET_18),
    **_pairs("ResNet-50", _RESNET_50),
}
DEPTHWISE_PAIRS = {n: pair for n, pair in PAIRS.items() if pair.workload.layer1.is_depthwise}
MNASNET_B1_PAIRS = _pairs("MNasNet-B1", _MNASNET_B1)
GROUPED_PAIRS: dict[str, LayerPair] = {
    **_pairs("", _EIGHT_GROUPS),
    **_pairs("ResNeXt-50 32x4d", _RESNEXT_50),
    **_pairs("RegNet-Y-400MF", _REGNET_Y),
    **_pairs("ShuffleNet", _SHUFFLENET),
    **_pairs("ConvNeXt-T", _CONVNEXT),
    **_pairs("Inception-V3", _INCEPTION),
}
_ALL = PAIRS | MNASNET_B1_PAIRS | GROUPED_PAIRS


def workload(name: str, batch: int = 1) -> FusedConv2DWorkload:
    """Return the shapes of the pair ``name`` for a batch of images."""
    return replace(_ALL[name].workload, batch=batch)


def build_pair(name: str, batch: int = 1, seed: int = 0, copies: int = 1) -> onnx.ModelProto:
    """Build the pair ``name`` as a model: conv, bias, activation, conv, bias and activation.

    Several ``copies`` have weights of their own, read the one input, and each has an output.
    """
    pair = workload(name, batch)
    shape = (batch, pair.layer1.in_channels, pair.height, pair.width)
    net = GraphBuilder(name, shape, seed)
    found = [_chain(net, pair) for _ in range(copies)]
    shape_out: list[int | str] = [batch, pair.layer2.out_channels, *pair.out_size]
    if copies == 1:
        return net.finish(found[0], shape_out)
    return net.model({f"output_{number}": (x, shape_out) for number, x in enumerate(found)})


def _chain(net: GraphBuilder, pair: FusedConv2DWorkload) -> str:
    x = net.input
    for layer in (pair.layer1, pair.layer2):
        gain = 1.0 if layer.activation.kind == "none" else 2.0
        x = net.conv(
            x,
            layer.out_channels,
            layer.kernel,
            layer.strides[0],
            groups=layer.groups,
            gain=gain,
            bias=True,
        )
        x = net.activation(x, layer.activation.kind)
    return x
