# SPDX-License-Identifier: Apache-2.0
"""Race of tvm-fusion with ONNX Runtime on the architectures that ``torch_zoo.py`` exports.

    python examples/benchmarks/zoo.py [--quick] [--only swin_t bert] [--resume]

Models have their published sizes; language models with gigabytes of weights are smaller. Each is
exported once into ``--folder``. Prints a table and writes results/CPU/zoo.json, and a picture of
the ratios beside it. Needs the extras ``zoo`` and ``bench``.
"""

from __future__ import annotations

import functools
import statistics
import sys
from pathlib import Path
from typing import Any

import onnx
from rich.table import Table

from tvm_fusion.bench.race import EngineSpec, Plan
from tvm_fusion.paths import written_aside

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
from examples.torch_zoo import FAMILIES, TORCH_ZOO, export  # noqa: E402

PLAN = Plan(rounds=15, runs=10, turn_seconds=0.25, budget_seconds=8.0)


def exported(name: str, folder: Path) -> Path:
    """Path of a model of :data:`TORCH_ZOO`, which is exported if its file is not there.

    Parameters
    ----------
    name : str
        A key of :data:`TORCH_ZOO`.
    folder : Path
        Where the files are kept.
    """
    path = folder / f"{name}.onnx"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside:
            onnx.save(export(name, full=True).model, aside)
    return path


def ratio(result: dict[str, Any]) -> float:
    """Time of the peer over ours."""
    return result["engines"][1]["ratio"]


def zoo_table(results: Results) -> Table:
    """One row a model, a section a family: latencies, and how many times as fast tvm-fusion is."""
    headings = "compile s", "relative error"
    table = engines_table(results, "Exported architectures, medians in ms", "model", *headings)
    for family, names in FAMILIES.items():
        measured = {name: results[name] for name in names if name in results}
        if not measured:
            continue
        table.add_section()
        for name, result in measured.items():
            ours, peer = result["engines"]
            table.add_row(
                name,
                *(f"{engine['median_ms']:.2f}" for engine in (ours, peer)),
                f"{peer['ratio']:.2f}x",
                f"{ours['compile_seconds']:.1f}",
                f"{float(ours['relative_error']):.1e}",
            )
        mean = geometric_mean(map(ratio, measured.values()))
        table.add_row(f"[i]{family}, geometric mean", "", "", mean)
    table.add_section()
    table.add_row("geometric mean", "", "", geometric_mean(map(ratio, results.values())))
    return table


def plot(results: Results, path: Path) -> None:
    """Draw the ratios, a bar a model, on a logarithmic axis; the slowest is at the bottom."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = sorted((ratio(result), name) for name, result in results.items())
    ratios, names = zip(*pairs, strict=True)
    mean = statistics.geometric_mean(ratios)
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.2 * len(names)), dpi=100)
    # Bars begin at 1, where both take the same time.
    axes.barh(names, [one - 1 for one in ratios], left=1, color="tab:blue")
    axes.axvline(1, color="black", linewidth=1)
    axes.axvline(mean, color="black", linewidth=1, linestyle=":")
    axes.set_xscale("log")
    near = 0.8 * min(1, ratios[0]), 1.1 * ratios[-1]
    ticks = [tick for tick in (0.25, 0.5, 0.8, 1, 1.5, 2, 3, 4, 6, 8) if near[0] <= tick <= near[1]]
    axes.set_xticks(ticks, [f"{tick}x" for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_title(f"How many times as fast as ONNX Runtime (geometric mean {mean:.2f}x)")
    axes.margins(y=0.01)
    figure.tight_layout()
    with written_aside(path) as aside:
        figure.savefig(aside, format="png")
    pyplot.close(figure)


def main() -> int:
    """Run the benchmark; the exit code is 1 if any output is wrong."""
    options = parser("Race tvm-fusion on exported architectures.", list(TORCH_ZOO), "zoo.json")
    options.add_argument("--folder", type=Path, default=Path("build/zoo"), help="of ONNX files")
    arguments = options.parse_args()
    models = {name: functools.partial(exported, name, arguments.folder) for name in TORCH_ZOO}
    engines = [EngineSpec(name) for name in ("tvm-fusion", "onnxruntime")]
    results = run_races(models, engines, PLAN, arguments, fresh=True)
    plot(results, arguments.output.with_suffix(".png"))
    return finish(zoo_table(results), results, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
