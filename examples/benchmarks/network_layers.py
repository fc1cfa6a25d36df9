# SPDX-License-Identifier: Apache-2.0
"""Convolutions of a network as workloads of kernels."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from schedules.workload.conv2d import Conv2DKernel, ConvLayer


def conv_kernels(models: Sequence[onnx.ModelProto], lanes: int) -> list[Conv2DKernel]:
    """Every different convolution of some models, in the order of the nodes.

    Parameters
    ----------
    models : Sequence[onnx.ModelProto]
        Networks of static shapes.
    lanes : int
        Channels in a block of the packed layouts. Layers that read an image of three channels keep
        its layout, NCHW.

    Returns
    -------
    list[Conv2DKernel]
        Workloads without activations.
    """
    kernels: dict[Conv2DKernel, None] = {}
    for model in models:
        graph = onnx.shape_inference.infer_shapes(model).graph
        shapes = {
            value.name: [extent.dim_value for extent in value.type.tensor_type.shape.dim]
            for value in (*graph.input, *graph.value_info)
        }
        shapes |= {weight.name: list(weight.dims) for weight in graph.initializer}
        for node in graph.node:
            if node.op_type == "Conv":
                kernels[_kernel(node, shapes, lanes)] = None
    return list(kernels)


def _kernel(node: onnx.NodeProto, shapes: dict[str, list[int]], lanes: int) -> Conv2DKernel:
    data, weight = (shapes[name] for name in node.input[:2])
    fields = {field.name: onnx.helper.get_attribute_value(field) for field in node.attribute}
    layer = ConvLayer(
        in_channels=data[1],
        out_channels=weight[0],
        kernel=(weight[2], weight[3]),
        strides=tuple(fields["strides"]),
        padding=tuple(fields["pads"]),
        groups=fields["group"],
    )
    packed = f"NCHW{lanes}c"
    return Conv2DKernel(
        layers=(layer,),
        batch=data[0],
        height=data[2],
        width=data[3],
        data_layout="NCHW" if data[1] == 3 else packed,
        out_layout=packed,
    )
