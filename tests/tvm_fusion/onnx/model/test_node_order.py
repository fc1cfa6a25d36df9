# SPDX-License-Identifier: Apache-2.0
"""Nodes in any order become nodes in the right one; circles are errors."""

from __future__ import annotations

import random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_cases import assert_same_as_onnx_runtime, onnx_model

from tvm_fusion.errors import InvalidModelError
from tvm_fusion.onnx.frontend import import_onnx
from tvm_fusion.onnx.model.graph_edits import sort_nodes


def test_shuffled_nodes() -> None:
    generator = random.Random(0)
    names = ["x"]
    nodes = []
    for number in range(200):
        inputs = generator.choices(names, k=2)
        names.append(f"t{number}")
        nodes.append(helper.make_node("Add", inputs, [names[-1]]))
    generator.shuffle(nodes)
    graph = helper.make_graph(nodes, "shuffled", [], [])
    sort_nodes(graph)
    known = {"x"}
    for node in graph.node:
        assert known.issuperset(node.input)
        known.update(node.output)


def test_nodes_in_order_stay() -> None:
    nodes = [helper.make_node("Neg", ["x"], ["b"]), helper.make_node("Neg", ["x"], ["a"])]
    graph = helper.make_graph(nodes, "ordered", [], [])
    sort_nodes(graph)
    assert [node.output[0] for node in graph.node] == ["b", "a"]


def test_unsorted_model_with_branches() -> None:
    """The branch reads a tensor of the graph around it, whose node comes later."""
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(op_type, ["late"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, (3,))],
        )
        for name, op_type in (("then", "Relu"), ("else", "Neg"))
    }
    nodes = [
        helper.make_node("If", ["flag"], ["y"], **branches),
        helper.make_node("Greater", ["sum", "zero"], ["flag"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Exp", ["x"], ["late"]),
    ]
    model = onnx_model(nodes, {"x": (3,)}, ["y"], {"zero": np.array(0, np.float32)})
    for sign in (1, -1):
        assert_same_as_onnx_runtime(model, {"x": sign * np.ones(3, np.float32)})


def test_circle() -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Neg", ["a"], ["b"])]
    model = onnx_model(nodes, {"x": (3,)}, ["b"])
    with pytest.raises(InvalidModelError, match="reads its own result; expected a graph without"):
        import_onnx(model)


def test_wrong_shape_of_an_output() -> None:
    model = onnx_model([helper.make_node("Relu", ["x"], ["y"])], {"x": (3,)}, ["y"])
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", 1, (7,)))
    assert import_onnx(model).outputs[0].shape == (3,)
