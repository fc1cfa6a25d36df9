# SPDX-License-Identifier: Apache-2.0
"""LSTM, GRU and RNN have the numbers of ONNX Runtime: all options, odd sizes, long sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx_cases import relax_ops

import tvm_fusion
from tests.selection import in_turns
from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
OPTIONAL = ("B", "sequence_lens", "initial_h", "initial_c", "P")


def layer(
    op_type: str,
    steps: int,
    batch: int,
    features: int,
    hidden: int,
    given: Sequence[str] = (),
    dtype: str = "float32",
    constant: bool = True,
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one layer, and random inputs."""
    generator = np.random.default_rng([steps, batch, hidden])
    count = 2 if attributes.get("direction") == "bidirectional" else 1
    rows = GATES[op_type] * hidden
    by_batch = attributes.get("layout", 0)
    state = (batch, count, hidden) if by_batch else (count, batch, hidden)
    shapes = {
        "X": (batch, steps, features) if by_batch else (steps, batch, features),
        "W": (count, rows, features),
        "R": (count, rows, hidden),
        "B": (count, 2 * rows),
        "initial_h": state,
        "initial_c": state,
        "P": (count, 3 * hidden),
    }
    values = {
        name: (generator.standard_normal(shape) * 0.4).astype(dtype)
        for name, shape in shapes.items()
    }
    values["sequence_lens"] = generator.integers(1, steps + 1, batch).astype("int32")
    last = OPTIONAL if op_type == "LSTM" else OPTIONAL[:3]
    names = ["X", "W", "R", *(name if name in given else "" for name in last)]
    outputs = ["Y", "Y_h", "Y_c"][: 3 if op_type == "LSTM" else 2]
    node = helper.make_node(op_type, names, outputs, "op", hidden_size=hidden, **attributes)
    fixed = [n for n in names if n and constant and n in ("W", "R", "B", "P")]
    fed = [n for n in names if n and n not in fixed]
    graph = helper.make_graph(
        [node],
        "layer",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(values[name].dtype), values[name].shape
            )
            for name in fed
        ],
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(values["X"].dtype), None
            )
            for name in outputs
        ],
        [numpy_helper.from_array(values[name], name) for name in fixed],
    )
    opset = [helper.make_operatorsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    return model, {name: values[name] for name in fed}


def check(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], limit: float = 2e-5, threads: int = 1
) -> None:
    """Compare all outputs with those of ONNX Runtime."""
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    found = tvm_fusion.compile(model, threads=threads)(feeds)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=limit, atol=limit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op_type", "direction"), in_turns(GATES, ["forward", "reverse", "bidirectional"], every=3)
)
def test_directions_with_everything_given(op_type: str, direction: str) -> None:
    check(*layer(op_type, 7, 3, 5, 19, OPTIONAL, direction=direction))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("op_type", GATES)
def test_lengths_beyond_the_sequence_read_no_other_memory(op_type: str) -> None:
    model, feeds = layer(op_type, 3, 4, 2, 5, ("sequence_lens",), direction="bidirectional")
    compiled = tvm_fusion.compile(model, threads=1)
    lengths = np.array([3, 0, 3, 0], "int32")
    wanted = compiled(feeds | {"sequence_lens": lengths})
    found = compiled(feeds | {"sequence_lens": np.array([1 << 30, -9, 4, -(1 << 30)], "int32")})
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("op_type", GATES)
def test_weights_from_data(op_type: str) -> None:
    check(*layer(op_type, 3, 2, 4, 16, ("B", "initial_h"), constant=False))


@pytest.mark.slow
def test_reset_after_the_product() -> None:
    check(*layer("GRU", 6, 5, 7, 33, OPTIONAL, linear_before_reset=1, direction="bidirectional"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [("LSTM", {}), ("GRU", {"linear_before_reset": 1}), ("GRU", {"linear_before_reset": 0})],
)
def test_threads_share_the_units(op_type: str, attributes: dict[str, int]) -> None:
    """Uneven numbers of units and of rows; weights that exceed the caches of small cores."""
    check(*layer(op_type, 5, 7, 9, 392, OPTIONAL, **attributes), 1e-4, threads=2)


def test_long_sequence_is_one_kernel() -> None:
    model, feeds = layer("LSTM", 100, 1, 24, 64, ("B",))
    check(model, feeds, 1e-4)
    assert "relax.tvm_fusion.recurrence" in relax_ops(import_onnx(model))


@pytest.mark.slow
def test_coupled_gates_and_clipping() -> None:
    check(*layer("LSTM", 4, 4, 3, 8, ("B", "P"), input_forget=1, clip=0.3))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("op_type", ["GRU", "RNN"])
def test_clipping(op_type: str) -> None:
    check(*layer(op_type, 4, 4, 3, 8, ("B",), clip=0.2))


@pytest.mark.slow
def test_activations() -> None:
    """One model of all of them, with the parameters that each takes."""
    taken = {"Affine": 2, "HardSigmoid": 2, "ScaledTanh": 2}
    taken |= {"Elu": 1, "LeakyRelu": 1, "ThresholdedRelu": 1}
    plain = ("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh")
    model, feeds = layer("RNN", 5, 2, 4, 18, ("B",))
    del model.graph.node[:], model.graph.output[:]
    for name in (*taken, *plain):
        parameters = {"activation_alpha": [0.3], "activation_beta": [0.6]}
        given = dict(list(parameters.items())[: taken.get(name, 0)])
        inputs, outputs = ["X", "W", "R", "B"], [name]
        options = {"hidden_size": 18, "activations": [name], **given}
        model.graph.node.append(helper.make_node("RNN", inputs, outputs, name, **options))
        model.graph.output.append(helper.make_tensor_value_info(name, 1, None))
    check(model, feeds)


def test_batch_first_and_double() -> None:
    """ONNX Runtime has neither, so the same layer in the other layout is the reference."""
    model, feeds = layer("LSTM", 5, 2, 3, 17, ("B", "initial_h"), "float64", layout=1)
    found = tvm_fusion.compile(model, threads=1)(feeds)
    other, _ = layer("LSTM", 5, 2, 3, 17, ("B", "initial_h"))
    for tensor in other.graph.initializer:
        match = next(t for t in model.graph.initializer if t.name == tensor.name)
        value = numpy_helper.to_array(match).astype("float32")
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    turned = {name: value.astype("float32").swapaxes(0, 1) for name, value in feeds.items()}
    session = onnxruntime.InferenceSession(other.SerializeToString())
    y, y_h, y_c = session.run(None, turned)
    wanted = y.transpose(2, 0, 1, 3), y_h.swapaxes(0, 1), y_c.swapaxes(0, 1)
    for one, reference in zip(found, wanted, strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, reference, rtol=1e-4, atol=1e-5)


def test_unknown_activation_is_refused() -> None:
    model, _ = layer("RNN", 2, 2, 2, 2, activations=["Swish"])
    with pytest.raises(UnsupportedOperatorError, match="'op': RNN .* its activation is 'swish'"):
        import_onnx(model)


def test_too_few_activations_are_refused() -> None:
    model, _ = layer("LSTM", 2, 2, 2, 2, activations=["Tanh"])
    with pytest.raises(UnsupportedOperatorError, match="it has 1 activations; expected 3"):
        import_onnx(model)
