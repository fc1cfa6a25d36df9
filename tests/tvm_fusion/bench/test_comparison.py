# SPDX-License-Identifier: Apache-2.0
"""Errors of outputs and layers by options that cost precision."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper, numpy_helper

import tvm_fusion
from tvm_fusion.bench.comparison import _tensor_errors
from tvm_fusion.cli.command_line import cli
from tvm_fusion.errors import InvalidInputError


def network() -> onnx.ModelProto:
    """Two products, the second of which is small and stays as it is."""
    random = np.random.default_rng(0)
    matrices = {"first": (64, 128), "second": (128, 8)}
    constants = [
        numpy_helper.from_array(random.standard_normal(shape).astype("float32"), name)
        for name, shape in matrices.items()
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "second"], ["scores"]),
        helper.make_node("Add", ["scores", "shift"], ["y"]),
    ]
    given = [("x", [4, 64]), ("shift", [4, 8])]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info(name, 1, shape) for name, shape in given],
        [helper.make_tensor_value_info("y", 1, [4, 8])],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.slow
def test_errors_of_outputs_and_layers() -> None:
    found = tvm_fusion.compare(network(), weights="int4", layers=True, runs=2, threads=1)
    (output,) = found.outputs
    assert output.name == "y" and 0 < output.rms < 0.2 and 0 < output.largest < 0.2
    assert output.top1 is not None and 0.5 <= output.top1 <= 1
    assert [(each.name, each.operator) for each in found.layers] == [
        ("hidden", "MatMul"),
        ("scores", "MatMul"),
    ]
    assert all(0 < each.rms < 0.2 for each in found.layers)
    exact, rounded = (
        tvm_fusion.compile(network(), weights=weights, threads=1) for weights in (None, "int4")
    )
    feed = {"x": np.ones((4, 64), "float32"), "shift": np.zeros((4, 8), "float32")}
    one = tvm_fusion.compare(network(), inputs=[feed], weights="int4", threads=1).outputs[0]
    wanted, got = exact(**feed), rounded(**feed)
    assert one.largest == pytest.approx(np.abs(got - wanted).max() / np.abs(wanted).max())
    assert one.rms == pytest.approx(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def test_places_and_values_that_are_not_finite() -> None:
    wanted = np.array([[1.0, 3.0, 2.0], [5.0, 4.0, 0.0]], "float32")
    found = np.array([[1.0, 3.5, 2.0], [4.0, 5.0, 0.0]], "float32")
    errors = _tensor_errors("y", "", [(wanted, found), (wanted, wanted)])
    assert errors.top1 == 0.75 and errors.largest == pytest.approx(0.2)
    halves = [array.astype(ml_dtypes.bfloat16) for array in (wanted, found)]
    assert _tensor_errors("y", "", [tuple(halves)]).top1 == 0.5
    found[0, 0] = np.nan
    assert _tensor_errors("y", "", [(wanted, found)]).largest == np.inf
    whole = np.array([1, 2])
    assert _tensor_errors("y", "", [(whole, whole)]).top1 is None


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    path, array = tmp_path / "network.onnx", tmp_path / "x.npy"
    onnx.save(network(), path)
    np.save(array, np.ones((4, 64), "float32"))
    given = ["compare", str(path), "--weights", "int8", "--input", f"x={array}"]
    result = CliRunner().invoke(cli, [*given, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["runs"] == 1 and found["options"] == {"weights": "int8"}
    assert [each["name"] for each in found["layers"]] == ["hidden", "scores"]
    table = CliRunner().invoke(
        cli, ["compare", str(path), "--weights", "int4", "--runs", "1", "--no-layers"]
    )
    assert table.exit_code == 0 and "same top 1" in table.stdout and "100.0%" in table.stdout
    assert "hidden" not in table.stdout


def test_auto_precision_that_changes_nothing() -> None:
    with pytest.raises(InvalidInputError, match="'auto' is fp32 where bf16 is no faster"):
        tvm_fusion.compare(network(), precision="auto", target="llvm -mcpu=x86-64-v3")


@pytest.mark.slow
def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="nothing to compare"):
        tvm_fusion.compare(network())
    with pytest.raises(InvalidInputError, match="the model has no input 'z'; expected some of"):
        tvm_fusion.compare(network(), inputs=[{"z": np.zeros(3)}], weights="int8")
    model = network()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    with pytest.raises(InvalidInputError, match="a comparison needs its size"):
        tvm_fusion.compare(model, weights="int8", shapes={"n": "n"})
    path = tmp_path / "network.onnx"
    onnx.save(network(), path)
    result = CliRunner().invoke(cli, ["compare", str(path)])
    assert result.exit_code == 2 and "give --weights or --precision" in result.output
