# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of SimplifyInference's rules."""

from __future__ import annotations

import numpy as np
import onnx
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from relay_passes import SimplifyInference


def dyadic(*shape: int, seed: int = 0) -> np.ndarray:
    """Random multiples of 1/8 between -2 and 2: sums and products of a few of them are exact."""
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(-16, 17, shape).astype("float32") / 8


def const(values: np.ndarray | float, dtype: str = "float32") -> relax.Expr:
    """A constant tensor, for use within TVMScript."""
    return relax.const(np.asarray(values), dtype)


def per_channel(values: np.ndarray) -> relax.Expr:
    """A constant of shape [1, C, 1, 1]."""
    return const(values.reshape(1, -1, 1, 1))


def simplify(mod: tvm.IRModule) -> tvm.IRModule:
    """Run the pass and check that it leaves its input alone and changes nothing more next time."""
    functions = dict(mod.functions_items())
    once = SimplifyInference()(mod)
    assert dict(mod.functions_items()) == functions
    tvm.ir.assert_structural_equal(SimplifyInference()(once), once)
    return once


def check(before: tvm.IRModule, expected: tvm.IRModule) -> None:
    """Check that the pass turns ``before`` into ``expected``."""
    tvm.ir.assert_structural_equal(simplify(before), expected)


def check_unchanged(mod: tvm.IRModule) -> None:
    """Check that the pass leaves ``mod`` as it is."""
    check(mod, mod)


def calls(mod: tvm.IRModule, name: str = "main") -> list[str]:
    """The names of the ops that a function calls, in order."""
    return [
        binding.value.op.name.removeprefix("relax.")
        for block in mod[name].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    ]


def onnx_model(
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray],
    inputs: dict[str, tuple[int | str, ...]],
    opset: int = 17,
) -> onnx.ModelProto:
    """A checked model of ``nodes`` whose output is called ``y``."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)
