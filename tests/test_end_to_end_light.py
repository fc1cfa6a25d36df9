# SPDX-License-Identifier: Apache-2.0
"""The classification models that onnx ships, as they are and with weights that tell apart.

Their weights are nodes that make constant tensors, so that every class gets the same number; that
shows only that a model compiles. With random weights in their place the numbers mean something.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import numpy_helper
from onnx_reference import assert_same, random_feed, run_onnx
from tvm import tirx

import tvm_fusion

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
PATHS = {path.stem.removeprefix("light_"): path for path in sorted(FOLDER.glob("*.onnx"))}


def draw(name: str, shape: list[int], role: tuple[str, int], generator: np.random.Generator):
    """A tensor fit for the input number ``role[1]`` of an operator ``role[0]``."""
    values = generator.standard_normal(shape, dtype=np.float32)
    operator, place = role
    if operator in ("Conv", "Gemm") and place == 1:
        return values * np.float32(math.sqrt(2 / math.prod(shape[1:])))
    if operator == "BatchNormalization":
        return 1 + np.abs(values) / 4 if place in (1, 4) else values / 32
    return 1 + values / 8 if operator == "Mul" else values / 32


def with_random_weights(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """Replace each float tensor that a ConstantOfShape makes by a random initialiser."""
    generator = np.random.default_rng(seed)
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    roles = {
        tensor: (node.op_type, place)
        for node in model.graph.node
        for place, tensor in enumerate(node.input)
    }
    for node in list(model.graph.node):
        if node.op_type == "Unsqueeze" and node.output[0] in roles:
            roles[node.input[0]] = roles[node.output[0]]
    for node in list(model.graph.node):
        if node.op_type == "ConstantOfShape":
            shape = [int(extent) for extent in stored[node.input[0]]]
            name = node.output[0]
            values = draw(name, shape, roles.get(name, ("", 0)), generator)
            model.graph.initializer.append(numpy_helper.from_array(values, name))
            model.graph.node.remove(node)
    return model


def without_softmax(model: onnx.ModelProto) -> onnx.ModelProto:
    """End before the last Softmax, which makes 0 and 1 of scores as large as random ones are."""
    last = model.graph.node[-1]
    if last.op_type == "Softmax":
        model.graph.node.remove(last)
        model.graph.node[-1].output[0] = last.output[0]
    return model


def bright_feed(model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    """Random images of different brightness: noise alone is averaged away by pooling."""
    feed = random_feed(model, seed)
    offsets = np.random.default_rng(seed).standard_normal((3, 1, 1), dtype=np.float32)
    return {name: values + 2 * offsets for name, values in feed.items()}


def test_there_are_models() -> None:
    known = {"bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50"}
    assert known | {"shufflenet", "squeezenet", "vgg19", "zfnet512"} <= set(PATHS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
def test_model_as_it_is(name: str, optimised: list[tvm.IRModule]) -> None:
    """The numbers are right, and every kernel finds a rule."""
    model = onnx.load(PATHS[name])
    feed = random_feed(model, 0)
    stored = onnx.load_tensor(PATHS[name].with_name(f"{PATHS[name].stem}_output_0.pb"))
    actual = tvm_fusion.compile(PATHS[name])(**feed)
    assert_same(actual, run_onnx(model, feed))
    assert_same(actual, [numpy_helper.to_array(stored)])
    [mod] = optimised
    kernels = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    assert len(kernels) > 10
    assert all(func.attrs.get("tirx.is_scheduled") for func in kernels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["squeezenet"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in PATHS if name != "squeezenet"],
)
def test_model_with_random_weights(name: str) -> None:
    model = without_softmax(with_random_weights(onnx.load(PATHS[name]), 1))
    feeds = [bright_feed(model, seed) for seed in range(2)]
    expected = [run_onnx(model, feed) for feed in feeds]
    difference = np.abs(expected[0][0] - expected[1][0]).max()
    assert difference > 0.01 * np.abs(expected[0][0]).max()
    compiled = tvm_fusion.compile(model)
    for feed, reference in zip(feeds, expected, strict=True):
        assert_same(compiled(**feed), reference)
