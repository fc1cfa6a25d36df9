# SPDX-License-Identifier: Apache-2.0
"""Race of tvm-fusion with ONNX Runtime on recurrent layers.

    python examples/benchmarks/recurrent.py [--quick] [--only lstm_b8_h512] [--resume]

Each model is one layer of 64 steps with random weights; inputs have as many features as the layer
has units. A GRU resets after the product, as PyTorch's does, but for those named ``before``. Prints
a table and writes results/CPU/recurrent.json.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tvm_fusion.bench.race import EngineSpec, Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import finish, parser, peer_table, run_races  # noqa: E402

PLAN = Plan(rounds=15, runs=10, turn_seconds=0.25, budget_seconds=8.0)
STEPS = 64
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True)
class Layer:
    """A recurrent layer.

    Parameters
    ----------
    kind : str
        ``LSTM``, ``GRU`` or ``RNN``.
    batch, hidden : int
        Sequences, and units.
    resets_before : bool
        Whether a GRU resets the state before the product.
    directions : int
        2 for both.
    """

    kind: str
    batch: int
    hidden: int
    resets_before: bool = False
    directions: int = 1

    def build(self) -> onnx.ModelProto:
        """The model."""
        generator = np.random.default_rng(0)
        rows, scale = GATES[self.kind] * self.hidden, self.hidden**-0.5
        shapes = {
            "W": (self.directions, rows, self.hidden),
            "R": (self.directions, rows, self.hidden),
            "B": (self.directions, 2 * rows),
        }
        weights = {
            name: generator.uniform(-scale, scale, shape).astype(np.float32)
            for name, shape in shapes.items()
        }
        attributes: dict[str, Any] = {"hidden_size": self.hidden}
        if self.kind == "GRU":
            attributes["linear_before_reset"] = int(not self.resets_before)
        if self.directions == 2:
            attributes["direction"] = "bidirectional"
        node = helper.make_node(self.kind, ["x", *weights], ["y"], **attributes)
        shape = (STEPS, self.batch, self.hidden)
        result = (STEPS, self.directions, self.batch, self.hidden)
        graph = helper.make_graph(
            [node],
            "layer",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, result)],
            [numpy_helper.from_array(value, name) for name, value in weights.items()],
        )
        opset = [helper.make_operatorsetid("", 17)]
        return helper.make_model(graph, opset_imports=opset, ir_version=8)


LAYERS = {
    **{
        f"{kind.lower()}_b{batch}_h{hidden}": Layer(kind, batch, hidden)
        for kind in GATES
        for batch, hidden in ((1, 128), (1, 512), (8, 512))
    },
    "lstm_b1_h1024": Layer("LSTM", 1, 1024),
    "lstm_b32_h256": Layer("LSTM", 32, 256),
    "lstm_b8_h512_both": Layer("LSTM", 8, 512, directions=2),
    "gru_b1_h512_before": Layer("GRU", 1, 512, resets_before=True),
    "gru_b8_h512_before": Layer("GRU", 8, 512, resets_before=True),
}
"""Layers by name: kind, batch and units."""


def main() -> int:
    """Run the benchmark; the exit code is 1 if any output is wrong."""
    options = parser("Race tvm-fusion on recurrent layers.", list(LAYERS), "recurrent.json")
    arguments = options.parse_args()
    models = {name: functools.partial(Layer.build, layer) for name, layer in LAYERS.items()}
    engines = [EngineSpec(name) for name in ("tvm-fusion", "onnxruntime")]
    results = run_races(models, engines, PLAN, arguments, fresh=True)
    title = f"Recurrent layers of {STEPS} steps"
    return finish(peer_table(results, title, "layer"), results, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
