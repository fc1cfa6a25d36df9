# SPDX-License-Identifier: Apache-2.0
"""Models of ``ai.onnx.ml`` for tests, and their comparison with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

import tvm_fusion

DOMAIN = "ai.onnx.ml"
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


def node(op_type: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node of ``ai.onnx.ml``, its inputs and outputs in one text each."""
    own = {"name": f"{op_type}_{outputs.split()[0]}", "domain": DOMAIN}
    return helper.make_node(op_type, inputs.split(), outputs.split(), **own, **attributes)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    feeds: Mapping[str, np.ndarray],
    types: Mapping[str, int] | None = None,
    opsets: Mapping[str, int] | None = None,
    batch: str | None = None,
) -> onnx.ModelProto:
    """A model of some nodes whose outputs are all that no node reads, float32 unless told."""
    read = {name for each in nodes for name in each.input}
    names = [name for each in nodes for name in each.output if name not in read]
    types = types or {}
    inputs = []
    for name, value in feeds.items():
        shape = value.shape if batch is None else (batch, *value.shape[1:])
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        inputs.append(helper.make_tensor_value_info(name, kind, shape))
    outputs = [
        helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), None)
        for name in names
    ]
    graph = helper.make_graph(list(nodes), "classical", inputs, outputs)
    imports = {"": 18, DOMAIN: 3} if opsets is None else opsets
    opset_imports = [helper.make_operatorsetid(*entry) for entry in imports.items()]
    return helper.make_model(graph, opset_imports=opset_imports, ir_version=9)


def reference(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Results of ONNX Runtime on one thread: on several, it adds in an order of its own."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return list(session.run(None, dict(feeds)))


def check(
    nodes: Sequence[onnx.NodeProto],
    types: Mapping[str, int] | None = None,
    opsets: Mapping[str, int] | None = None,
    tolerance: float = 1e-5,
    **feeds: np.ndarray,
) -> None:
    """Compare all outputs of a model with those of ONNX Runtime."""
    model = model_of(nodes, feeds, types, opsets)
    found = tvm_fusion.compile(model, threads=2)(feeds)
    found = found if isinstance(found, tuple) else (found,)
    for one, other in zip(found, reference(model, feeds), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(one, other)


class RandomForest:
    """Trees whose thresholds are also values of features.

    Parameters
    ----------
    seed : int
        Seed of all choices.
    trees, depth, features : int
        Trees, their greatest depth, and numbers of a row.
    modes : sequence of str
        Modes of their nodes.
    values : sequence of float
        Thresholds.
    """

    def __init__(
        self,
        seed: int,
        trees: int = 5,
        depth: int = 4,
        features: int = 4,
        modes: Sequence[str] = MODES[:1],
        values: Sequence[float] = (-1.0, -0.5, 0.0, 0.25, 1.0),
    ) -> None:
        self._generator = np.random.default_rng(seed)
        self.features, self._modes, self._values = features, modes, values
        self.nodes: list[dict[str, Any]] = []
        for tree in range(trees):
            self._grow(tree, depth)

    def _grow(self, tree: int, depth: int) -> None:
        """Add a tree, with leaves also above its greatest depth."""
        first = len(self.nodes)
        self.nodes.append({"tree": tree, "node": 0, "depth": 0})
        position = first
        while position < len(self.nodes):
            here = self.nodes[position]
            position += 1
            is_leaf = here["depth"] == depth or self._generator.random() < 0.15 * here["depth"]
            here["mode"] = "LEAF" if is_leaf else str(self._generator.choice(self._modes))
            here["feature"] = int(self._generator.integers(self.features))
            here["value"] = float(self._generator.choice(self._values))
            here["tracks"] = int(self._generator.integers(2))
            here["true"] = here["false"] = 0
            if not is_leaf:
                for side in ("true", "false"):
                    here[side] = len(self.nodes) - first
                    child = {"tree": tree, "node": here[side], "depth": here["depth"] + 1}
                    self.nodes.append(child)

    def attributes(self, what: str, outputs: int, **others: Any) -> dict[str, Any]:
        """Attributes of a TreeEnsembleRegressor (``target``) or TreeEnsembleClassifier (``class``).

        Weights are multiples of 1/8, so that their sums are exact.
        """
        names = {"tree": "treeids", "node": "nodeids", "feature": "featureids", "mode": "modes"}
        names |= {"true": "truenodeids", "false": "falsenodeids", "value": "values"}
        names |= {"tracks": "missing_value_tracks_true"}
        found = {
            f"nodes_{name}": [entry[key] for entry in self.nodes] for key, name in names.items()
        }
        leaves = [entry for entry in self.nodes if entry["mode"] == "LEAF"]
        pairs = [(leaf, output) for leaf in leaves for output in range(outputs)]
        weights = self._generator.integers(-40, 40, len(pairs)) / 8
        found |= {
            f"{what}_treeids": [leaf["tree"] for leaf, _ in pairs],
            f"{what}_nodeids": [leaf["node"] for leaf, _ in pairs],
            f"{what}_ids": [output for _, output in pairs],
            f"{what}_weights": [float(weight) for weight in weights],
        }
        return {**found, **others}

    def rows(self, count: int, dtype: str = "float32") -> np.ndarray:
        """Rows of thresholds, numbers between them, infinities, zeros of both signs and NaN."""
        shape = (count, self.features)
        special = [*self._values, -0.0, np.inf, -np.inf, np.nan]
        chosen = self._generator.choice(special, shape)
        drawn = self._generator.standard_normal(shape)
        return np.where(self._generator.random(shape) < 0.6, chosen, drawn).astype(dtype)
