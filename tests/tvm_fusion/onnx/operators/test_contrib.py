# SPDX-License-Identifier: Apache-2.0
"""Operators of ``com.microsoft`` have the numbers of ONNX Runtime, their author."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx_cases import normal

import tvm_fusion
from tests.selection import in_turns
from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx

DOMAIN = "com.microsoft"


def contrib(
    nodes: Sequence[onnx.NodeProto], feeds: Mapping[str, np.ndarray], opset: int = 17
) -> onnx.ModelProto:
    """A model of some nodes; its outputs are those that no node reads."""
    read = {name for node in nodes for name in node.input}
    names = [name for node in nodes for name in node.output if name and name not in read]
    types = {name: onnx.TensorProto.FLOAT for name in names} | {"counts": onnx.TensorProto.INT32}
    graph = helper.make_graph(
        list(nodes),
        "contrib",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
            )
            for name, value in feeds.items()
        ],
        [helper.make_tensor_value_info(name, types[name], None) for name in names],
    )
    opsets = [helper.make_operatorsetid("", opset), helper.make_operatorsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def node(op_type: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node from two lists of names; ``-`` stands for a missing one."""
    names = [["" if name == "-" else name for name in text.split()] for text in (inputs, outputs)]
    domain = attributes.pop("domain", DOMAIN)
    name = f"{op_type}_{names[1][0]}"
    return helper.make_node(op_type, *names, name=name, domain=domain, **attributes)


def check(nodes: Sequence[onnx.NodeProto], opset: int = 17, **feeds: np.ndarray) -> None:
    """Compare all outputs with those of ONNX Runtime."""
    model = contrib(nodes, feeds, opset)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    wanted = session.run(None, feeds)
    found = tvm_fusion.compile(model, threads=1)(feeds)
    found = found if isinstance(found, tuple) else (found,)
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_activations() -> None:
    nodes = [
        node("Gelu", "x", "a"),
        node("BiasGelu", "x b", "c"),
        node("FastGelu", "x", "d"),
        node("FastGelu", "x b", "e"),
        node("QuickGelu", "x", "f", alpha=1.3),
    ]
    check(nodes, x=normal(3, 5, 7), b=normal(7, seed=2))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("opset", [13, 17])
def test_normalisations(opset: int) -> None:
    nodes = [
        node("SkipLayerNormalization", "x s g b c", "y - - sum", epsilon=1e-5),
        node("SkipLayerNormalization", "x s g", "z", epsilon=1e-3),
        node("SkipSimplifiedLayerNormalization", "x s g c", "r", epsilon=1e-5),
        node("SimplifiedLayerNormalization", "x g", "q", domain="", epsilon=1e-5, axis=-1),
    ]
    vectors = {name: normal(9, seed=seed) for seed, name in enumerate("gbc")}
    check(nodes, opset, x=normal(2, 3, 9), s=normal(2, 3, 9, seed=5), **vectors)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("given", ["segments mask", "-"])
def test_embeddings(given: str) -> None:
    is_given = given != "-"
    inputs = "ids segments words places kinds g b mask" if is_given else "ids - words places - g b"
    outputs = "y counts" if is_given else "y -"
    generator = np.random.default_rng(0)
    feeds = {
        "ids": generator.integers(0, 20, (2, 5)).astype("int32"),
        "words": normal(20, 8),
        "places": normal(9, 8, seed=2),
        "g": normal(8, seed=4),
        "b": normal(8, seed=5),
    }
    if is_given:
        feeds["segments"] = generator.integers(0, 2, (2, 5)).astype("int32")
        feeds["kinds"] = normal(2, 8, seed=3)
        feeds["mask"] = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], "int32")
    check([node("EmbedLayerNormalization", inputs, outputs)], **feeds)


def test_products() -> None:
    nodes = [
        node("FusedMatMul", "a b", "y", alpha=0.5, transA=1),
        node("FusedMatMul", "y b", "z", transB=1),
    ]
    check(nodes, a=normal(2, 5, 3), b=normal(2, 5, 4, seed=2))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu", "Clip", ""])
def test_convolutions(activation: str) -> None:
    values = {"LeakyRelu": [0.2], "Clip": [-0.5, 0.7]}.get(activation)
    chosen: dict[str, Any] = {"activation": activation} if activation else {}
    chosen |= {} if values is None else {"activation_params": values}
    inputs = "x w b z" if activation == "Relu" else "x w b"
    feeds = {"x": normal(1, 3, 6, 6), "w": normal(4, 3, 3, 3, seed=2), "b": normal(4, seed=3)}
    if "z" in inputs:
        feeds["z"] = normal(1, 4, 6, 6, seed=4)
    check([node("FusedConv", inputs, "y", pads=[1, 1, 1, 1], **chosen)], **feeds)


@pytest.mark.slow
@pytest.mark.parametrize(("unidirectional", "mask"), in_turns([0, 1], ["-", "mask"]))
def test_attention(unidirectional: int, mask: str) -> None:
    inputs = f"x w b {mask}" + (" past" if mask == "-" else "")
    outputs = "y present" if mask == "-" else "y"
    feeds = {"x": normal(2, 4, 6), "w": normal(6, 24, seed=2), "b": normal(24, seed=3)}
    if mask == "-":
        feeds["past"] = normal(2, 2, 2, 3, 4, seed=6)
    else:
        feeds["mask"] = np.array([[1, 7, 0, -3], [1, 1, 1, 1]], "int32")
    made = node("Attention", inputs, outputs, num_heads=2, unidirectional=unidirectional)
    check([made], **feeds)


@pytest.mark.slow
def test_attention_of_three_tensors() -> None:
    inputs = "q k v b mask bias"
    feeds = {
        "q": normal(2, 3, 8),
        "k": normal(2, 5, 8, seed=2),
        "v": normal(2, 5, 4, seed=3),
        "b": normal(20, seed=4),
        "mask": np.array([[1, 7, 0, -3, 0], [1, 1, 1, 1, 1]], "int32"),
        "bias": normal(2, 2, 3, 5, seed=5),
    }
    check([node("MultiHeadAttention", inputs, "y", num_heads=2)], **feeds)


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (1, 5), (5, 3)])
def test_causal_attention_to_other_keys(queries: int, keys: int) -> None:
    made = node("MultiHeadAttention", "q k v b", "y", num_heads=2, unidirectional=1)
    feeds = {"q": normal(2, queries, 8), "b": normal(24, seed=4)}
    check([made], **feeds, k=normal(2, keys, 8, seed=2), v=normal(2, keys, 8, seed=3))


@pytest.mark.slow
def test_attention_with_a_past() -> None:
    inputs = "q k v - - - pk pv"
    names = ["q", "k", "v"]
    feeds = {name: normal(2, 3, 8, seed=seed) for seed, name in enumerate(names)}
    feeds |= {name: normal(2, 2, 4, 4, seed=seed) for seed, name in enumerate(["pk", "pv"])}
    made = node(
        "MultiHeadAttention", inputs, "y present_k present_v", num_heads=2, unidirectional=1
    )
    check([made], **feeds)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (node("SkipLayerNormalization", "x x g", "y mean"), "its mean or its deviation is asked"),
        (node("FusedMatMul", "x x", "y", transBatchA=1), "it transposes batches"),
        (node("FusedConv", "x x", "y", activation="Swish"), "its activation is 'Swish'"),
        (node("MultiHeadAttention", "x", "y", num_heads=2), r"have \[3, 0, 0\] dimensions"),
        (node("LongformerAttention", "x", "y"), "this operator has no translation"),
    ],
)
def test_refusals(made: onnx.NodeProto, reason: str) -> None:
    model = contrib([made], {"x": normal(2, 3, 4), "g": normal(4)})
    with pytest.raises(UnsupportedOperatorError, match=f"{made.op_type}.*{reason}"):
        import_onnx(model)


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embeddings(interleaved: int) -> None:
    angles = normal(9, 3, seed=4)
    nodes = [
        node("RotaryEmbedding", "x places cos sin", "y", interleaved=interleaved),
        node("RotaryEmbedding", "x first cos sin", "z", interleaved=interleaved),
        node(
            "RotaryEmbedding",
            "x places cos sin",
            "part",
            interleaved=interleaved,
            num_heads=2,
            rotary_embedding_dim=6,
        ),
        node("RotaryEmbedding", "heads places cos sin", "w", interleaved=interleaved),
    ]
    check(
        nodes,
        x=normal(2, 5, 24),
        heads=normal(2, 3, 5, 6, seed=2),
        places=np.array([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]),
        first=np.array([3]),
        cos=np.cos(angles),
        sin=np.sin(angles),
    )


@pytest.mark.slow
@pytest.mark.parametrize("past", [0, 4])
def test_grouped_attention(past: int, tmp_path: Path) -> None:
    """The second sequence is shorter; with a past, by two of its elements."""
    length = 1 if past else 5
    total, angles = past + length, normal(16, 8, seed=9)
    lengths = [total, total - 2]
    inputs = "q k v pk pv lens total cos sin" if past else "q k v - - lens total cos sin"
    feeds = {
        "q": normal(2, length, 4 * 16),
        "k": normal(2, length, 2 * 16, seed=2),
        "v": normal(2, length, 2 * 16, seed=3),
        "lens": np.array(lengths, "int32") - 1,
        "cos": np.cos(angles),
        "sin": np.sin(angles),
    }
    if past:
        feeds |= {name: normal(2, 2, past, 16, seed=5) for name in ("pk", "pv")}
    attention = node(
        "GroupQueryAttention", inputs, "y yk yv", num_heads=4, kv_num_heads=2, do_rotary=1
    )
    model = contrib([attention], feeds)
    stated = onnx.numpy_helper.from_array(np.array(total, "int32"), "total")
    model.graph.initializer.append(stated)
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    compiled = tvm_fusion.compile(model, threads=1)
    found = compiled(feeds)
    compiled.save(tmp_path / "model.so")  # It has a constant without elements.
    again = tvm_fusion.load(tmp_path / "model.so", threads=1)(feeds)
    assert all(map(np.array_equal, again, found))
    for one, other, axis in zip(found, wanted, (1, 2, 2), strict=True):
        assert one.shape == other.shape
        for row, size in enumerate(lengths):
            kept = range(min(size, length) if axis == 1 else size)
            pair = [np.take(each[row], kept, axis - 1) for each in (one, other)]
            np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "declared", "options", "more"),
    [
        (1, None, {"local_window_size": 3}, ()),
        (3, 9, {"softcap": 2.0, "do_rotary": 1}, ()),
        (2, 6, {"smooth_softmax": 1, "local_window_size": 1}, ("bias",)),
        (2, 9, {"softcap": 0.5, "scale": 1.0}, ("bias", "sink")),
    ],
)
def test_grouped_attention_with_buffers_windows_caps_and_sinks(
    length: int, declared: int | None, options: dict[str, Any], more: Sequence[str]
) -> None:
    """The past is 4 long, in a buffer of 9 if ``declared`` says so; ``None``: it is a constant."""
    room = 9 if declared == 9 else 4
    batch = 2 if length == 1 else 1  # ONNX Runtime demands it.
    angles = normal(16, 8, seed=9)
    feeds = {
        "q": normal(batch, length, 4 * 16),
        "k": normal(batch, length, 2 * 16, seed=2),
        "v": normal(batch, length, 2 * 16, seed=3),
        **{name: normal(batch, 2, room, 16, seed=5) for name in ("pk", "pv")},
        "lens": np.array([4, 3][:batch], "int32") + length - 1,
        "total": np.array(4 + length, "int32"),
        "cos": np.cos(angles),
        "sin": np.sin(angles),
        "bias": normal(batch, 4, length, 4 + length, seed=7),
        "sink": normal(4, seed=8),
    }
    kept = [name if name in more else "-" for name in ("bias", "sink")]
    feeds = {name: x for name, x in feeds.items() if name in more or name not in ("bias", "sink")}
    inputs = " ".join(["q k v pk pv lens total cos sin -", *kept])
    made = node("GroupQueryAttention", inputs, "y yk yv", num_heads=4, kv_num_heads=2, **options)
    model = contrib([made], feeds)
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    if declared is None:
        stated = onnx.numpy_helper.from_array(feeds.pop("total"), "total")
        model.graph.initializer.append(stated)
        del model.graph.input[[value.name for value in model.graph.input].index("total")]
    else:
        with pytest.raises(UnsupportedOperatorError, match="total_sequence_length is no constant"):
            import_onnx(model)
        for value in model.graph.output[1:]:
            shape = (batch, 2, declared, 16)
            value.CopyFrom(helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, shape))
    found = tvm_fusion.compile(model, threads=1)(feeds)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("unidirectional", [0, 1])
def test_masks_of_lengths(unidirectional: int) -> None:
    """A mask of one dimension holds the number of keys of each sequence."""
    options = {"num_heads": 2, "unidirectional": unidirectional}
    check(
        [node("Attention", "x w b m", "y", **options)],
        x=normal(3, 4, 6),
        w=normal(6, 24, seed=2),
        b=normal(24, seed=3),
        m=np.array([4, 1, 3], np.int32),
    )
    check(
        [node("MultiHeadAttention", "q k v - m", "y", num_heads=2)],
        q=normal(2, 3, 8),
        k=normal(2, 5, 8, seed=2),
        v=normal(2, 5, 8, seed=3),
        m=np.array([2, 5], np.int32),
    )


def test_masks_of_begins_and_ends_are_refused() -> None:
    nodes = [node("Attention", "x w b m", "y", num_heads=2)]
    feeds = {"x": normal(3, 4, 6), "w": normal(6, 24), "b": normal(24)}
    model = contrib(nodes, feeds | {"m": np.ones(6, np.int32)})
    with pytest.raises(UnsupportedOperatorError, match="expected a length of each key, without"):
        import_onnx(model)


def test_embeddings_without_segments() -> None:
    """All words are then of the first kind."""
    check(
        [node("EmbedLayerNormalization", "ids - words places kinds scale bias", "y counts")],
        ids=np.array([[2, 4, 1], [1, 3, 0]], np.int32),
        words=normal(5, 4),
        places=normal(6, 4, seed=2),
        kinds=normal(2, 4, seed=3),
        scale=normal(4, seed=4),
        bias=normal(4, seed=5),
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("activation", ["Relu", "Tanh", "LeakyRelu"])
def test_fused_gemm(activation: str) -> None:
    more = {"activation_alpha": 0.2} if activation == "LeakyRelu" else {}
    options = {"alpha": 0.5, "beta": 2.0, "transB": 1, "activation": activation, **more}
    nodes = [node("FusedGemm", "a b c", "y", **options)]
    check(nodes, a=normal(3, 4), b=normal(5, 4, seed=2), c=normal(5, seed=3))
