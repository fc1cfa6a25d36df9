# SPDX-License-Identifier: Apache-2.0
"""Race of models with the tuning records of the package and without any.

    python examples/benchmarks/shipped_records.py [--quick] [--only resnet_18] [--resume]

The networks and pairs of networks.py and pairs.py that follow a record of this CPU; the others have
the same code either way. Prints a table, and which models are more than 3 % slower with records;
writes results/CPU/shipped_records.json.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

import tvm_fusion
from tvm_fusion.bench.race import EngineSpec, Plan
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.machine.host import host_info

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import (  # noqa: E402
    Results,
    finish,
    geometric_mean,
    parser,
    run_races,
)
from examples.layers import GROUPED_PAIRS, PAIRS, build_pair  # noqa: E402
from examples.models import MODELS  # noqa: E402
from examples.zoo import GROUPED  # noqa: E402

ENGINES = (
    EngineSpec("tvm-fusion", "with records"),
    EngineSpec("tvm-fusion", "without", {"records": "none"}),
)
LEAST_RATIO = 0.97
OUTPUT = "shipped_records.json"

PLAN = Plan(rounds=30, runs=30, turn_seconds=0.3)
NETWORKS = MODELS | GROUPED
EVERY_PAIR = {name: functools.partial(build_pair, name) for name in (*PAIRS, *GROUPED_PAIRS)}


def count_records(model: Any, threads: int) -> int:
    """Return how many kernels and forms of a model follow a record of the package."""
    report = tvm_fusion.explain(model, resolve("native", cores=threads))
    kernels = sum(use["record"] is not None for use in report["functions"])
    return kernels + sum(one["source"] != "model" for one in report["decisions"])


def records_table(results: Results, counts: Mapping[str, int]) -> Table:
    """One row a model: medians, and how many times as fast it is with records."""
    table = Table(title="Records of the package: medians in ms")
    table.add_column("model")
    for heading in ("records", *(engine.title for engine in ENGINES), "gain", "relative error"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        tuned, default = result["engines"]
        table.add_row(
            name,
            str(counts.get(name, "")),
            *(f"{engine['median_ms']:.3f}" for engine in (tuned, default)),
            f"{default['ratio']:.3f}x",
            f"{float(tuned['relative_error']):.1e}",
        )
    table.add_section()
    for title, models in (("networks", NETWORKS), ("pairs", EVERY_PAIR)):
        gains = [ratio_of(result) for name, result in results.items() if name in models]
        if gains:
            mean = geometric_mean(gains)
            table.add_row(f"geometric mean, {title} ({len(gains)})", "", "", "", mean)
    return table


def ratio_of(result: Mapping[str, Any]) -> float:
    """Return the time without records over that with them."""
    return float(result["engines"][1]["ratio"])


def main() -> int:
    """Run the benchmark; the exit code is 1 if any output is wrong."""
    models = NETWORKS | EVERY_PAIR
    options = parser("Race models with the package's records and without.", list(models), OUTPUT)
    arguments = options.parse_args()
    threads = arguments.threads or host_info()["physical_cores"]
    counts = {name: count_records(models[name](), threads) for name in arguments.only}
    touched = {name: models[name] for name, count in counts.items() if count}
    results = run_races(touched, ENGINES, PLAN, arguments) if touched else {}
    if not results:
        print("no record of the package is for these models on this CPU with so many threads")
        return 0
    code = finish(records_table(results, counts), results, arguments)
    slower = [name for name, result in results.items() if ratio_of(result) < LEAST_RATIO]
    print(f"more than 3 % slower with records: {', '.join(slower) or 'none'}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
