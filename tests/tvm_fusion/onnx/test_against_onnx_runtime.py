# SPDX-License-Identifier: Apache-2.0
"""Operators of transformers, casts, reductions and ranges have the numbers of ONNX Runtime.

Many nodes share a model, so that it is compiled once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_cases import int64, normal

import tvm_fusion
from tests.selection import in_turns

Arrays = Mapping[str, np.ndarray]

TYPES = {
    str(helper.tensor_dtype_to_np_dtype(kind)): kind
    for kind in (*range(1, 8), *range(9, 14), TensorProto.BFLOAT16)
}
"""Names of the types of numbers, and ONNX's numbers for them."""


def model_of(
    nodes: Sequence[onnx.NodeProto],
    feeds: Arrays,
    constants: Arrays | None = None,
    opset: int = 23,
    kinds: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A model whose outputs are all that no node reads, of float32 unless ``kinds`` says else."""
    read = {name for node in nodes for name in node.input}
    names = [name for node in nodes for name in node.output if name and name not in read]
    kinds = kinds or {}
    graph = helper.make_graph(
        list(nodes),
        "several",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for n, v in feeds.items()
        ],
        [helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), None) for n in names],
        [numpy_helper.from_array(v, n) for n, v in (constants or {}).items()],
    )
    opsets = [helper.make_operatorsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(model: onnx.ModelProto, feeds: Arrays) -> list[np.ndarray]:
    found = tvm_fusion.compile(model, threads=1)(dict(feeds))
    return list(found) if isinstance(found, tuple) else [found]


def check(
    nodes: Sequence[onnx.NodeProto],
    feeds: Arrays,
    constants: Arrays | None = None,
    opset: int = 23,
    kinds: Mapping[str, int] | None = None,
) -> None:
    """Compare all outputs with those of ONNX Runtime."""
    model = model_of(nodes, feeds, constants, opset, kinds)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    wanted = session.run(None, dict(feeds))
    found = run(model, feeds)
    for one, other, value in zip(found, wanted, model.graph.output, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), value.name
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=value.name)


def node(op_type: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node from two lists of names; ``-`` stands for a missing one."""
    names = [["" if n == "-" else n for n in text.split()] for text in (inputs, outputs)]
    return helper.make_node(op_type, *names, name=names[1][0], **attributes)


@pytest.mark.slow
def test_attention() -> None:
    """Masks of bools and floats, fewer heads of keys, a past, soft caps, heads in one axis."""
    feeds = {
        "q": normal(2, 4, 3, 8),
        "k": normal(2, 2, 5, 8, seed=2),
        "v": normal(2, 2, 5, 6, seed=3),
        "pk": normal(2, 2, 4, 8, seed=4),
        "pv": normal(2, 2, 4, 6, seed=5),
        "added": normal(3, 5, seed=6),
        "kept": np.random.default_rng(7).random((2, 1, 3, 5)) < 0.7,
        "flat": normal(2, 3, 32, seed=8),
        "keys": normal(2, 5, 16, seed=9),
        "values": normal(2, 5, 12, seed=10),
    }
    feeds["kept"][..., 0] = True
    heads = {"q_num_heads": 4, "kv_num_heads": 2}
    nodes = [
        node("Attention", "q k v", "plain"),
        node("Attention", "q k v added", "biased", scale=0.3),
        node("Attention", "q k v kept", "masked", softcap=2.0),
        node("Attention", "q k v", "causal", is_causal=1),
        node("Attention", "q k v - pk pv", "grown present_k present_v", is_causal=1),
        node("Attention", "flat keys values", "joined", **heads),
    ]
    check(nodes, feeds)


@pytest.mark.slow
def test_rotary_embedding() -> None:
    feeds = {
        "x": normal(2, 3, 4, 8),
        "flat": normal(2, 4, 24, seed=2),
        "c": normal(10, 4, seed=3),
        "s": normal(10, 4, seed=4),
        "half_c": normal(10, 2, seed=5),
        "half_s": normal(10, 2, seed=6),
        "at": np.array([[0, 3, 9, 1], [4, 4, 2, 5]]),
        "row_c": normal(2, 4, 4, seed=7),
        "row_s": normal(2, 4, 4, seed=8),
    }
    nodes = [
        node("RotaryEmbedding", "x c s at", "halves"),
        node("RotaryEmbedding", "x c s at", "pairs", interleaved=1),
        node("RotaryEmbedding", "x half_c half_s at", "part", rotary_embedding_dim=4),
        node("RotaryEmbedding", "x row_c row_s", "rows"),
        node("RotaryEmbedding", "flat c s at", "joined", num_heads=3),
    ]
    check(nodes, feeds)


def test_norms() -> None:
    feeds = {"x": normal(2, 3, 4, 8), "s": normal(8, seed=2), "t": normal(4, 8, seed=3)}
    nodes = [
        node("RMSNormalization", "x s", "last"),
        node("RMSNormalization", "x t", "two", axis=-2, epsilon=1e-3),
        node("LayerNormalization", "x t", "layer", axis=2),
    ]
    check(nodes, feeds)


@pytest.mark.slow
@pytest.mark.parametrize(("name",), in_turns(TYPES))
def test_casts(name: str) -> None:
    """Whole numbers wrap around, floats lose their fraction, as in numpy."""
    dtype = helper.tensor_dtype_to_np_dtype(TYPES[name])
    values = np.array([0, 1, 2.75, 3.5, 100, 17.25, 126], np.float64)
    if name == "bool":
        values = np.array([0, 1, 1, 0])
    elif np.issubdtype(dtype, np.signedinteger):
        values = np.array([0, 1, -1, 100, -100, np.iinfo(dtype).max, np.iinfo(dtype).min])
    elif np.issubdtype(dtype, np.integer):
        values = np.array([0, 1, 100, np.iinfo(dtype).max], dtype)
    x = values.astype(dtype)
    nodes = [node("Cast", "x", f"to_{other}", to=kind) for other, kind in TYPES.items()]
    nodes = [node("CastLike", "x other", "like"), *nodes]
    kinds = {f"to_{other}": kind for other, kind in TYPES.items()}
    feeds = {"x": x, "other": np.zeros(2, "float16")}
    model = model_of(nodes, feeds, kinds={**kinds, "like": TensorProto.FLOAT16})
    with np.errstate(over="ignore"):
        wanted = [x.astype(value) for value in ["float16", *map(_dtype, TYPES)]]
    for found, expected in zip(run(model, feeds), wanted, strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def _dtype(name: str) -> np.dtype:
    return helper.tensor_dtype_to_np_dtype(TYPES[name])


REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("opset", [13, 18])
def test_reductions(opset: int) -> None:
    """Axes as an input or as an attribute, kept or not, and none."""
    feeds = {"x": np.abs(normal(2, 3, 4, 5)) + np.float32(0.1)}
    constants = {"axes": int64(1, -1), "none": np.array([], np.int64)}
    nodes = []
    for name in REDUCTIONS:
        is_input = opset >= 18 or name == "Sum"
        given: dict[str, Any] = {"keepdims": len(nodes) % 2}
        axes = "x axes" if is_input else "x"
        given |= {} if is_input else {"axes": [1, -1]}
        nodes.append(node(f"Reduce{name}", axes, name.lower(), **given))
        if is_input:
            nodes.append(node(f"Reduce{name}", "x", f"{name}_all", keepdims=0))
    nodes.append(node("ReduceSum", "x none", "untouched", noop_with_empty_axes=1))
    check(nodes, feeds, constants, opset)


def test_reductions_of_nothing() -> None:
    """Sums are 0, products 1, and the largest of no number is minus infinity."""
    constants = {"empty": np.zeros((2, 0, 3), np.float32), "axes": int64(1)}
    names = [name for name in REDUCTIONS if name != "Mean"]
    nodes = [node(f"Reduce{name}", "empty axes", name.lower(), keepdims=0) for name in names]
    nodes = [*nodes, node("Relu", "x", "y")]
    feeds = {"x": normal(3)}
    check(nodes, feeds, constants)


@pytest.mark.slow
def test_log_sum_exp_of_constant_infinities() -> None:
    constants = {"low": np.full(2, -np.inf, np.float32), "x": normal(3)}
    nodes = [node("ReduceLogSumExp", "low", "none", keepdims=0), node("Add", "y none", "sum")]
    check([*nodes, node("ReduceLogSumExp", "x", "some")], {"y": normal(3)}, constants)


def test_ranges_sums_slices_and_powers() -> None:
    feeds = {"x": normal(4, 6, 5), "n": np.arange(-10, 10, dtype=np.int32).reshape(4, 5)}
    constants = {
        "zero": np.array(0, np.float32),
        "end": np.array(-2.2, np.float32),
        "step": np.array(-0.5, np.float32),
        "one": np.array(1),
        "starts": int64(-1, 100, 0),
        "ends": int64(-100, 0, 3),
        "axes": int64(1, 2, 0),
        "steps": int64(-2, -1, 2),
        "divisors": np.array([3, -3, 7, -7, 1], np.int32),
        "exponents": np.array([0, 1, 2, 3, 2], np.int32),
        "half": np.array(0.5, np.float32),
        "nine": np.array(9.0, np.float32),
    }
    nodes = [
        node("Range", "zero end step", "range"),
        node("Add", "range zero", "ranged"),
        node("CumSum", "x one", "sums"),
        node("CumSum", "x one", "left", exclusive=1, reverse=1),
        node("CumSum", "n one", "whole", exclusive=1),
        node("Slice", "x starts ends axes steps", "slice"),
        node("Mod", "n divisors", "down"),
        node("Mod", "n divisors", "to_zero", fmod=1),
        node("Pow", "n exponents", "power"),
        node("Abs", "x", "size"),
        node("Pow", "size half", "root"),
        node("Pow", "size nine", "ninth"),
        node("Pow", "x exponents", "mixed"),
    ]
    whole = dict.fromkeys(("whole", "down", "to_zero", "power"), TensorProto.INT32)
    check(nodes, feeds, constants, 17, whole)


@pytest.mark.slow
def test_powers_and_pools_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    """TVM has warnings on standard error for powers of numbers from 3 on."""
    feeds = {"x": np.abs(normal(1, 2, 6, 7))}
    nodes = [
        node("Pow", "x nine", "ninth"),
        node("LpPool", "x", "third", kernel_shape=[2, 3], p=3, pads=[0, 1, 1, 0]),
        node("LpPool", "x", "eleventh", kernel_shape=[2, 2], p=11, strides=[2, 2]),
        node("LpPool", "x", "second", kernel_shape=[2, 2], auto_pad="SAME_LOWER"),
        node("LpPool", "x", "first", kernel_shape=[3, 2], p=1),
        node("GlobalLpPool", "x", "whole", p=4),
    ]
    check(nodes, feeds, {"nine": np.array(9.0, np.float32)}, 17)
    assert capfd.readouterr().err == ""
