# SPDX-License-Identifier: Apache-2.0
"""Distance of five networks' kernels from this machine's limits.

    python examples/benchmarks/rooflines.py [--only resnet_18] [--threads 2]

Profiles each network fused and unfused, prints a table, and writes results/CPU/rooflines.json and
two pictures: ``rooflines_networks.png`` with every kernel of the networks, and
``rooflines_pairs.png`` with the pairs of results/CPU/pairs.json, and other engines on them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from tvm_fusion.bench.machine_limits import MachineLimits  # noqa: E402
from tvm_fusion.bench.profiler import Profile, profile  # noqa: E402
from tvm_fusion.cli.output import FILE_WIDTH  # noqa: E402
from tvm_fusion.cli.progress import progress_bar  # noqa: E402
from tvm_fusion.paths import written_aside
from tvm_fusion.runtime.thread_pool import choose_threads  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import CPU_FOLDER, save  # noqa: E402
from examples.layers import PAIRS  # noqa: E402
from examples.models import MODELS  # noqa: E402

LARGE = 2e6
"""Least FLOPs of a large convolution."""


@dataclass(frozen=True)
class Point:
    """One kernel, or one engine on a pair.

    Parameters
    ----------
    series : str
        Its name in the legend.
    intensity : float
        FLOPs a byte.
    flops_per_second : float
        The measured rate.
    """

    series: str
    intensity: float
    flops_per_second: float


def network_points(profiles: Iterable[Profile], series: str) -> list[Point]:
    """All kernels that compute anything."""
    return [
        Point(
            series,
            kernel.cost.flops / (kernel.cost.activation_bytes + kernel.cost.weight_bytes),
            kernel.cost.flops / kernel.seconds,
        )
        for profile in profiles
        for kernel in profile.kernels
        if kernel.cost.flops
    ]


def pair_points(results: dict[str, dict[str, Any]]) -> list[Point]:
    """All engines on all pairs; an engine that fuses nothing moves the intermediate as well."""
    points = []
    for name, result in results.items():
        workload = PAIRS[name].workload
        for engine in result["engines"]:
            fused = engine["details"].get("fused", 0) > 0
            moved = workload.bytes_fused() if fused else workload.bytes_unfused()
            rate = workload.flops() / (engine["median_ms"] / 1e3)
            points.append(Point(engine["title"], workload.flops() / moved, rate))
    return points


def draw(points: Sequence[Point], limits: MachineLimits, title: str, path: Path) -> None:
    """Write a roofline plot; both axes are logarithmic."""
    figure, axes = pyplot.subplots(figsize=(9, 5.5), dpi=120)
    intensities = [point.intensity for point in points]
    span = [min(intensities) / 1.5, max(intensities) * 1.5]
    for level, style in zip(limits.levels, ("-", "--", ":"), strict=True):
        corner = limits.peak_flops / level.bandwidth
        xs = [span[0], max(span[0], min(corner, span[1])), span[1]]
        ys = [min(limits.peak_flops, x * level.bandwidth) / 1e9 for x in xs]
        label = f"{level.name}: {level.bandwidth / 1e9:.0f} GB/s"
        axes.plot(xs, ys, style, color="black", linewidth=1, label=label)
    for series, marker in zip(
        dict.fromkeys(point.series for point in points), "osv^Dx", strict=False
    ):
        chosen = [point for point in points if point.series == series]
        axes.scatter(
            [point.intensity for point in chosen],
            [point.flops_per_second / 1e9 for point in chosen],
            s=18,
            marker=marker,
            alpha=0.75,
            label=series,
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="GFLOP/s", title=title)
    axes.grid(which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.tight_layout()
    with written_aside(path) as aside:
        figure.savefig(aside, format="png")
    pyplot.close(figure)


def rooflines_table(profiles: dict[str, dict[str, Profile]]) -> Table:
    """One row a network: its time, that of its kernels at the limit, and the slowest of them."""
    table = Table(title="Networks at the machine's limit")
    table.add_column("network")
    for heading in ("run, ms", "at the limit, ms", "of limit", "unfused, ms"):
        table.add_column(heading, justify="right")
    table.add_column("large convolution furthest from its limit")
    for name, both in profiles.items():
        fused, unfused = both["fused"], both["unfused"]
        limit = sum(kernel.limit_seconds for kernel in fused.kernels)
        large = [kernel for kernel in fused.kernels if "conv " in kernel.operator]
        large = [kernel for kernel in large if kernel.cost.flops >= LARGE]
        worst = min(large, key=lambda kernel: kernel.fraction)
        table.add_row(
            name,
            f"{fused.seconds * 1e3:.2f}",
            f"{limit * 1e3:.2f}",
            f"{limit / fused.seconds:.0%}",
            f"{unfused.seconds * 1e3:.2f}",
            f"{worst.operator}: {worst.fraction:.0%} ({worst.reason or 'near it'})",
        )
    return table


def main() -> int:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description="Kernels beside the machine's limits.")
    options.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    options.add_argument("--threads", type=int, help="default: all physical cores")
    options.add_argument("--runs", type=int, default=50)
    options.add_argument("--folder", type=Path, default=CPU_FOLDER, help="where to write")
    arguments = options.parse_args()
    threads = choose_threads(arguments.threads)
    profiles: dict[str, dict[str, Profile]] = {}
    with progress_bar() as progress:
        for number, name in enumerate(arguments.only):
            progress(name, number, len(arguments.only))
            profiles[name] = {
                title: profile(MODELS[name](), fuse=fuse, threads=threads, runs=arguments.runs)
                for title, fuse in (("fused", "auto"), ("unfused", "none"))
            }
    record = {
        name: {key: p.to_json() for key, p in both.items()} for name, both in profiles.items()
    }
    save(arguments.folder / "rooflines.json", record)
    points = [
        point
        for title in ("fused", "unfused")
        for point in network_points((both[title] for both in profiles.values()), title)
    ]
    every = [one for both in profiles.values() for one in both.values()]
    machine = every[0].machine["cpu"]
    limits = max((one.limits for one in every), key=lambda limits: limits.peak_flops)
    title = f"Kernels of {', '.join(profiles)}\n{machine}, {threads} threads"
    draw(points, limits, title, arguments.folder / "rooflines_networks.png")
    pairs = arguments.folder / "pairs.json"
    if pairs.exists():
        results = json.loads(pairs.read_text())["results"]
        title = f"Pairs of convolutions, NCHW in and out\n{machine}, {threads} threads"
        draw(pair_points(results), limits, title, arguments.folder / "rooflines_pairs.png")
    console = Console()
    console = console if console.is_terminal else Console(width=FILE_WIDTH)
    console.print(rooflines_table(profiles))
    console.print(f"Written to {arguments.folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
