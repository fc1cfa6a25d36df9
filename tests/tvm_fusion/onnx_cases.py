# SPDX-License-Identifier: Apache-2.0
"""Build small ONNX models in a line or two, and compare their import with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from tests.targets import compile_unchecked
from tvm_fusion.onnx.frontend import ImportedModel, import_onnx

Dims = Sequence[int | str | None] | None


def onnx_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Dims],
    outputs: Sequence[str],
    constants: Mapping[str, np.ndarray] | None = None,
    opset: int = 17,
    dtype: int = TensorProto.FLOAT,
    listed: bool = False,
) -> onnx.ModelProto:
    """A model whose outputs have no declared shape; ``listed`` names its constants as inputs."""
    constants = constants or {}
    values = [helper.make_tensor_value_info(name, dtype, dims) for name, dims in inputs.items()]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    if listed:
        values += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in tensors]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    return helper.make_model(
        helper.make_graph(list(nodes), "test", values, results, tensors),
        opset_imports=[helper.make_operatorsetid("", opset)],
        ir_version=3 if listed else 8,
    )


def one_node(
    op_type: str,
    shape: Sequence[int],
    *constants: np.ndarray | None,
    opset: int = 17,
    listed: bool = False,
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of the one node ``op_type(x, *constants)``, called "op"."""
    names = [f"c{i}" if value is not None else "" for i, value in enumerate(constants)]
    node = helper.make_node(op_type, ["x", *names], ["y"], name="op", **attributes)
    named = {f"c{i}": value for i, value in enumerate(constants) if value is not None}
    return onnx_model([node], {"x": shape}, ["y"], named, opset, listed=listed)


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    """Normally distributed float32 values."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def int64(*values: int) -> np.ndarray:
    """A vector of int64."""
    return np.array(values, np.int64)


def run_relax(imported: ImportedModel, feeds: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compile the module by TVM's own pipeline and run it."""
    executable = compile_unchecked(imported.mod)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(value) for value in feeds])
    return [item.numpy() for item in ([result] if hasattr(result, "numpy") else result)]


def assert_same_as_onnx_runtime(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray] | None = None
) -> ImportedModel:
    """Import, run and compare; return what was imported."""
    if feeds is None:
        feeds = {
            value.name: normal(*(dim.dim_value for dim in value.type.tensor_type.shape.dim), seed=7)
            for value in model.graph.input
            if value.name not in {tensor.name for tensor in model.graph.initializer}
        }
    session = onnxruntime.InferenceSession(model.SerializeToString())
    expected = session.run(None, dict(feeds))
    shapes = {name: value.shape for name, value in feeds.items()}
    imported = import_onnx(model, shapes)
    results = run_relax(imported, list(feeds.values()))
    assert len(results) == len(expected)
    for result, reference, spec in zip(results, expected, imported.outputs, strict=True):
        assert result.shape == reference.shape == spec.shape
        np.testing.assert_allclose(result, reference, rtol=1e-4, atol=1e-5)
    return imported


def relax_ops(imported: ImportedModel) -> set[str]:
    """Names of the Relax ops that the module calls."""
    names: set[str] = set()

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            names.add(str(expr.op.name))

    relax.analysis.post_order_visit(imported.mod["main"], visit)
    return names
