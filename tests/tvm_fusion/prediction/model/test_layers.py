# SPDX-License-Identifier: Apache-2.0
"""Models of equal layers: what a few of them stand for is what the whole model has."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from tvm_fusion.errors import InvalidModelError, PredictionError
from tvm_fusion.prediction.model.ask import phase_shapes
from tvm_fusion.prediction.model.eager import EagerRun, lower_to_ranks
from tvm_fusion.prediction.model.layers import FEW, StaticModel, continued, find_layers
from tvm_fusion.prediction.model.lowered import LoweredOp

WIDTH, HEADS = 16, 4


class Stack:
    """A decoder of layers with keys of tokens before, grown node by node."""

    def __init__(self):
        self.nodes, self.weights, self.inputs, self.outputs = [], [], [], []
        self.random = np.random.default_rng(len(self.nodes))
        self.inputs.append(("ids", onnx.TensorProto.INT64, [1, "seq"]))
        self.weight("table", self.random.normal(size=(50, WIDTH)))
        self.x = self.op("Gather", "table", "ids")
        self.integers("merged", [0, 0, -1])
        self.integers("heads", [0, 0, HEADS, -1])
        self.weight("scale", np.array(0.5))

    def op(self, kind, *reads, **attributes):
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, reads, [name], **attributes))
        return name

    def weight(self, name, value):
        self.weights.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def integers(self, name, values):
        self.weights.append(numpy_helper.from_array(np.array(values), name))

    def linear(self, x, name, inner, outer):
        product = self.op("MatMul", x, self.weight(name, self.random.normal(size=(inner, outer))))
        return self.op("Add", product, self.weight(f"{name}.bias", self.random.normal(size=outer)))

    def heads(self, x, *perm):
        return self.op("Transpose", self.op("Reshape", x, "heads"), perm=perm)

    def layer(self, number, inner=32, activation="Relu", past="past"):
        gamma = self.weight(f"{number}.gamma", self.random.normal(size=WIDTH))
        beta = self.weight(f"{number}.beta", self.random.normal(size=WIDTH))
        normed = self.op("LayerNormalization", self.x, gamma, beta, axis=-1)
        query, key, value = (self.linear(normed, f"{number}.{x}", WIDTH, WIDTH) for x in "qkv")
        before, grown = f"{past}.{number}", f"present.{number}"
        shape = [1, HEADS, "past_len", WIDTH // HEADS]
        self.inputs.append((before, onnx.TensorProto.FLOAT, shape))
        key = self.heads(key, 0, 2, 1, 3)
        self.nodes.append(helper.make_node("Concat", [before, key], [grown], axis=2))
        self.outputs.append((grown, onnx.TensorProto.FLOAT, None))
        scores = self.op("MatMul", self.heads(query, 0, 2, 1, 3), self.turned(grown))
        weights = self.op("Softmax", self.op("Mul", scores, "scale"), axis=-1)
        mixed = self.op("MatMul", weights, grown)
        back = self.op("Reshape", self.op("Transpose", mixed, perm=[0, 2, 1, 3]), "merged")
        self.x = self.op("Add", self.x, self.op("Mul", back, value))
        wide = self.op(activation, self.linear(self.x, f"{number}.up", WIDTH, inner))
        self.x = self.op("Add", self.x, self.linear(wide, f"{number}.down", inner, WIDTH))

    def turned(self, key):
        return self.op("Transpose", key, perm=[0, 1, 3, 2])

    def model(self):
        self.outputs.append((self.linear(self.x, "head", WIDTH, 500), 1, None))
        ends = ([helper.make_tensor_value_info(*x) for x in y] for y in (self.inputs, self.outputs))
        graph = helper.make_graph(self.nodes, "g", *ends, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def stack(count, odd=-1, **change):
    net = Stack()
    for number in range(count):
        net.layer(number, **(change if number == odd else {}))
    return net.model()


def decode(graph):
    return phase_shapes(graph, "decode", 40)


def assert_same(model, shapes=decode, is_short=True):
    """A model is lowered as its whole graph is, of one rank and of several."""
    static = StaticModel(model, shapes)
    for ranks, fused in ((1, []), (1, ["float32"]), (2, ["float32"])):
        found = static.lower("gpu", ranks, fused)
        assert ("whole" in vars(static)) is not is_short
        whole = lower_to_ranks(StaticModel(model, shapes).whole.mod, "gpu", ranks, fused)
        assert found.ops == whole.ops
        assert found.weight_bytes == whole.weight_bytes
        assert found.activation_bytes == whole.activation_bytes


@settings(max_examples=4)
@given(st.integers(FEW + 4, 14))
def test_equal_layers(count):
    assert_same(stack(count))


def test_external_weights_are_not_read(tmp_path):
    path = tmp_path / "model.onnx"
    options = {"save_as_external_data": True, "size_threshold": 1, "location": "weights"}
    onnx.save(stack(10), path, **options)
    expected = StaticModel(path, decode).whole
    data = bytearray((tmp_path / "weights").read_bytes())
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.name == "table" or tensor.name.endswith((".up", ".q")):
            start, length = int(entries["offset"]), int(entries["length"])
            data[start : start + length] = length * b"\xff"
    (tmp_path / "weights").write_bytes(data)
    found = StaticModel(path, decode).lower("gpu", 1, [])
    assert found.ops == lower_to_ranks(expected.mod).ops


@pytest.mark.parametrize(
    "change", [{"inner": 48}, {"activation": "Tanh"}], ids=["width", "operator"]
)
@pytest.mark.parametrize("odd", [0, 5, 10])
def test_another_layer_among_them(odd, change):
    assert_same(stack(11, odd, **change), is_short=odd != 5)


def test_sizes_of_whole_inputs():
    sizes = {f"past.{n}": (1, HEADS, 7, WIDTH // HEADS) for n in range(10)} | {"seq": 1}
    assert_same(stack(10), sizes)


def test_a_mask_of_one_layer():
    model = stack(11)
    masked = next(node for node in model.graph.node[100:] if node.input[-1:] == ["scale"])
    masked.input[1] = "less"
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.25, np.float32), "less"))
    assert find_layers(stack(11).graph, {}).count == 11
    assert_same(model, is_short=False)


def test_all_layers_that_the_end_reads():
    model = stack(10)
    del model.graph.output[:-1]
    (logits,) = model.graph.output
    parts = [node.output[0] for node in model.graph.node if node.op_type == "LayerNormalization"]
    model.graph.node.append(helper.make_node("Sum", parts, ["sum"]))
    model.graph.output.append(
        helper.make_tensor_value_info("sum", logits.type.tensor_type.elem_type, None)
    )
    assert find_layers(model.graph, {}) is None
    assert_same(model, is_short=False)


def graph_of(nodes, weights, *inputs):
    """A model of float32 from nodes in the form ``(operator, *reads, result)``."""
    made = [helper.make_node(kind, reads, [result]) for kind, *reads, result in nodes]
    values = [helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs]
    end = helper.make_tensor_value_info(nodes[-1][-1], 1, None)
    arrays = [numpy_helper.from_array(np.asarray(a, np.float32), n) for n, a in weights.items()]
    graph = helper.make_graph(made, "g", values, [end], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_an_end_that_begins_as_a_layer():
    random = np.random.default_rng(0)
    weights = {"two": 2.0, "epsilon": 1e-5, "head": random.normal(size=(WIDTH, 64))}
    nodes, x = [], "x"

    def norm(at):
        nodes.append(("Pow", x, "two", f"{at}.square"))
        nodes.append(("ReduceMean", f"{at}.square", f"{at}.mean"))
        nodes.append(("Add", f"{at}.mean", "epsilon", f"{at}.moved"))
        nodes.append(("Sqrt", f"{at}.moved", f"{at}.root"))
        nodes.append(("Div", x, f"{at}.root", f"{at}.norm"))

    for at in range(20):
        weights[f"{at}.up"] = random.normal(size=(WIDTH, 64))
        weights[f"{at}.down"] = random.normal(size=(64, WIDTH))
        norm(at)
        nodes.append(("MatMul", f"{at}.norm", f"{at}.up", f"{at}.wide"))
        nodes.append(("Relu", f"{at}.wide", f"{at}.active"))
        nodes.append(("MatMul", f"{at}.active", f"{at}.down", f"{at}.narrow"))
        nodes.append(("Add", x, f"{at}.narrow", f"{at}.out"))
        x = f"{at}.out"
    norm("end")
    nodes.append(("MatMul", "end.norm", "head", "y"))
    model = graph_of(nodes, weights, ("x", (6, WIDTH)))
    short, whole = (StaticModel(model) for _ in range(2))
    found, expected = short.lower("gpu", 1, []), lower_to_ranks(whole.whole.mod)
    assert "whole" not in vars(short)
    assert found.ops == expected.ops
    assert found.activation_bytes == expected.activation_bytes


def test_layers_that_read_what_was_made_far_before():
    """The first layers read rows, all others whole matrices of layers before them."""
    far, weights = 5, {}
    nodes = [(kind, "row", f"before.{at}") for at, kind in enumerate(["Relu", "Tanh"] * 15)]
    for at in range(30):
        weights[f"w{at}"] = np.random.default_rng(at).normal(size=(WIDTH, WIDTH))
        earlier = f"{at - far}.out" if at >= far else f"before.{6 * at + 4}"
        nodes.append(("MatMul", f"{at - 1}.out" if at else "x", f"w{at}", f"{at}.product"))
        nodes.append(("Mul", earlier, earlier, f"{at}.square"))
        nodes.append(("Add", f"{at}.product", f"{at}.square", f"{at}.sum"))
        for kind, name in (("Relu", "a"), ("Abs", "b")):
            nodes.append((kind, nodes[-1][-1], f"{at}.{name}"))
        nodes.append(("Tanh", nodes[-1][-1], f"{at}.out"))
    model = graph_of(nodes, weights, ("x", (128, WIDTH)), ("row", (1, WIDTH)))
    found = StaticModel(model).lower("gpu", 1, [])
    expected = lower_to_ranks(StaticModel(model).whole.mod)
    assert found.ops == expected.ops
    assert found.activation_bytes == expected.activation_bytes


def test_an_end_that_reads_a_weight_of_the_last_layer():
    weights = {f"w{at}": np.random.default_rng(at).normal(size=(WIDTH, WIDTH)) for at in range(40)}
    nodes = []
    for at in range(40):
        nodes.append(("MatMul", f"{at - 1}.out" if at else "x", f"w{at}", f"{at}.product"))
        for kind, name in (("Relu", "a"), ("Abs", "b"), ("Tanh", "out")):
            nodes.append((kind, nodes[-1][-1], f"{at}.{name}"))
    nodes.append(("MatMul", "39.out", "w39", "y"))
    model = graph_of(nodes, weights, ("x", (4, WIDTH)))
    found = StaticModel(model).lower("gpu", 1, [])
    assert found.weight_bytes == lower_to_ranks(StaticModel(model).whole.mod).weight_bytes


def test_a_gather_without_inputs_is_refused():
    model = stack(10)
    model.graph.node.append(helper.make_node("Gather", [], ["nothing"]))
    with pytest.raises(InvalidModelError, match="Gather"):
        StaticModel(model, decode).lower("gpu", 1, [])


def test_memory_of_the_first_or_of_the_last_layers():
    """Most is held in the first layer of few, and in the last one of many."""
    ops = [LoweredOp(f"op{n}") for n in (0, 1, 1, 1, 2)]
    few = EagerRun(ops, 10.0, (0, 90, 30, 31, 32, 20))
    more = EagerRun([*ops[:4], *ops[3:]], 14.0, (0, 91, 33, 34, 35, 36, 24))
    for times, peak in ((1, 91), (10, 100), (30, 32 + 4 * 30)):
        found = continued(few, more, times)
        assert (len(found.ops), found.weight_bytes) == (5 + times, 10 + 4 * times)
        assert found.activation_bytes == peak
    assert continued(few, EagerRun([*ops, ops[0]], 14.0, more.held), 3) is None
    assert continued(more, few, 3) is None


def test_errors_are_those_of_the_whole_model():
    with pytest.raises(InvalidModelError, match="has no size"):
        StaticModel(stack(10)).lower("gpu", 1, [])
    with pytest.raises(PredictionError, match="phase is 'train'"):
        StaticModel(stack(10), lambda graph: phase_shapes(graph, "train", 4)).lower("gpu", 1, [])
    with pytest.raises(InvalidModelError, match="not ONNX"):
        StaticModel(b"no model").lower("gpu", 1, [])
