# SPDX-License-Identifier: Apache-2.0
"""The pairs of Table 3.2: complete, chained with their networks, and correct as models."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from examples.layers import (
    DEPTHWISE_PAIRS,
    GROUPED_PAIRS,
    MNASNET_B1_PAIRS,
    PAIRS,
    build_pair,
    workload,
)
from examples.zoo import ZOO

ALL_PAIRS = PAIRS | MNASNET_B1_PAIRS | GROUPED_PAIRS
NETWORKS = {
    "MobileNet-V1": "mobilenet_v1",
    "MobileNet-V2": "mobilenet_v2",
    "MNasNet-A1": "mnasnet_a1",
    "ResNet-50": "resnet_50",
    "ResNeXt-50 32x4d": "resnext_50",
    "Inception-V3": "inception_v3",
}


def test_counts() -> None:
    assert len(PAIRS) == 39
    assert len(DEPTHWISE_PAIRS) == 27
    assert len(MNASNET_B1_PAIRS) == 6
    assert len(GROUPED_PAIRS) == 16
    assert len(ALL_PAIRS) == 39 + 6 + 16
    assert all(pair.name == name for name, pair in ALL_PAIRS.items())


def test_workloads_of_a_few_rows() -> None:
    first = workload("mv2_2_1")
    assert str(first.layer1) == "dw-conv 3x3 96->96 s2 relu6"
    assert str(first.layer2) == "conv 1x1 96->24"
    assert (first.batch, first.height, first.width) == (1, 112, 112)
    assert first.mid_size == first.out_size == (56, 56)
    assert first.flops() == 2 * 56 * 56 * 96 * (9 + 24)
    assert str(workload("mnb1_6_1").layer1) == "dw-conv 5x5 672->672 s2 relu"
    assert workload("mnb1_6_1").out_size == (7, 7)
    last = workload("res_5x_b2", batch=3)
    assert (last.batch, last.layer2.out_channels, last.layer2.activation.kind) == (3, 2048, "relu")


def _conv_pairs(model: onnx.ModelProto) -> set[tuple]:
    """Each convolution with the one before it: (weight shapes, stride of the first, size)."""
    graph = model.graph
    weights = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
    dims = {value.name: value.type.tensor_type.shape.dim for value in (*graph.input, *inferred)}
    size = {name: shape[2].dim_value for name, shape in dims.items() if len(shape) == 4}
    maker = {node.output[0]: node for node in graph.node}
    pairs = set()
    for node in graph.node:
        if node.op_type != "Conv":
            continue
        before = maker.get(node.input[0])
        while before is not None and before.op_type in ("Relu", "Clip", "BatchNormalization"):
            before = maker.get(before.input[0])
        if before is not None and before.op_type == "Conv":
            stride = next(a.ints[0] for a in before.attribute if a.name == "strides")
            shapes = weights[before.input[1]], weights[node.input[1]]
            pairs.add((shapes, stride, size[before.input[0]]))
    return pairs


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("network", NETWORKS)
def test_pairs_occur_in_their_network(network: str) -> None:
    found = _conv_pairs(ZOO[NETWORKS[network]]())
    for pair in ALL_PAIRS.values():
        if pair.network != network:
            continue
        first, second = pair.workload.layer1, pair.workload.layer2
        shapes = tuple(
            (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel)
            for layer in (first, second)
        )
        assert (shapes, first.strides[0], pair.workload.height) in found, pair.name


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name", ["mv2_6_2", "mnb1_6_2", "res_5x_s2", "groups_8", "rgy_4", "shf_3", "inc_128"]
)
def test_model_computes_the_pair(name: str) -> None:
    shapes = workload(name, batch=2)
    model = build_pair(name, batch=2, seed=5)
    onnx.checker.check_model(model, full_check=True)
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    data = np.random.default_rng(1).standard_normal(
        (2, shapes.layer1.in_channels, shapes.height, shapes.width), dtype=np.float32
    )
    expected = data
    for layer, node in zip(
        (shapes.layer1, shapes.layer2),
        [node for node in model.graph.node if node.op_type == "Conv"],
        strict=True,
    ):
        expected = _convolve(expected, weights[node.input[1]], weights[node.input[2]], layer)
    (result,) = ReferenceEvaluator(model).run(None, {"input": data})
    assert result.shape == (2, shapes.layer2.out_channels, *shapes.out_size)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def _convolve(data: np.ndarray, weight: np.ndarray, bias: np.ndarray, layer: object) -> np.ndarray:
    """One layer in float64, a sum over the positions of its kernel."""
    top, left, bottom, right = layer.padding  # type: ignore[attr-defined]
    stride_h, stride_w = layer.strides  # type: ignore[attr-defined]
    out_h, out_w = layer.output_size(*data.shape[2:])  # type: ignore[attr-defined]
    padded = np.pad(data.astype(np.float64), ((0, 0), (0, 0), (top, bottom), (left, right)))
    total = np.zeros((data.shape[0], weight.shape[0], out_h, out_w))
    for y, x in np.ndindex(weight.shape[2:]):
        window = padded[:, :, y::stride_h, x::stride_w][:, :, :out_h, :out_w]
        parts = zip(
            np.split(window, layer.groups, axis=1),  # type: ignore[attr-defined]
            np.split(weight[:, :, y, x], layer.groups),  # type: ignore[attr-defined]
            strict=True,
        )
        total += np.concatenate([np.einsum("nihw,oi->nohw", *part) for part in parts], axis=1)
    total += bias[:, None, None]
    low, high = {"none": (-np.inf, np.inf), "relu": (0, np.inf), "relu6": (0, 6)}[
        layer.activation.kind  # type: ignore[attr-defined]
    ]
    return total.clip(low, high)
