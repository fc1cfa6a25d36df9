# SPDX-License-Identifier: Apache-2.0
"""Models with the flaws that exporters and converters leave, and that ONNX Runtime runs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_cases import assert_same_as_onnx_runtime, normal, onnx_model, run_relax

from tvm_fusion.onnx.frontend import import_onnx


def dense() -> onnx.ModelProto:
    """Two products with a Relu between them."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "second"),
        helper.make_node("MatMul", ["b", "v"], ["y"], "third"),
    ]
    constants = {"w": normal(4, 6), "v": normal(6, 3, seed=2)}
    return onnx_model(nodes, {"x": (2, 4)}, ["y"], constants)


def test_shapes_of_tensors_in_between_that_are_wrong() -> None:
    """ONNX Runtime only warns of them."""
    model = dense()
    model.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, (2, 600)))
    model.graph.value_info.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, (1, 9)))
    assert_same_as_onnx_runtime(model)


def test_nodes_of_one_name_or_of_none() -> None:
    """ONNX Runtime refuses the former."""
    model, feed = dense(), normal(2, 4)
    wanted = run_relax(import_onnx(model), [feed])
    for name in ("same", ""):
        for node in model.graph.node:
            node.name = name
        np.testing.assert_array_equal(run_relax(import_onnx(model), [feed]), wanted)


@pytest.mark.parametrize("version", range(3, 14))
def test_versions_of_the_format(version: int) -> None:
    model = dense()
    model.ir_version = version
    if version == 3:  # lists its weights as inputs
        for tensor in model.graph.initializer:
            info = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            model.graph.input.append(info)
    imported = import_onnx(model)
    assert [spec.name for spec in imported.inputs] == ["x"]
    assert imported.outputs[0].shape == (2, 3)


def test_missing_inputs_in_the_middle_and_at_the_end() -> None:
    nodes = [
        helper.make_node("Clip", ["x", "", "high"], ["a"]),
        helper.make_node("Conv", ["a", "w", ""], ["b"]),
        helper.make_node("Resize", ["b", "", "", "sizes"], ["c"]),
        helper.make_node("Dropout", ["c", "", ""], ["y"]),
    ]
    constants = {
        "high": np.array(0.5, np.float32),
        "w": normal(2, 3, 2, 2),
        "sizes": np.array([1, 2, 8, 8]),
    }
    assert_same_as_onnx_runtime(onnx_model(nodes, {"x": (1, 3, 5, 5)}, ["y"], constants))


def test_halves_whose_old_types_are_still_declared() -> None:
    """A converter to float16 casts inputs and outputs, and leaves the old ``value_info``."""
    model = dense()
    graph = model.graph
    for tensor in graph.initializer:
        half = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    graph.node[0].input[0] = "x_half"
    graph.node[2].output[0] = "y_half"
    graph.node.insert(0, helper.make_node("Cast", ["x"], ["x_half"], to=TensorProto.FLOAT16))
    graph.node.append(helper.make_node("Cast", ["y_half"], ["y"], to=TensorProto.FLOAT))
    for name, shape in (("x_half", (2, 4)), ("a", (2, 6)), ("b", (2, 6)), ("y_half", (2, 3))):
        graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    feed = normal(2, 4)
    (found,) = run_relax(import_onnx(model), [feed])
    weights = [numpy_helper.to_array(tensor).astype("float64") for tensor in graph.initializer]
    wanted = np.maximum(feed.astype("float16") @ weights[0], 0) @ weights[1]
    np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-2)


def test_an_output_that_is_an_input_and_one_that_is_a_weight() -> None:
    nodes = [
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Identity", ["w"], ["weight"]),
        helper.make_node("Relu", ["x"], ["y"]),
    ]
    model = onnx_model(nodes, {"x": (2, 3)}, ["same", "weight", "y"], {"w": normal(4)})
    assert_same_as_onnx_runtime(model)


def test_outputs_without_a_type_and_graphs_without_a_name() -> None:
    model = dense()
    model.graph.output[0].ClearField("type")
    model.graph.ClearField("name")
    assert_same_as_onnx_runtime(model)
    assert [(spec.dtype, spec.shape) for spec in import_onnx(model).outputs] == [
        ("float32", (2, 3))
    ]


def test_the_long_form_of_the_default_domain() -> None:
    model = dense()
    model.graph.node[1].domain = "ai.onnx"
    assert_same_as_onnx_runtime(model)
