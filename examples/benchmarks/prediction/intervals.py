# SPDX-License-Identifier: Apache-2.0
"""Intervals of our CPU kernels, from networks that were predicted before they ran.

    python -m examples.benchmarks.prediction.intervals

Reads ``results/CPU/predict_cpu.json`` and writes figures ``network.*`` of ``machines/CPU.json``.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.benchmarks.campaign import CPU_FOLDER
from examples.benchmarks.prediction.machine_files import write_figures
from schedules.cost.cpu_kernels import CONVOLUTIONS, RESOLUTION
from schedules.cost.machine import Figure, load_machine

LEAST_NETWORKS = 3  # Networks of an operator with an interval of its own.
LEAST_SECONDS = 5e-7  # predicted; below, the clock's resolution is all of the error
ENDS = (0.1, 0.9)


class Timed(NamedTuple):
    """A kernel of a network: predicted and measured seconds."""

    network: str
    op: str
    predicted: float
    measured: float


def recorded(folder: Path) -> list[Timed]:
    """Kernels of a folder of results."""
    return timed_kernels(json.loads((folder / "predict_cpu.json").read_text())["results"])


def timed_kernels(results: Mapping[str, Mapping[str, Any]]) -> list[Timed]:
    """Kernels of the results that ``predict_cpu.py`` wrote."""
    return [
        Timed(network, op, predicted * 1e-6, measured * 1e-6)
        for network, result in results.items()
        for op, _, predicted, measured in result["rows"]
    ]


def spreads(kernels: Sequence[Timed]) -> dict[str, tuple[float, float]]:
    """Interval of measured over predicted times by operator.

    Kernels of one network err alike, and the next network is another one: of the percentiles that
    each network has, the ends are the same percentile over the networks. They enclose 1. Operators
    of few networks have none of their own; ``convolutions`` and ``loops`` hold those of all others.
    """
    groups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kernel in kernels:
        if kernel.predicted >= LEAST_SECONDS and kernel.measured > 0:
            ratio = math.log(kernel.measured / kernel.predicted)
            for name in (kernel.op, "convolutions" if kernel.op in CONVOLUTIONS else "loops"):
                groups[name][kernel.network].append(ratio)
    ends = {}
    for name, networks in groups.items():
        if name.startswith("cpu.") and len(networks) < LEAST_NETWORKS:
            continue
        low, high = (
            math.exp(np.quantile([np.quantile(each, end) for each in networks.values()], end))
            for end in ENDS
        )
        ends[name] = min(low, 1.0), max(high, 1.0)
    return ends


def is_inside(kernel: Timed, found: Mapping[str, tuple[float, float]]) -> bool:
    """Return whether the measured time lies in the interval."""
    like = "convolutions" if kernel.op in CONVOLUTIONS else "loops"
    low, high = found.get(kernel.op) or found[like]
    rounded = 0.01e-6  # Rounding of the recorded times.
    least, most = low * kernel.predicted - rounded, high * kernel.predicted + RESOLUTION
    return least <= kernel.measured <= most


def held_out(kernels: Sequence[Timed]) -> dict[str, float]:
    """Share inside, in per cent: of each network by the intervals of the others, and of all."""
    inside: dict[str, list[bool]] = defaultdict(list)
    for network in dict.fromkeys(kernel.network for kernel in kernels):
        found = spreads([kernel for kernel in kernels if kernel.network != network])
        inside[network] += [is_inside(k, found) for k in kernels if k.network == network]
    inside["all"] = [one for group in list(inside.values()) for one in group]
    return {name: round(100 * float(np.mean(group)), 1) for name, group in inside.items()}


def main() -> None:
    """Write the figures of this CPU's family."""
    kernels = recorded(CPU_FOLDER)
    networks = len({kernel.network for kernel in kernels})
    origin = f"fitted: predict_cpu.py, {len(kernels)} kernels of {networks} networks"
    figures = {
        f"network.{name}.{end}": Figure(float(f"{value:.3g}"), origin)
        for name, ends in spreads(kernels).items()
        for end, value in zip(("low", "high"), ends, strict=True)
    }
    write_figures(load_machine(CPU_FOLDER.name), figures, "network.")
    print(held_out(kernels))


if __name__ == "__main__":
    main()
