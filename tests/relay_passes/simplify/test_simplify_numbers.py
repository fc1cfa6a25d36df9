# SPDX-License-Identifier: Apache-2.0
"""SimplifyInference keeps the numbers of random ONNX chains around convolutions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from simplify_checks import calls, onnx_model, simplify
from tvm.relax.frontend.onnx import from_onnx

EXTENTS = (5, 6)


@dataclass
class Chain:
    """Nodes that each read the one before, their weights, and the shape of the last tensor."""

    rng: np.random.Generator
    channels: int
    height: int = EXTENTS[0]
    width: int = EXTENTS[1]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    last: str = "x"

    def weight(self, *shape, low=-1.0, high=1.0):
        name = f"w{len(self.weights)}"
        self.weights[name] = self.rng.uniform(low, high, shape).astype("float32")
        return name

    def value(self, *numbers, dtype="float32"):
        name = f"w{len(self.weights)}"
        self.weights[name] = np.array(numbers if len(numbers) > 1 else numbers[0], dtype)
        return name

    def append(self, op_type, *inputs, **attributes):
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [output], **attributes))
        self.last = output

    def per_channel(self, draw, **limits):
        """A constant of one number, or of one a channel."""
        shapes = [(), (1,), (1, 1, 1), (self.channels, 1, 1), (1, self.channels, 1, 1)]
        return self.weight(*draw(st.sampled_from(shapes)), **limits)


def conv(chain, draw):
    groups = draw(st.sampled_from([g for g in (1, 2, 3, chain.channels) if not chain.channels % g]))
    outputs = groups * draw(st.integers(1, 3))
    kernel = [draw(st.integers(1, min(3, e))) for e in (chain.height, chain.width)]
    pads = [draw(st.integers(0, 2)) for _ in range(4)] if draw(st.booleans()) else [0] * 4
    inputs = [chain.weight(outputs, chain.channels // groups, *kernel)]
    inputs += [chain.weight(outputs)] if draw(st.booleans()) else []
    chain.append("Conv", chain.last, *inputs, pads=pads, group=groups)
    chain.channels = outputs
    chain.height += pads[0] + pads[2] - kernel[0] + 1
    chain.width += pads[1] + pads[3] - kernel[1] + 1


def batch_norm(chain, draw):
    names = [chain.weight(chain.channels) for _ in range(3)]
    var = chain.weight(chain.channels, low=0.3, high=2.0)
    epsilon = draw(st.sampled_from([1e-5, 1e-3, 0.1]))
    chain.append("BatchNormalization", chain.last, *names, var, epsilon=epsilon)


def add(chain, draw):
    operands = [chain.last, chain.per_channel(draw)]
    chain.append(draw(st.sampled_from(["Add", "Sub"])), *draw(st.permutations(operands)))


def multiply(chain, draw):
    chain.append("Mul", *draw(st.permutations([chain.last, chain.per_channel(draw)])))


def divide(chain, draw):
    chain.append("Div", chain.last, chain.per_channel(draw, low=0.5))


def pad(chain, draw):
    top, left, bottom, right = (draw(st.integers(0, 2)) for _ in range(4))
    pads = chain.value(0, 0, top, left, 0, 0, bottom, right, dtype="int64")
    value = chain.value(draw(st.sampled_from([0.0, 1.0])))
    chain.append("Pad", chain.last, pads, value)
    chain.height, chain.width = chain.height + top + bottom, chain.width + left + right


def residual(chain, draw):
    shortcut = chain.last
    draw(st.sampled_from([batch_norm, multiply, convolve_within]))(chain, draw)
    operands = draw(st.permutations([shortcut, chain.last]))
    chain.append(draw(st.sampled_from(["Add", "Sum"])), *operands)


def convolve_within(chain, draw):
    inputs = [chain.weight(chain.channels, chain.channels, 1, 1)]
    inputs += [chain.weight(chain.channels)] if draw(st.booleans()) else []
    chain.append("Conv", chain.last, *inputs)


def activation(chain, draw):
    kind = draw(st.sampled_from(["Relu", "Clip", "HardSwish", "Swish", "Max", "Dropout"]))
    data = chain.last
    if kind == "Clip":
        low, high = sorted(draw(st.floats(-1, 1, width=32)) for _ in range(2))
        chain.append("Clip", data, chain.value(low), chain.value(high))
    elif kind == "Max":
        chain.append("Max", chain.value(0.0), data)
        chain.append("Min", chain.last, chain.value(0.5))
    elif kind == "Swish":
        chain.append("Sigmoid", data)
        chain.append("Mul", data, chain.last)
    else:
        chain.append(kind, data)


@st.composite
def chains(draw):
    """A convolution with anything before and behind it, as an ONNX model."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    channels = draw(st.integers(1, 6))
    chain = Chain(rng, channels)
    before = [batch_norm, add, multiply, pad, conv]
    behind = [batch_norm, add, multiply, divide, residual, activation, conv]
    for step in draw(st.lists(st.sampled_from(before), max_size=2)):
        step(chain, draw)
    conv(chain, draw)
    for step in draw(st.lists(st.sampled_from(behind), min_size=1, max_size=4)):
        step(chain, draw)
    chain.append("Identity", chain.last)
    chain.nodes[-1].output[0] = "y"
    batch = draw(st.integers(1, 2))
    shape = (batch, channels, *EXTENTS)
    return onnx_model(chain.nodes, chain.weights, {"x": shape}), rng.normal(size=shape)


@settings(max_examples=settings.default.max_examples // 4)
@given(chains())
def test_random_chains(run_module, drawn):
    model, values = drawn
    data = values.astype("float32")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    expected = session.run(None, {"x": data})[0]
    mod = simplify(from_onnx(model))
    assert not {"nn.batch_norm", "nn.dropout", "stack"} & set(calls(mod))
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(run_module(mod, data) / scale, expected / scale, atol=1e-5)
