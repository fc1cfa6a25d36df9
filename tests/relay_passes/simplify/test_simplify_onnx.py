# SPDX-License-Identifier: Apache-2.0
"""SimplifyInference on what TVM's ONNX importer makes of single operators and of whole networks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.backend.test import data as onnx_test_data
from simplify_checks import calls, dyadic, onnx_model, simplify
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax.frontend.onnx import from_onnx

from examples import models

LIGHT = Path(next(iter(onnx_test_data.__path__))) / "light"
SHAPE = (1, 4, 6, 6)
NORM = {f"norm.{name}": np.abs(dyadic(4, seed=seed)) + 1 for seed, name in enumerate("sbmv")}
WEIGHT = dyadic(4, 4, 3, 3)


def node(op_type, inputs, outputs="y", **attributes):
    """A node of inputs and outputs given as words of one string; a dash is no input."""
    names = [name.replace("-", "") for name in inputs.split()]
    return helper.make_node(op_type, names, outputs.split(), **attributes)


def simplified(nodes, weights=None, opset=17, shape=SHAPE):
    return simplify(from_onnx(onnx_model(nodes, weights or {}, {"x": shape}, opset)))


def scalars(**values):
    return {name: np.array(value, "float32") for name, value in values.items()}


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"min": 0.0, "max": 6.0}, ["clip"]),
        ({"min": 0.0}, ["nn.relu"]),
        ({"max": 6.0}, ["clip"]),
        ({}, []),
    ],
)
def test_clip_with_attributes(attributes, expected):
    assert calls(simplified([node("Clip", "x", **attributes)], opset=6)) == expected


@pytest.mark.parametrize("opset", [11, 13, 17])
@pytest.mark.parametrize(
    ("inputs", "bounds", "expected"),
    [
        ("x low high", {"low": 0, "high": 6}, "R.clip(x, 0, 6)"),
        ("x low high", {"low": -1, "high": 0.5}, "R.clip(x, -1, T.float64(0.5))"),
        ("x low", {"low": 0}, "R.nn.relu(x)"),
        ("x - high", {"high": 6}, 'R.clip(x, T.float64("-inf"), 6)'),
        ("x low high", {"low": np.nan, "high": 6}, 'R.clip(x, T.float64("-inf"), 6)'),
    ],
)
def test_clip_with_inputs(opset, inputs, bounds, expected):
    mod = simplified([node("Clip", inputs)], scalars(**bounds), opset)
    (binding,) = mod["main"].body.blocks[0].bindings
    assert str(binding.value) == expected
    assert len(mod.functions) == 1


def test_clip_with_bounds_that_are_inputs_stays():
    model = onnx_model([node("Clip", "x low")], {}, {"x": SHAPE, "low": ()}, 17)
    assert "call_tir" in calls(simplify(from_onnx(model)))


def test_symbolic_shapes():
    nodes = [
        node("Pad", "x pads", "padded"),
        node("Conv", "padded w", "conv", strides=[2, 2]),
        node("BatchNormalization", "conv norm.s norm.b norm.m norm.v", "norm"),
        node("Clip", "norm low high"),
    ]
    pads = np.array([0, 0, 1, 0, 0, 0, 1, 3])
    weights = {"pads": pads, "w": WEIGHT, **NORM, **scalars(low=0, high=6)}
    mod = simplified(nodes, weights, shape=("n", 4, "h", 8))
    assert calls(mod) == ["nn.conv2d", "add", "clip"]
    assert len(mod.functions) == 1


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_automatic_padding_joins_the_convolution(auto_pad, kernel):
    nodes = [node("Conv", "x w", auto_pad=auto_pad)]
    mod = simplified(nodes, {"w": dyadic(4, 4, kernel, kernel)})
    assert calls(mod) == ["nn.conv2d"]
    (binding,) = mod["main"].body.blocks[0].bindings
    total = 0 if auto_pad == "VALID" else kernel - 1
    few, many = total // 2, total - total // 2
    upper = [few, few, many, many]
    expected = upper if auto_pad == "SAME_UPPER" else [many, many, few, few]
    assert list(binding.value.attrs.padding) == expected


def test_every_piece_around_a_convolution():
    nodes = [
        node("Pad", "x pads", "padded"),
        node("Conv", "padded w b", "conv"),
        node("BatchNormalization", "conv norm.s norm.b norm.m norm.v", "norm"),
        node("Dropout", "norm", "dropped"),
        node("Identity", "dropped", "same"),
        node("Sum", "x same", "sum"),
        node("Max", "sum low", "max"),
        node("Min", "max high"),
    ]
    weights = {"pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "w": WEIGHT, "b": dyadic(4)}
    mod = simplified(nodes, {**weights, **NORM, **scalars(low=0, high=6)})
    assert calls(mod) == ["nn.conv2d", "add", "add", "clip"]
    assert_normal_form(mod)


@pytest.mark.parametrize(
    "nodes",
    [
        [node("HardSwish", "x")],
        [node("HardSigmoid", "x", "g", alpha=1 / 6, beta=0.5), node("Mul", "g x")],
    ],
)
def test_hardswish(nodes):
    assert calls(simplified(nodes)) == ["tvm_fusion.hardswish"]


def test_silu():
    assert calls(simplified([node("Sigmoid", "x", "g"), node("Mul", "x g")])) == ["nn.silu"]


def assert_normal_form(mod):
    """Check what the later passes rely on, at every convolution and every addition."""
    bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
    values = {binding.var: binding.value for binding in bindings}
    readers = {var: 0 for var in values}
    for value in [*values.values(), mod["main"].body.body]:
        for var in relax.analysis.free_vars(value):
            if var in readers:
                readers[var] += 1

    def name(expr):
        value = values.get(expr) if isinstance(expr, relax.Var) else None
        return value.op.name if isinstance(value, relax.Call) else None

    def is_chain(expr):
        if name(expr) == "relax.add" and isinstance(values[expr].args[1], GenericConst):
            return readers[expr] == 1 and is_chain(values[expr].args[0])
        return name(expr) == "relax.nn.conv2d" and readers[expr] == 1

    for value in values.values():
        if not isinstance(value, relax.Call):
            continue
        if value.op.name == "relax.add" and is_chain(value.args[0]):
            if isinstance(value.args[1], GenericConst):
                channels = int(value.ty.shape.values[1])
                assert [int(e) for e in value.args[1].ty.shape] == [1, channels, 1, 1]
                assert name(value.args[0]) == "relax.nn.conv2d"
        elif value.op.name == "relax.add":
            assert not isinstance(value.args[0], GenericConst)
            assert not is_chain(value.args[1])
        elif value.op.name in ("relax.multiply", "relax.divide", "relax.subtract"):
            assert not (is_chain(value.args[0]) and isinstance(value.args[1], GenericConst))


POOL = {"mean", "nn.max_pool2d", "nn.avg_pool2d"}
CLASSIFIER = {"reshape", "matmul", "nn.softmax"}
CONV = {"nn.conv2d", "add", "nn.relu"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "convolutions", "ops"),
    [
        pytest.param(
            models.mobilenet_v1, 27, CONV | {"mean", "reshape", "matmul"}, marks=pytest.mark.slow
        ),
        (models.mobilenet_v2, 52, {"nn.conv2d", "add", "clip", "mean", "reshape", "matmul"}),
        pytest.param(
            models.mnasnet_a1,
            65,
            CONV | {"mean", "reshape", "matmul", "sigmoid", "multiply"},
            marks=pytest.mark.slow,
        ),
        (models.resnet_18, 20, CONV | {"nn.max_pool2d", "mean", "reshape", "matmul"}),
        pytest.param(
            models.resnet_50,
            53,
            CONV | {"nn.max_pool2d", "mean", "reshape", "matmul"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_networks(build, convolutions, ops):
    mod = simplify(from_onnx(build(batch="n", image_size=64)))
    assert calls(mod).count("nn.conv2d") == convolutions
    assert set(calls(mod)) == ops
    assert len(mod.functions) == 1
    assert_normal_form(mod)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "convolutions", "ops"),
    [
        ("squeezenet", 26, CONV | POOL | CLASSIFIER | {"concat"}),
        ("shufflenet", 49, CONV | POOL | CLASSIFIER | {"concat", "tvm_fusion.channel_shuffle"}),
        pytest.param(
            "densenet121",
            121,
            CONV | POOL | CLASSIFIER | {"concat", "multiply"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_networks_of_the_onnx_package(network, convolutions, ops):
    mod = simplify(from_onnx(onnx.load(LIGHT / f"light_{network}.onnx")))
    assert calls(mod).count("nn.conv2d") == convolutions
    assert set(calls(mod)) <= ops
    assert_normal_form(mod)
