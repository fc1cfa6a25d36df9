# SPDX-License-Identifier: Apache-2.0
"""Race of tvm-fusion with ONNX Runtime and OpenVINO on five networks, and on two with groups.

    python examples/benchmarks/networks.py [--quick] [--only resnet_18] [--resume]

Prints a table and writes results/CPU/networks.json. Peak memory is that of the engine's process;
for tvm-fusion it loads the compiled model, as a program would.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from rich.table import Table

from tvm_fusion.bench.race import EngineSpec, Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import (  # noqa: E402
    Results,
    engines_table,
    finish,
    geometric_mean,
    parser,
    run_races,
)
from examples.models import MODELS  # noqa: E402
from examples.zoo import GROUPED  # noqa: E402

PLAN = Plan(rounds=30, runs=10, turn_seconds=0.5)


def networks_table(results: Results) -> Table:
    """One row a network: latencies, how many times as fast tvm-fusion is, and peaks of memory."""
    some = next(iter(results.values()))
    first = some["engines"]
    shape = "x".join(map(str, some["inputs"][0][1]))
    headings = ("peak MiB, each", "pairs fused", "compile s", "relative error")
    table = engines_table(results, f"Networks, input {shape}, medians in ms", "network", *headings)
    for name, result in results.items():
        ours, *peers = result["engines"]
        table.add_row(
            name,
            *(f"{engine['median_ms']:.2f}" for engine in result["engines"]),
            *(f"{engine['ratio']:.2f}x" for engine in peers),
            ", ".join(f"{engine['peak_mib']:.0f}" for engine in result["engines"]),
            f"{ours['details']['fused']} of {ours['details']['pairs']}",
            f"{ours['compile_seconds']:.1f}",
            f"{float(ours['relative_error']):.1e}",
        )
    table.add_section()
    for title, names in (("geometric mean", MODELS), ("geometric mean, groups", GROUPED)):
        found = [result["engines"][1:] for name, result in results.items() if name in names]
        ratios = [[peer["ratio"] for peer in peers] for peers in found]
        if ratios:
            means = [geometric_mean(column) for column in zip(*ratios, strict=True)]
            table.add_row(title, *[""] * len(first), *means)
    return table


def main() -> int:
    """Run the benchmark; the exit code is 1 if any output is wrong."""
    networks = MODELS | GROUPED
    options = parser("Race tvm-fusion on networks.", list(networks), "networks.json")
    options.add_argument("--against", nargs="+", default=["onnxruntime", "openvino"])
    options.add_argument("--image-size", type=int, default=224, help="pixels (default: 224)")
    options.add_argument("--batch", type=int, default=1, help="images (default: 1)")
    arguments = options.parse_args()
    models = {
        name: functools.partial(build, arguments.batch, arguments.image_size)
        for name, build in networks.items()
    }
    aligned = EngineSpec("tvm-fusion", "aligned inputs", aligned=True)
    engines = [EngineSpec("tvm-fusion"), aligned, *map(EngineSpec, arguments.against)]
    results = run_races(models, engines, PLAN, arguments, fresh=True)
    return finish(networks_table(results), results, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
