# SPDX-License-Identifier: Apache-2.0
"""Race of convolution pairs with ONNX Runtime and OpenVINO, and of fused with unfused ones.

    python examples/benchmarks/pairs.py [--quick] [--only mv2_2_1 mv2_2_2] [--resume]

The pairs are those of Table 3.2 of the dissertation on layer fusion, and below them others whose
layers have groups or large kernels (examples/layers.py), NCHW tensors in and out. "tvm-fusion"
fuses the pairs that its decision function chooses; further engines fuse always and never. Prints a
table and writes results/CPU/pairs.json, which has the others in a section "groups".
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
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
from examples.layers import DEPTHWISE_PAIRS, GROUPED_PAIRS, PAIRS, build_pair, workload  # noqa: E402

PLAN = Plan(rounds=15, runs=30, turn_seconds=0.06)
ENGINES = (
    EngineSpec("tvm-fusion"),
    EngineSpec("tvm-fusion", "fused", {"fuse": "all"}),
    EngineSpec("tvm-fusion", "unfused", {"fuse": "none"}),
    EngineSpec("tvm-fusion", "aligned inputs", aligned=True),
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


def pairs_table(results: Results, grouped: Results) -> Table:
    """One row a pair, and the geometric means of the ratios: of the dissertation's, of others."""
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
    _add_rows(table, results)
    depthwise = [one for name, one in results.items() if name in DEPTHWISE_PAIRS]
    every = list(results.values())
    chosen = [one for one in every if one["engines"][0]["details"]["fused"]]
    for title, group in (("depthwise", depthwise), ("all", every), ("fused by decision", chosen)):
        _add_means(table, title, group)
    table.add_section()
    _add_rows(table, grouped)
    _add_means(table, "with groups", list(grouped.values()))
    return table


def _ratios(engines: list[dict[str, Any]]) -> list[float]:
    """The columns of ratios."""
    return [*(engine["ratio"] for engine in engines[1:]), faster_peer(engines), gain(engines)]


def _add_rows(table: Table, results: Results) -> None:
    for name, result in results.items():
        engines, shapes = result["engines"], workload(name)
        fused = engines[0]["details"]["fused"]
        table.add_row(
            f"{name} (fused)" if fused else name,
            str(shapes.layer1),
            str(shapes.layer2),
            *(f"{engine['median_ms']:.3f}" for engine in engines),
            *(f"{ratio:.2f}x" for ratio in _ratios(engines)),
            f"{float(engines[0]['relative_error']):.1e}",
        )
    table.add_section()


def _add_means(table: Table, title: str, results: Sequence[dict[str, Any]]) -> None:
    """A row of geometric means, unless there is no pair."""
    if results:
        rows = [_ratios(result["engines"]) for result in results]
        means = [geometric_mean(column) for column in zip(*rows, strict=True)]
        table.add_row(f"geomean {title} ({len(rows)})", "", "", *[""] * len(ENGINES), *means)


def main() -> int:
    """Run the benchmark; the exit code is 1 if any output is wrong."""
    description = "Race fused convolution pairs with ONNX Runtime and OpenVINO."
    names = [*PAIRS, *GROUPED_PAIRS]
    arguments = parser(description, names, "pairs.json").parse_args()
    results, grouped = (
        run_races(
            {name: functools.partial(build_pair, name) for name in pairs},
            ENGINES,
            PLAN,
            arguments,
            section=section,
        )
        for section, pairs in (("results", PAIRS), ("groups", GROUPED_PAIRS))
    )
    return finish(pairs_table(results, grouped), results | grouped, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
