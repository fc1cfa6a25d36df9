# SPDX-License-Identifier: Apache-2.0
"""Choices between alternatives that were all measured: how often the faster one is named.

Pairs of convolutions, fused or not, as ``pairs.py`` raced them; and settings of the knobs of one
kernel, as ``knobs.py`` timed them. Alternatives that differ by less than 5 % do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from tvm.target import Target

from examples.benchmarks.knobs import rank_correlation
from examples.layers import workload
from relay_passes.conv2d.fusion_decision import decide
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.conv2d_knobs import Conv2DKnobs
from schedules.cpu.cost.cost_model import estimate
from schedules.cpu.cost.fused_conv2d_knobs import FusedConv2DKnobs
from schedules.workload.conv2d import from_json

LEAST = 1.05
"""Ratio of two times that differ."""


def fusion(folder: Path) -> dict[str, Any]:
    """Pairs of convolutions, from ``pairs.json``: measured and predicted gains of fusing them."""
    stored = json.loads((folder / "pairs.json").read_text())
    target = Target(
        {"kind": "llvm", "mcpu": folder.name, "num-cores": stored["settings"]["threads"]}
    )
    measured, predicted, wrong = [], [], []
    for name, result in {**stored["results"], **stored.get("groups", {})}.items():
        _, fused, unfused, *_ = result["engines"]
        measured.append(unfused["ratio"] / fused["ratio"])
        decision = decide(workload(name), target)
        predicted.append(1 + decision.gain)
        if _differ(measured[-1]) and decision.fuse != (measured[-1] > 1):
            wrong.append(name)
    different = sum(map(_differ, measured))
    correlation = rank_correlation(measured, predicted)
    return _row(different, different - len(wrong), correlation) | {"wrong": wrong}


def knobs(folder: Path) -> dict[str, Any]:
    """Settings of one kernel, two at a time, from ``knobs.json``."""
    different = right = 0
    correlations = []
    for measured, predicted in _kernels(folder):
        correlations.append(rank_correlation(measured, predicted))
        timed = zip(measured, predicted, strict=True)
        for (one, guess), (other, guessed) in combinations(timed, 2):
            if _differ(one / other):
                different += 1
                right += (one < other) == (guess < guessed)
    return _row(different, right, float(np.median(correlations)))


def _kernels(folder: Path) -> Iterator[tuple[list[float], list[float]]]:
    """Measured and predicted seconds of the settings of each kernel."""
    for result in json.loads((folder / "knobs.json").read_text())["results"].values():
        kernel, cpu = from_json(json.dumps(result["kernel"])), CPUInfo(**result["cpu"])
        kind: Any = Conv2DKnobs if len(kernel.layers) == 1 else FusedConv2DKnobs
        times, guesses = [], []
        for *values, seconds, _ in result["settings"]:
            chosen = kind(*(tuple(one) if isinstance(one, list) else one for one in values))
            times.append(float(seconds))
            guesses.append(estimate(kernel, chosen, cpu).seconds)
        if len(times) > 2:
            yield times, guesses


def _differ(ratio: float) -> bool:
    return max(ratio, 1 / ratio) >= LEAST


def _row(different: int, right: int, correlation: float) -> dict[str, Any]:
    share = round(100 * right / max(1, different), 1)
    spearman = round(correlation, 3)
    return {"different": different, "named": right, "named_percent": share, "spearman": spearman}


def choices(folder: Path) -> dict[str, dict[str, Any]]:
    """All choices that a folder of results has."""
    known = {"fused or not": (fusion, "pairs.json"), "knobs": (knobs, "knobs.json")}
    return {
        name: check(folder) for name, (check, file) in known.items() if (folder / file).is_file()
    }
