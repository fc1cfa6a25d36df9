# SPDX-License-Identifier: Apache-2.0
"""Figures of PyTorch's kernels from their measured times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedules.cost.kernel_call import KernelCall
from schedules.cost.kernels.cpu_library import PREFIX, TERMS, family, terms
from schedules.cost.machine import Machine

NARROWEST = 1.15
"""Least ratio of an interval's end to the prediction: in a network kernels vary more than alone."""
ENDS = (10, 90)
FEWEST = 4
"""Measured sizes below which nothing is left out."""
UNKNOWN = (0.5, 2.0)
"""Interval of so few."""


def library_figures(
    machine: Machine, timed: Sequence[tuple[KernelCall, float]]
) -> dict[str, float]:
    """Fit each family of kernels: its three terms, their interval, and the most bytes measured."""
    families: dict[str, list[tuple[KernelCall, float]]] = {}
    for call, seconds in timed:
        families.setdefault(family(call), []).append((call, seconds))
    found: dict[str, float] = {}
    for name, group in families.items():
        group.sort(key=lambda one: one[0].moved_bytes)
        rows = np.array([terms(call, machine) for call, _ in group])
        times = np.array([seconds for _, seconds in group])
        low, high = _interval(rows, times)
        figures = dict(zip(TERMS, _factors(rows, times).tolist(), strict=True))
        figures |= {"low": low, "high": high}
        figures["most"] = max(call.moved_bytes for call, _ in group)
        found |= {f"{PREFIX}.{name}.{key}": one for key, one in figures.items() if one > 0}
    return found


def _factors(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Factors of three terms, none negative, with the least squares of relative errors."""
    from scipy.optimize import nnls  # of the extra torch, as PyTorch's kernels are

    return nnls(rows / seconds[:, None], np.ones(len(seconds)))[0]


def _interval(rows: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Percentiles of measured over predicted times, each but the first and last by the others."""
    ratios = []
    for left_out in range(1, len(seconds) - 1) if len(seconds) >= FEWEST else ():
        others = np.arange(len(seconds)) != left_out
        predicted = rows[left_out] @ _factors(rows[others], seconds[others])
        ratios.append(seconds[left_out] / max(float(predicted), 1e-9))
    low, high = np.percentile(ratios, ENDS) if ratios else UNKNOWN
    return min(float(low), 1 / NARROWEST), max(float(high), NARROWEST)
