# SPDX-License-Identifier: Apache-2.0
"""Race of a compiled MobileNet-V2 against stock TVM and ONNX Runtime.

    python examples/demo.py

Builds the network as ONNX with seeded weights, compiles it with tvm-fusion, compares its outputs
with ONNX Runtime's and lets the engines take turns, each in its own process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tvm_fusion.bench.race import TOLERANCE, Arena, EngineSpec, Plan, RaceResult, error_text
from tvm_fusion.cli.progress import progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.models import MODELS  # noqa: E402  (the checkout holds it)

ENGINES = ("tvm-fusion", "onnxruntime", "tvm")


def demo_table(result: RaceResult) -> Table:
    """One row an engine, stock TVM first and tvm-fusion last."""
    table = Table(
        title=f"{result.model} on {result.machine['cpu']}, {result.threads} threads",
        caption=f"Ratio: how many times as fast as the engine of its row {ENGINES[0]} is.",
    )
    table.add_column("engine")
    for heading in ("latency ms", "ratio", "pairs fused", "compile s", "relative error"):
        table.add_column(heading, justify="right")
    for engine in reversed(result.engines):
        details = engine.details
        table.add_row(
            engine.title,
            f"{engine.median_ms:.2f}",
            f"{engine.ratio:.2f}x",
            f"{details['fused']} of {details['pairs']}" if details else "",
            f"{engine.compile_seconds:.1f}",
            error_text(engine, result),
        )
    return table


def main() -> int:
    """Run the demo; the exit code is 1 if the outputs differ."""
    parser = argparse.ArgumentParser(description="Race tvm-fusion on MobileNet-V2.")
    parser.add_argument("--threads", type=int, help="default: all physical cores")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each engine")
    parser.add_argument("--image-size", type=int, default=224, help="pixels (default: 224)")
    arguments = parser.parse_args()
    model = MODELS["mobilenet_v2"](image_size=arguments.image_size)
    # Stock TVM takes fifty times as long as the others: it stops after a few rounds.
    plan = Plan(rounds=arguments.rounds, turn_seconds=0.25, budget_seconds=3.0)
    engines = [EngineSpec(name) for name in ENGINES]
    with progress_bar() as progress, Arena(engines, arguments.threads) as arena:
        result = arena.race(model, "MobileNet-V2", plan=plan, progress=progress)
    Console().print(demo_table(result))
    return 0 if result.engines[0].relative_error <= TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
