# SPDX-License-Identifier: Apache-2.0
"""Race of tvm-fusion by ``torch.compile`` with PyTorch's eager mode and Inductor on torchvision.

    python examples/benchmarks/torch_models.py [--quick] [--only resnet18] [--resume]

Prints a table and writes results/CPU/torch.json. Needs the extra ``torch`` and torchvision;
Inductor, which freezes the weights, needs a C++ compiler. Compiling is not timed with the runs.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from rich.table import Table

from tvm_fusion.bench.race import EngineSpec, Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks import torch_engines  # noqa: E402
from examples.benchmarks.campaign import (  # noqa: E402
    Results,
    finish,
    geometric_mean,
    parser,
    run_races,
)

MODELS = (
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mnasnet1_0",
    "efficientnet_b0",
    "squeezenet1_1",
    "shufflenet_v2_x1_0",
)
ENGINES = ("torch-tvm_fusion", "torch-inductor", "torch-eager")
PLAN = Plan(rounds=15, runs=10, turn_seconds=0.3)


def torch_table(results: Results) -> Table:
    """One row a model: latencies, and how many times as fast tvm-fusion is."""
    shape = "x".join(map(str, torch_engines.IMAGE[1]))
    table = Table(title=f"Models of torchvision, input {shape}, medians in ms")
    table.add_column("model")
    first = next(iter(results.values()))["engines"]
    for engine in first:
        table.add_column(engine["title"], justify="right")
    for engine in first[1:]:
        table.add_column(f"ratio to {engine['title']}", justify="right")
    for heading in ("compile s, each", "relative error"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        engines = result["engines"]
        table.add_row(
            name,
            *(f"{engine['median_ms']:.2f}" for engine in engines),
            *(f"{engine['ratio']:.2f}x" for engine in engines[1:]),
            ", ".join(f"{engine['compile_seconds']:.0f}" for engine in engines),
            f"{float(engines[0]['relative_error']):.1e}",
        )
    table.add_section()
    columns = zip(*[[e["ratio"] for e in r["engines"][1:]] for r in results.values()], strict=True)
    table.add_row("geometric mean", *[""] * len(first), *map(geometric_mean, columns))
    return table


def main() -> int:
    """Run the benchmark; the exit code is 1 if any output is wrong."""
    options = parser("Race tvm-fusion on models of torchvision.", MODELS, "torch.json")
    arguments = options.parse_args()
    models = {name: functools.partial(str, name) for name in MODELS}
    engines = [EngineSpec(name) for name in ENGINES]
    results = run_races(models, engines, PLAN, arguments, fresh=True)
    return finish(torch_table(results), results, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
