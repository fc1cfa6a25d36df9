# SPDX-License-Identifier: Apache-2.0
"""Race of convolution pairs with ONNX Runtime and OpenVINO, and of fused with unfused ones.

    python examples/benchmarks/pairs.py [--quick] [--only mv2_2_1 mv2_2_2] [--resume]

The pairs are those of Table 3.2 of the dissertation on layer fusion (examples/layers.py), NCHW
tensors in and out. "tvm-fusion" fuses the pairs that its decision function chooses; further engines
fuse always and never. Prints a table and writes results/CPU/pairs.json.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from tvm_fusion.bench.race import EngineSpec, Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import (  # noqa: E402
    Results,
    finish,
    geometric_mean,
    parser,
    run_races,
)
from examples.layers import DEPTHWISE_PAIRS, PAIRS, build_pair  # noqa: E402

PLAN = Plan(rounds=15, runs=30, turn_seconds=0.06)
ENGINES = (
    EngineSpec("tvm-fusion"),
    EngineSpec("tvm-fusion", "fused", {"fuse": "all"}),
    EngineSpec("tvm-fusion", "unfused", {"fuse": "none"}),
    EngineSpec("onnxruntime"),
    EngineSpec("openvino"),
)


def faster_peer(engines: list[dict[str, Any]]) -> float:
    """Return the ratio to whichever other engine is the faster one; our own are no peers."""
    return min(engine["ratio"] for engine in engines if engine["engine"] != "tvm-fusion")


def gain(engines: list[dict[str, Any]]) -> float:
    """Return the speedup of the fused pair over the unfused one."""
    _, fused, unfused, *_ = engines
    return unfused["ratio"] / fused["ratio"]


def pairs_table(results: Results) -> Table:
    """One row a pair, and the geometric means of the ratios."""
    table = Table(title="Pairs of convolutions, batch 1, NCHW: medians in ms")
    for heading in ("pair", "first layer", "second layer"):
        table.add_column(heading)
    for engine in ENGINES:
        table.add_column(engine.title, justify="right")
    for engine in ENGINES[1:]:
        table.add_column(f"ratio to {engine.title}", justify="right")
    for heading in ("faster peer", "gain by fusion"):
        table.add_column(heading, justify="right")
    table.add_column("relative error", justify="right")
    ratios = {}
    for name, result in results.items():
        engines = result["engines"]
        ratios[name] = [engine["ratio"] for engine in engines[1:]]
        ratios[name] += [faster_peer(engines), gain(engines)]
        workload = PAIRS[name].workload
        fused = engines[0]["details"]["fused"]
        table.add_row(
            f"{name} (fused)" if fused else name,
            str(workload.layer1),
            str(workload.layer2),
            *(f"{engine['median_ms']:.3f}" for engine in engines),
            *(f"{ratio:.2f}x" for ratio in ratios[name]),
            f"{float(engines[0]['relative_error']):.1e}",
        )
    table.add_section()
    groups = {
        "depthwise": [ratios[name] for name in ratios if name in DEPTHWISE_PAIRS],
        "all": list(ratios.values()),
        "fused by decision": [
            ratios[name] for name in ratios if results[name]["engines"][0]["details"]["fused"]
        ],
    }
    for title, rows in groups.items():
        means = [geometric_mean(column) for column in zip(*rows, strict=True)]
        if rows:
            label = f"geomean {title} ({len(rows)})"
            table.add_row(label, "", "", *[""] * len(ENGINES), *means)
    return table


def main() -> int:
    """Run the benchmark; the exit code is 1 if any output is wrong."""
    description = "Race fused convolution pairs with ONNX Runtime and OpenVINO."
    arguments = parser(description, list(PAIRS), "pairs.json").parse_args()
    models = {name: functools.partial(build_pair, name) for name in PAIRS}
    results = run_races(models, ENGINES, PLAN, arguments)
    return finish(pairs_table(results), results, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
