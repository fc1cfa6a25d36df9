# SPDX-License-Identifier: Apache-2.0
"""Kernels of eager PyTorch: of small models, counted by hand."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from examples.decoders import STEPS
from examples.transformers import bert_base
from tvm_fusion.onnx.frontend import import_onnx
from tvm_fusion.prediction.model.eager import lower_to_eager, lower_to_ranks


def lowered(nodes, inputs, outputs, constants=(), kind="gpu"):
    float_ = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, float_, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, float_, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in dict(constants).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    return lower_to_eager(import_onnx(model).mod, kind)


def kernels(ops):
    return [(op.name, [kernel.call.op for kernel in op.kernels]) for op in ops]


def ones(*shape):
    return np.ones(shape, np.float32)


def test_a_linear_layer_takes_its_bias_along():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["s"]),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    ops = lowered(nodes, {"x": [4, 6]}, {"y": [4, 8]}, {"w": ones(6, 8), "b": 2 * ones(8)})
    assert kernels(ops) == [("aten::linear", ["gemm"]), ("aten::relu", ["relu"])]
    gemm, relu = (op.kernels[0].call for op in ops)
    assert dict(gemm.sizes) == {"B": 1, "M": 4, "N": 8, "K": 6}
    assert gemm.flops == 2 * 4 * 8 * 6
    assert (gemm.read_bytes, gemm.written_bytes) == (4 * (24 + 48), 4 * 32)
    assert (relu.flops, relu.read_bytes, relu.written_bytes) == (32, 128, 128)


def test_a_convolution_adds_its_bias_in_a_kernel_of_its_own():
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], strides=[2, 2], pads=[1] * 4)
    constants = {"w": ones(8, 3, 3, 3), "b": np.arange(8, dtype=np.float32)}
    (op,) = lowered([node], {"x": [2, 3, 8, 8]}, {"y": [2, 8, 4, 4]}, constants)
    assert op.name == "aten::conv2d"
    convolution, bias = (kernel.call for kernel in op.kernels)
    want = {"B": 2, "IC": 3, "OC": 8, "H": 8, "W": 8, "FH": 3, "FW": 3, "OH": 4, "OW": 4}
    assert dict(convolution.sizes) == want | {"groups": 1}
    assert convolution.flops == 2 * (2 * 8 * 4 * 4) * 27
    assert convolution.read_bytes == 4 * (2 * 3 * 64 + 8 * 27)
    assert (bias.op, bias.read_bytes, bias.written_bytes) == ("add", 4 * (256 + 8), 4 * 256)
    (op,) = lowered([node], {"x": [2, 3, 8, 8]}, {"y": [2, 8, 4, 4]}, constants, "cpu")
    assert [kernel.call.op for kernel in op.kernels] == ["conv2d"]


def test_a_clip_is_one_kernel():
    node = helper.make_node("Clip", ["x", "low", "high"], ["y"])
    bounds = {"low": np.float32(0), "high": np.float32(6)}
    bounds = {name: np.array(bound) for name, bound in bounds.items()}
    assert kernels(lowered([node], {"x": [4]}, {"y": [4]}, bounds)) == [("aten::clip", ["clip"])]


def test_a_slice_is_a_view():
    bounds = {"begin": [1, 0], "end": [3, 6]}
    constants = {name: np.array(at, np.int64) for name, at in bounds.items()}
    nodes = [
        helper.make_node("Slice", ["x", "begin", "end"], ["part"]),
        helper.make_node("Relu", ["part"], ["y"]),
    ]
    ops = lowered(nodes, {"x": [4, 8]}, {"y": [2, 6]}, constants)
    assert kernels(ops) == [("aten::slice", []), ("aten::relu", ["relu"])]


def test_a_gelu_that_is_written_out_is_one_kernel():
    nodes = [
        helper.make_node("Div", ["x", "root"], ["a"]),
        helper.make_node("Erf", ["a"], ["e"]),
        helper.make_node("Add", ["e", "one"], ["f"]),
        helper.make_node("Mul", ["x", "f"], ["g"]),
        helper.make_node("Mul", ["g", "half"], ["y"]),
    ]
    numbers = {"root": 2**0.5, "one": 1.0, "half": 0.5}
    constants = {name: np.array(value, np.float32) for name, value in numbers.items()}
    assert kernels(lowered(nodes, {"x": [4, 6]}, {"y": [4, 6]}, constants)) == [
        ("aten::gelu", ["gelu"])
    ]


def test_a_layer_norm_that_is_written_out_is_one_kernel():
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[-1]),
        helper.make_node("Sub", ["x", "m"], ["c"]),
        helper.make_node("Pow", ["c", "two"], ["p"]),
        helper.make_node("ReduceMean", ["p"], ["v"], axes=[-1]),
        helper.make_node("Add", ["v", "e"], ["s"]),
        helper.make_node("Sqrt", ["s"], ["r"]),
        helper.make_node("Div", ["c", "r"], ["n"]),
        helper.make_node("Mul", ["n", "g"], ["k"]),
        helper.make_node("Add", ["k", "b"], ["y"]),
    ]
    constants = {
        **{"two": np.array(2, np.float32), "e": np.array(1e-5, np.float32)},
        **{"g": 2 * ones(6), "b": 3 * ones(6)},
    }
    (op,) = lowered(nodes, {"x": [4, 6]}, {"y": [4, 6]}, constants)
    assert (op.name, dict(op.kernels[0].call.sizes)) == ("aten::layer_norm", {"B": 4, "H": 6})


def test_a_transpose_is_a_view_until_its_rows_are_merged():
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        helper.make_node("Relu", ["t"], ["r"]),
        helper.make_node("Transpose", ["r"], ["u"], perm=[0, 2, 1]),
        helper.make_node("Reshape", ["u", "shape"], ["y"]),
    ]
    constants = {"shape": np.array([2, 20], np.int64)}
    ops = lowered(nodes, {"x": [2, 4, 5]}, {"y": [2, 20]}, constants)
    assert kernels(ops) == [
        ("aten::permute", []),
        ("aten::relu", ["relu"]),
        ("aten::permute", []),
        ("aten::contiguous", ["copy"]),
        ("aten::reshape", []),
    ]


def test_rows_of_a_table_are_read_and_not_the_table():
    node = helper.make_node("Gather", ["table", "rows"], ["y"])
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("rows", onnx.TensorProto.INT64, [7])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [7, 16])],
        [numpy_helper.from_array(ones(1000, 16), "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    ((op),) = lower_to_eager(import_onnx(model).mod)
    call = op.kernels[0].call
    assert (op.name, call.op, dict(call.sizes)) == (
        "aten::embedding",
        "gather",
        {"E": 1000, "L": 7, "D": 16},
    )
    assert (call.read_bytes, call.written_bytes) == (7 * 16 * 4 + 7 * 8, 7 * 16 * 4)


def test_a_layer_of_bert():
    model = bert_base(layers=1, width=32, heads=2, sequence=8, vocabulary=50)
    ops = lower_to_eager(import_onnx(model).mod)
    names = [op.name for op in ops]
    assert {name: names.count(f"aten::{name}") for name in ("linear", "matmul", "softmax")} == {
        **{"linear": 7, "matmul": 2, "softmax": 1}
    }
    assert (names.count("aten::layer_norm"), names.count("aten::gelu")) == (3, 1)
    assert names.count("aten::embedding") == 2 and "aten::erf" not in names
    # The context is merged back from its heads; queries and keys of one sequence are views.
    assert names.count("aten::contiguous") == 1


def on_ranks(ranks, nodes, inputs, outputs, constants):
    float_ = onnx.TensorProto.FLOAT
    inputs, outputs = (
        [helper.make_tensor_value_info(name, float_, shape) for name, shape in each.items()]
        for each in (inputs, outputs)
    )
    weights = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    return lower_to_ranks(import_onnx(model).mod, "gpu", ranks)


def perceptron(ranks, hidden=32):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["s"]),
        helper.make_node("Add", ["s", "x"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    w, v = (rng.normal(size=shape).astype(np.float32) for shape in ((6, hidden), (hidden, 6)))
    return on_ranks(ranks, nodes, {"x": [4, 6]}, {"y": [4, 6]}, {"w": w, "v": v})


def test_a_perceptron_is_shared_out_by_columns_and_then_by_rows():
    run = perceptron(4)
    names = ["aten::linear", "aten::relu", "aten::linear", "c10d::all_reduce", "aten::add"]
    assert [op.name for op in run.ops] == names
    first, relu, second, reduce, add = (op.kernels[0].call for op in run.ops)
    assert dict(first.sizes) == {"B": 1, "M": 4, "N": 8, "K": 6}
    assert relu.read_bytes == relu.written_bytes == 4 * 4 * 8
    assert dict(second.sizes) == {"B": 1, "M": 4, "N": 6, "K": 8}
    assert (dict(reduce.sizes), reduce.read_bytes) == ({"ranks": 4}, 4 * 4 * 6)
    assert add.read_bytes == 2 * 4 * 4 * 6
    # x, h and r: two shares of 4 x 32 beside 4 x 6.
    assert run.weight_bytes == 4 * 2 * 6 * 8
    assert run.activation_bytes == 4 * (4 * 6 + 2 * 4 * 8)
    alone = perceptron(1)
    assert alone.weight_bytes == 4 * 2 * 6 * 32
    assert alone.activation_bytes == 4 * (4 * 6 + 2 * 4 * 32)


def test_layers_that_cannot_be_divided_are_on_every_rank():
    run = perceptron(4, hidden=30)
    assert not any(op.name.startswith("c10d") for op in run.ops)
    assert run.weight_bytes == 4 * 2 * 6 * 30


def test_what_is_shared_out_is_gathered_where_all_of_it_is_needed():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "x"], ["s"]),
        helper.make_node("MatMul", ["s", "w"], ["y"]),
    ]
    run = on_ranks(2, nodes, {"x": [4, 8]}, {"y": [4, 8]}, {"w": 2 * ones(8, 8)})
    gathers = [op for op in run.ops if op.name == "c10d::all_gather"]
    assert [op.kernels[0].call.read_bytes for op in gathers] == [4 * 4 * 8] * 2
    assert run.ops[-1] is gathers[-1]  # results are whole


@pytest.mark.slow
def test_heads_of_an_attention_are_shared_out():
    model = import_onnx(bert_base(layers=1)).mod
    alone, shared = (lower_to_ranks(model, "gpu", ranks) for ranks in (1, 4))
    heads = [
        [k.call.sizes["B"] for op in run.ops for k in op.kernels if k.call.op == "bmm"]
        for run in (alone, shared)
    ]
    assert heads[0] and heads[1] == [count // 4 for count in heads[0]]
    reduces = [op.name for op in shared.ops if op.name.startswith("c10d")]
    assert reduces.count("c10d::all_reduce") == 2


def test_keys_that_a_step_appends_to_stay_on_their_rank():
    """Two sequences of 4 heads of 8 elements, 15 keys and a new one, on 1 and on 4 ranks."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["q"]),
        helper.make_node("Reshape", ["q", "heads"], ["r"]),
        helper.make_node("Transpose", ["r"], ["k"], perm=[0, 2, 1, 3]),
        helper.make_node("Concat", ["past", "k"], ["present"], axis=2),
        helper.make_node("Transpose", ["present"], ["t"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["k", "t"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "present"], ["y"]),
    ]
    inputs = {"x": [2, 1, 32], "past": [2, 4, 15, 8]}
    outputs = {"y": [2, 4, 1, 8], "present": [2, 4, 16, 8]}
    constants = {"w": 2 * ones(32, 32), "heads": np.array([2, 1, 4, 8])}
    alone, shared = (on_ranks(ranks, nodes, inputs, outputs, constants) for ranks in (1, 4))
    (gather,) = (op for op in shared.ops if op.name.startswith("c10d"))
    assert gather.kernels[0].call.read_bytes == 4 * 2 * 4 * 8  # y, and nothing of the keys
    copies = [
        next(
            op.kernels[0].call for op in run.ops if op.kernels and op.kernels[0].call.op == "concat"
        )
        for run in (alone, shared)
    ]
    assert [copy.written_bytes for copy in copies] == [4 * 2 * 4 * 16 * 8, 4 * 2 * 16 * 8]
    # x, past and present are held at once, of the keys a quarter on a rank.
    assert alone.activation_bytes >= 4 * (64 + 2 * 4 * 31 * 8) > 3.5 * shared.activation_bytes


def attentions(model):
    run = lower_to_ranks(import_onnx(model).mod, fused=["float32"])
    names = [op.name.removeprefix("aten::") for op in run.ops if op.kernels]
    called = [k.call for op in run.ops for k in op.kernels if k.call.op == "attention"]
    return names, called


def grouped(mask, size=8, batch=2):
    """Attention as exporters write it: 8 heads of 5 queries, 2 of 5 keys and values."""
    nodes = [
        helper.make_node("Transpose", ["q"], ["query"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["k"], ["key"], perm=[0, 2, 1, 3]),
        helper.make_node("Unsqueeze", ["key", "second"], ["one"]),
        helper.make_node("Expand", ["one", "four"], ["many"]),
        helper.make_node("Reshape", ["many", "heads"], ["keys"]),
        helper.make_node("Transpose", ["keys"], ["turned"], perm=[0, 1, 3, 2]),
        helper.make_node("Mul", ["query", "root"], ["a"]),
        helper.make_node("Mul", ["turned", "root"], ["b"]),
        helper.make_node("MatMul", ["a", "b"], ["scores"]),
        helper.make_node("Add", ["scores", "mask"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["p"], axis=-1),
        helper.make_node("IsNaN", ["p"], ["none"]),
        helper.make_node("Where", ["none", "zero", "p"], ["weights"]),
        helper.make_node("MatMul", ["weights", "keys"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["back"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["back", "flat"], ["y"]),
    ]
    numbers = {"second": [2], "four": [batch, 2, 4, 5, size], "heads": [batch, 8, 5, size]}
    numbers |= {"flat": [batch, 5, 8 * size]}
    constants = {name: np.array(value, np.int64) for name, value in numbers.items()}
    constants |= {"root": np.float32(size**-0.25), "zero": np.float32(0), "mask": mask}
    weights = [numpy_helper.from_array(np.asarray(x), name) for name, x in constants.items()]
    shapes = {"q": [batch, 5, 8, size], "k": [batch, 5, 2, size]}
    inputs = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    ]
    out = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, numbers["flat"])
    graph = helper.make_graph(nodes, "g", inputs, [out], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


TRIANGLE = np.where(np.tri(5, dtype=bool), 0, -np.inf).astype(np.float32)


def test_attention_that_is_written_out_is_one_kernel():
    names, (call,) = attentions(grouped(TRIANGLE))
    assert names == ["scaled_dot_product_attention"]  # no copy of its result, nor of repeated keys
    assert dict(call.sizes) == {"B": 2, "L": 5, "S": 5, "H": 8, "KV": 2, "D": 8}
    assert call.flops == 4 * 2 * 8 * 8 * 15
    query, keys = 4 * 2 * 8 * 5 * 8, 4 * 2 * 2 * 5 * 8
    assert (call.read_bytes, call.written_bytes) == (query + 2 * keys, query)


@pytest.mark.parametrize("mask", [np.zeros((5, 5), np.float32), TRIANGLE.T, TRIANGLE[-1:]])
def test_attention_whose_mask_is_no_triangle_is_full(mask):
    _, (call,) = attentions(grouped(np.ascontiguousarray(mask)))
    assert call.sizes["full"] == 1 and call.flops == 4 * 2 * 8 * 8 * 25


def test_heads_that_are_too_large_are_not_fused():
    names, called = attentions(grouped(TRIANGLE, size=264))
    assert not called and {"matmul", "softmax"} <= set(names)


def test_types_without_the_kernel_are_not_fused():
    run = lower_to_ranks(import_onnx(grouped(TRIANGLE)).mod, fused=["bfloat16"])
    assert not any("scaled_dot" in op.name for op in run.ops)


@pytest.mark.parametrize("past, sizes", [(0, {"L": 3, "S": 3}), (7, {"L": 3, "S": 10})])
def test_nodes_of_grouped_queries_are_causal(past, sizes):
    names = ["q", "k", "v", "pk", "pv"] if past else ["q", "k", "v", "", ""]
    shapes = {"q": [2, 3, 64], "k": [2, 3, 16], "v": [2, 3, 16]}
    shapes |= {"pk": [2, 2, past, 8], "pv": [2, 2, past, 8]} if past else {}
    inputs = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    ]
    inputs.append(helper.make_tensor_value_info("last", onnx.TensorProto.INT32, [2]))
    outputs = {"y": [2, 3, 64], "ka": [2, 2, past + 3, 8], "va": [2, 2, past + 3, 8]}
    node = helper.make_node(
        "GroupQueryAttention",
        [*names, "last", "total"],
        list(outputs),
        domain="com.microsoft",
        num_heads=8,
        kv_num_heads=2,
    )
    results = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in outputs.items()
    ]
    total = numpy_helper.from_array(np.array(past + 3, np.int32), "total")
    graph = helper.make_graph([node], "g", inputs, results, [total])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    _, (call,) = attentions(helper.make_model(graph, opset_imports=opsets))
    assert dict(call.sizes) == {"B": 2, "H": 8, "KV": 2, "D": 8, **sizes}


@pytest.mark.slow
def test_heads_of_a_group_and_of_a_rank():
    model = import_onnx(STEPS["llama_step"](layers=1)).mod
    run = lower_to_ranks(model, fused=["float32"])
    (call,) = [k.call for op in run.ops for k in op.kernels if k.call.op == "attention"]
    assert dict(call.sizes) == {"B": 1, "L": 1, "S": 129, "H": 12, "KV": 4, "D": 64}
    shared = lower_to_ranks(import_onnx(bert_base(layers=1)).mod, "gpu", 4, ["float32"])
    (call,) = [k.call for op in shared.ops for k in op.kernels if k.call.op == "attention"]
    assert (call.sizes["B"], call.sizes["H"], call.sizes["KV"]) == (1, 3, 3)


def test_scores_that_are_never_stored_take_no_memory():
    model = import_onnx(grouped(TRIANGLE, batch=1)).mod
    apart, fused = (lower_to_ranks(model, fused=types) for types in ((), ["float32"]))
    tensors = 4 * (8 + 2 + 8) * 5 * 8  # queries, keys that are the values, and the result
    assert fused.activation_bytes == tensors < apart.activation_bytes
