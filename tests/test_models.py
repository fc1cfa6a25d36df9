# SPDX-License-Identifier: Apache-2.0
"""The five networks are what their papers describe, and their numbers are fit for comparisons."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from examples.models import MODELS, GraphBuilder

# Millions of multiply-adds in Conv and Gemm, and nodes by kind: (Conv, Add, Sigmoid).
KNOWN = {
    "mobilenet_v1": (569, (27, 0, 0)),
    "mobilenet_v2": (301, (52, 10, 0)),
    "mnasnet_a1": (312, (65, 9, 8)),
    "resnet_18": (1814, (20, 8, 0)),
    "resnet_50": (4089, (53, 16, 0)),
}


@functools.cache
def _full_size(name: str) -> onnx.ModelProto:
    return MODELS[name]()


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with inputs instead of its weights, so that shape inference is quick."""
    light = onnx.ModelProto()
    light.opset_import.extend(model.opset_import)
    light.ir_version = model.ir_version
    light.graph.name = model.graph.name
    light.graph.node.extend(model.graph.node)
    light.graph.input.extend(model.graph.input)
    light.graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        value = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        light.graph.input.append(value)
    return light


def _shapes(model: onnx.ModelProto) -> dict[str, list[int]]:
    light = _without_weights(model)
    inferred = onnx.shape_inference.infer_shapes(light, strict_mode=True).graph
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    return {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}


def _multiply_adds(model: onnx.ModelProto) -> int:
    shapes = _shapes(model)
    total = 0
    for node in model.graph.node:
        if node.op_type == "Conv":
            total += math.prod(shapes[node.output[0]]) * math.prod(shapes[node.input[1]][1:])
        elif node.op_type == "Gemm":
            total += math.prod(shapes[node.input[1]])
    return total


def _run(model: onnx.ModelProto, data: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(None, {"input": data})[0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_structure(name: str) -> None:
    model = _full_size(name)
    onnx.checker.check_model(model, full_check=True)
    millions, (convolutions, sums, gates) = KNOWN[name]
    count = Counter(node.op_type for node in model.graph.node)
    assert (count["Conv"], count["Add"], count["Sigmoid"]) == (convolutions, sums, gates)
    assert count["BatchNormalization"] == convolutions - 2 * gates
    assert _multiply_adds(model) / 1e6 == pytest.approx(millions, rel=0.01)
    shapes = _shapes(model)
    assert shapes["input"] == [1, 3, 224, 224]
    assert shapes["output"] == [1, 1000]


def test_kernels_of_mnasnet() -> None:
    model = _full_size("mnasnet_a1")
    shapes = _shapes(model)
    kernels = Counter(
        shapes[node.input[1]][2]
        for node in model.graph.node
        if node.op_type == "Conv" and shapes[node.input[1]][1] == 1 and shapes[node.input[1]][2] > 1
    )
    assert kernels == {3: 10, 5: 6}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_not_degenerate(name: str) -> None:
    model = MODELS[name](batch=2, image_size=64)
    data = np.random.default_rng(3).standard_normal((2, 3, 64, 64), dtype=np.float32)
    first, second = _run(model, data)
    assert np.isfinite([first, second]).all()
    assert 0.05 < first.std() < 20
    assert np.abs(first - second).max() > 0.02 * first.std()


def test_statistics_of_batch_normalisation_are_not_trivial() -> None:
    model = MODELS["mobilenet_v2"](image_size=32)
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    node = next(node for node in model.graph.node if node.op_type == "BatchNormalization")
    gamma, beta, mean, variance = (weights[name] for name in node.input[1:])
    for values, trivial in ((gamma, 1), (beta, 0), (mean, 0), (variance, 1)):
        assert np.abs(values - trivial).min() > 0
        assert values.std() > 0.05
    assert variance.min() > 0.1


def test_seed_decides_the_weights() -> None:
    def serialized(seed: int) -> bytes:
        return MODELS["mobilenet_v1"](image_size=32, seed=seed).SerializeToString()

    assert serialized(1) == serialized(1)
    assert serialized(1) != serialized(2)


@pytest.mark.slow
def test_symbolic_batch() -> None:
    model = MODELS["resnet_18"](batch="images", image_size=32)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "images"
    data = np.ones((3, 3, 32, 32), np.float32)
    assert _run(model, data).shape == (3, 1000)


def test_builder_refuses_a_result_that_is_not_last() -> None:
    net = GraphBuilder("odd", (1, 3, 4, 4), 0)
    first = net.activation(net.input, "relu")
    net.activation(first, "relu6")
    with pytest.raises(ValueError, match="'relu_0' is not the last node's output"):
        net.finish(first, [1, 3, 4, 4])


def test_command_line(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "examples" / "models.py"
    output = tmp_path / "model.onnx"
    command = [sys.executable, str(script), "mobilenet_v1", "-o", str(output)]
    result = subprocess.run(
        [*command, "--batch", "n", "--image-size", "32"], capture_output=True, text=True, check=True
    )
    assert "model.onnx: 84 nodes" in result.stdout
    dims = onnx.load(output).graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["n", 3, 32, 32]
