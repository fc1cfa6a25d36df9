# SPDX-License-Identifier: Apache-2.0
"""Fit of harness, latency and bandwidth of streaming kernels, written into the machines' files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from examples.benchmarks.prediction.data import NEUSIGHT, OPS, Sweep, row_sweeps
from examples.benchmarks.prediction.machine_files import write_figures
from schedules.cost.elementwise import SHARPNESS
from schedules.cost.machine import Figure, load_machine

ORIGIN = f"fitted: {NEUSIGHT}"
LARGE = 100e6
"""Bytes from which a launch counts for five: there are few, and they matter."""

SHORT = 16e6
"""Bytes of launches that every machine's host hides."""


def moved_bytes(sweep: Sweep) -> np.ndarray:
    """Bytes that each launch of a streaming operator moves."""
    tensors = dict(OPS.values())[sweep.kernel]
    return 4.0 * tensors * sweep.sizes["B"] * sweep.sizes["H"]


def model(parameters: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Seconds by the logarithms of harness, latency and bandwidth."""
    harness, latency, bandwidth = np.exp(parameters)
    kernel = latency + moved / bandwidth
    longer = np.maximum(kernel, harness)
    parts = (kernel / longer) ** SHARPNESS + (harness / longer) ** SHARPNESS
    return longer * parts ** (1 / SHARPNESS)


def fit(moved: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Logarithms of harness, latency and bandwidth, by robust least squares of log times."""
    weight = np.where(moved > LARGE, np.sqrt(5.0), 1.0)
    many = moved >= np.percentile(moved, 95)
    rate = np.median(moved[many] / seconds[many])
    start = np.log([seconds.min(), seconds.min() / 2, rate])
    bounds = (np.log([1e-6, 1e-7, rate / 10]), np.log([1.5 * seconds.min(), 1e-3, rate * 10]))
    solution = least_squares(
        lambda p: weight * np.log(model(p, moved) / seconds),
        start,
        bounds=bounds,
        loss="soft_l1",
        f_scale=0.02,
    )
    if moved.min() > SHORT:
        # The harness is not seen without short launches; elsewhere it is about two latencies.
        solution.x[0] = solution.x[1] + np.log(2.0)
    return solution.x


def fit_streaming(folder: Path) -> None:
    """Fit all machines that the data have, and write their figures."""
    sweeps = {name: sweep for name, sweep in row_sweeps(folder).items() if name in _NAMES}
    for name in np.unique(np.concatenate([sweep.machine for sweep in sweeps.values()])):
        figures: dict[str, Figure] = {}
        ratios = []
        for op, sweep in sweeps.items():
            part = sweep[sweep.machine == name]
            if not len(part.seconds):
                continue
            held, moved = part.held_out(), moved_bytes(part)
            found = fit(moved[~held], part.seconds[~held])
            for figure, value in zip(("harness", "latency", "bandwidth"), found, strict=True):
                figures[f"time.{op}.{figure}"] = Figure(float(np.exp(value)), ORIGIN)
            ratios.append(part.seconds[held] / model(found, moved[held]))
        figures |= _elementwise(figures, np.concatenate(ratios))
        write_figures(load_machine(str(name)), figures, "time.")


_NAMES = dict(OPS.values())


def _elementwise(figures: dict[str, Figure], ratios: np.ndarray) -> dict[str, Figure]:
    """Medians over the operators, and the interval of their held-out errors."""
    medians = {
        kind: float(np.median([f.value for name, f in figures.items() if name.endswith(kind)]))
        for kind in ("harness", "latency", "bandwidth")
    }
    low, high = np.percentile(ratios, [8, 92])
    # Other days and other cards of the type differ by two per cent at least.
    medians |= {"low": min(float(low), 0.98), "high": max(float(high), 1.02)}
    origin = ORIGIN.replace("fitted", "fitted: over the operators")
    return {f"time.elementwise.{kind}": Figure(value, origin) for kind, value in medians.items()}
