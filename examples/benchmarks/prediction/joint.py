# SPDX-License-Identifier: Apache-2.0
"""Joint models: one of a kernel for all GPUs, types and harnesses, and three ways to doubt it.

A model is checked on sizes, on machines and on harnesses that it was not taught. Machines of one
family are left out together. Intervals of machines in the data come from the sizes left out, those
of all others from the machines left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xgboost
from scipy.spatial import cKDTree

from examples.benchmarks.prediction.data import (
    Sweep,
    attention_sweeps,
    errors,
    joint_gemm_sweeps,
)
from examples.benchmarks.prediction.machine_files import write_figures
from schedules.cost.features import Limits, limits
from schedules.cost.kernel_call import element_bytes
from schedules.cost.kernels.attention import ATTENTION
from schedules.cost.kernels.gemm import JOINT
from schedules.cost.learned import FARTHER, LearnedKernel
from schedules.cost.machine import Figure, load_machine

KERNELS: dict[str, tuple[LearnedKernel, Callable[[Path], list[Sweep]]]] = {
    "gemm": (JOINT, joint_gemm_sweeps),
    "attention": (ATTENTION, attention_sweeps),
}

FAMILIES = {
    **dict.fromkeys(("a100-40", "a100-80", "a100-sxm-40", "a100-sxm-80"), "a100"),
    **dict.fromkeys(("h100", "h200"), "hopper"),
    **dict.fromkeys(("b200", "gb200"), "blackwell"),
}
"""Machines that are left out together: what is known of one is known of the other."""

OTHER_VENDORS = ("b60",)
"""Machines that say nothing of how far off a new one of NVIDIA may be."""

PARAMETERS: dict[str, dict[str, float]] = {
    "gemm": {"rounds": 300, "max_depth": 8, "eta": 0.08, "min_child_weight": 4},
    "attention": {"rounds": 300, "max_depth": 8, "eta": 0.08, "min_child_weight": 4},
}
DOUBTED_ROWS = 40_000
"""About so many rows teach a model that is trained to be doubted."""
BINS = 6
NEVER = np.zeros(0)
LIMITS = ("multiprocessors", "peak", "bandwidth", "cache", "clock", "unit", "floor")


@dataclass(frozen=True)
class Rows:
    """Launches as the trees see them.

    Parameters
    ----------
    features : np.ndarray
        (launches, features) float32.
    seconds, base : np.ndarray
        (launches,): measured, and what the trees correct.
    machine, dtype, part : np.ndarray
        (launches,) names; the part is the harness, or the phase of an attention.
    held : np.ndarray
        (launches,) mask of the sizes that are left out.
    place : np.ndarray
        (launches, sizes): logarithms to base 2 of the sizes.
    figures : np.ndarray
        (launches, figures): logarithms to base 2 of the machine's.
    """

    features: np.ndarray
    seconds: np.ndarray
    base: np.ndarray
    machine: np.ndarray
    dtype: np.ndarray
    part: np.ndarray
    held: np.ndarray
    place: np.ndarray
    figures: np.ndarray

    @property
    def family(self) -> np.ndarray:
        """(launches,) names of families of machines."""
        return np.array([FAMILIES.get(name, name) for name in self.machine.tolist()])


def machine_limits(sweep: Sweep) -> Limits:
    """Limits of each launch's machine."""
    names, index = np.unique(sweep.machine, return_inverse=True)
    found = [limits(load_machine(str(name)), sweep.dtype, sweep.kernel) for name in names]
    return Limits(*(np.array([getattr(one, name) for one in found])[index] for name in LIMITS))


def write_floors(kernel: LearnedKernel, sweeps: Sequence[Sweep]) -> None:
    """Write the least launch of each machine, in the harness that replays graphs, into its file."""
    for sweep in sweeps:
        if sweep.dtype != "bfloat16":
            continue
        for name in np.unique(sweep.machine).tolist():
            least = float(np.percentile(sweep.seconds[sweep.machine == name], 0.5))
            figure = Figure(float(f"{least:.4g}"), f"fitted: {sweep.source}")
            prefix = f"time.{kernel.name}.harness"
            write_figures(load_machine(name), {prefix: figure}, prefix)


def harnesses(kernel: LearnedKernel, sweeps: Sequence[Sweep]) -> tuple[np.ndarray, np.ndarray]:
    """Least seconds of a launch by group, median over machines, and the latency within.

    Times of float16 are of kernels alone: they have no harness, and the latency is the least.
    """
    found: dict[int, tuple[float, float]] = {}
    for sweep in sweeps:
        group = kernel.group(sweep.sizes)
        for which in np.unique(group).tolist():
            least = float(
                np.median(
                    [
                        np.percentile(
                            sweep.seconds[(group == which) & (sweep.machine == name)], 0.5
                        )
                        for name in np.unique(sweep.machine[group == which])
                    ]
                )
            )
            found[which] = (0.0, least) if sweep.dtype == "float16" else (least, least / 2)
    both = [found.get(which, (0.0, 0.0)) for which in range(max(found) + 1)]
    return np.array([one for one, _ in both]), np.array([one for _, one in both])


def rows_of(
    kernel: LearnedKernel,
    sweeps: Sequence[Sweep],
    bases: tuple[np.ndarray, np.ndarray],
    known_floor: bool = True,
) -> Rows:
    """Rows of sweeps; without floors every machine has the usual one, as a new one would."""
    parts = []
    for sweep in sweeps:
        bounds, width = machine_limits(sweep), element_bytes(sweep.dtype)
        floor = bounds.floor if known_floor else np.zeros(len(sweep.seconds))
        roofline = bounds.roofline(*kernel.work(sweep.sizes, width))
        group = kernel.group(sweep.sizes)
        own = (floor > 0) & (bases[0][group] > 0)
        harness = np.where(own, floor, bases[0][group])
        latency = np.where(own, floor / 2, bases[1][group])
        figures = np.stack([getattr(bounds, name) for name in LIMITS[:5]], axis=1)
        parts.append(
            Rows(
                kernel.features(sweep.sizes, bounds, roofline, width).astype(np.float32),
                sweep.seconds,
                np.maximum(harness, latency + roofline),
                sweep.machine,
                np.full(len(sweep.seconds), sweep.dtype),
                sweep.part,
                sweep.held_out(),
                np.log2(np.stack([sweep.sizes[name] for name in kernel.sizes], axis=1)),
                np.log2(figures),
            )
        )
    fields = Rows.__dataclass_fields__
    return Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))


def boosted(rows: Rows, taught: np.ndarray, kernel: str, seed: int = 0) -> xgboost.Booster:
    """Trees taught by the rows of a mask; few launches of a machine count more, each."""
    names = np.char.add(rows.machine[taught], rows.dtype[taught])
    _, index, count = np.unique(names, return_inverse=True, return_counts=True)
    weight = (1 / np.sqrt(count))[index]
    target = np.log(rows.seconds / rows.base)[taught]
    parameters: dict[str, Any] = {"tree_method": "hist", "subsample": 0.8, "nthread": 1}
    chosen: dict[str, Any] = {"colsample_bynode": 0.5, "base_score": float(target.mean())}
    parameters |= {**chosen, "seed": seed, **PARAMETERS[kernel]}
    rounds = int(parameters.pop("rounds"))
    matrix = xgboost.DMatrix(rows.features[taught], target, weight=weight / weight.mean())
    return xgboost.train(parameters, matrix, rounds)


def predicted(trees: xgboost.Booster, rows: Rows, which: np.ndarray) -> np.ndarray:
    """Seconds of the rows of a mask."""
    found = trees.predict(xgboost.DMatrix(rows.features[which]))
    return rows.base[which] * np.exp(found)


def factors(
    ratio: np.ndarray, base: np.ndarray, ends: tuple[float, float], bins: int = BINS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges of ranges of the base, and percentiles of measured over predicted times in each."""
    edges = np.unique(np.quantile(base, np.arange(1, bins) / bins, method="lower"))
    edges = edges[edges < base.max()]
    which = np.searchsorted(edges, base)
    found = [np.percentile(ratio[which == at], ends) for at in range(len(edges) + 1)]
    below = np.array([min(low, 1.0) for low, _ in found])
    return edges, below, np.array([max(high, 1.0) for _, high in found])


@dataclass(frozen=True)
class Split:
    """Launches that a model was not taught, and what it says of them.

    Parameters
    ----------
    left_out : str
        ``sizes``, ``machines`` or ``harnesses``.
    machine, dtype, part : np.ndarray
        (launches,) names.
    seconds, predicted, base : np.ndarray
        (launches,).
    distance : np.ndarray
        (launches,) doublings of sizes, or of figures of the machine, to what was taught.
    family : np.ndarray
        (launches,) what was left out with the launch.
    """

    left_out: str
    machine: np.ndarray
    dtype: np.ndarray
    part: np.ndarray
    seconds: np.ndarray
    predicted: np.ndarray
    base: np.ndarray
    distance: np.ndarray
    family: np.ndarray

    def errors(self) -> list[dict[str, Any]]:
        """Errors by machine, type and part, with the share inside intervals of other families."""
        low, high = self.intervals()
        found = []
        for key in sorted(set(zip(self.machine, self.dtype, self.part, strict=True))):
            mine = (self.machine == key[0]) & (self.dtype == key[1]) & (self.part == key[2])
            inside = (low <= self.seconds) & (self.seconds <= high)
            names = ("machine", "dtype", "part")
            row: dict[str, Any] = dict(zip(names, map(str, key), strict=True))
            row |= errors(self.seconds[mine], self.predicted[mine])
            row["inside"] = round(100 * float(inside[mine].mean()), 1)
            width = np.median((high - low)[mine] / self.predicted[mine])
            found.append(row | {"width": round(100 * float(width), 1)})
        return found

    def by_distance(self) -> list[list[float]]:
        """Distance, and mean absolute error in per cent, of tenths of the launches by distance."""
        order = np.argsort(self.distance, kind="stable")
        error = np.abs(self.predicted / self.seconds - 1)
        found: dict[float, list[np.ndarray]] = {}
        for tenth in np.array_split(order, 10):
            found.setdefault(round(float(np.median(self.distance[tenth])), 2), []).append(tenth)
        return [
            [near, round(100 * float(error[np.concatenate(tenths)].mean()), 2)]
            for near, tenths in found.items()
        ]

    def intervals(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends by the errors of the other families, or, of sizes, by those of other rows."""
        ratio = self.seconds / self.predicted
        low, high = self.predicted.copy(), self.predicted.copy()
        groups = self.family
        if self.left_out == "sizes":
            groups = np.array(["odd", "even"])[np.arange(len(ratio)) % 2]
        for group in np.unique(groups):
            mine = groups == group
            others = ~mine
            if self.left_out != "sizes":
                others &= ~np.isin(self.machine, OTHER_VENDORS)
            others = others if others.any() else mine
            ends = SIZE_ENDS if self.left_out == "sizes" else FAR_ENDS
            edges, below, above = factors(ratio[others], self.base[others], ends)
            at = np.searchsorted(edges, self.base[mine])
            far = self.left_out != "sizes" and group in OTHER_VENDORS
            low[mine] *= below[at] ** (FARTHER if far else 1.0)
            high[mine] *= above[at] ** (FARTHER if far else 1.0)
        return low, high


SIZE_ENDS, FAR_ENDS = (8, 92), (5, 95)
"""Percentiles: a little more than four fifths, of which another machine has its share."""


def split_sizes(kernel: str, rows: Rows, trees: xgboost.Booster) -> Split:
    """The sizes that the model of the package was not taught."""
    near = np.zeros(int(rows.held.sum()))
    for dtype in np.unique(rows.dtype):
        known = cKDTree(np.unique(rows.place[~rows.held & (rows.dtype == dtype)], axis=0))
        mine = rows.dtype[rows.held] == dtype
        near[mine] = known.query(rows.place[rows.held][mine])[0]
    return _split("sizes", rows, rows.held, predicted(trees, rows, rows.held), near, NEVER)


def split_groups(
    kernel: str, rows: Rows, base: np.ndarray, group: np.ndarray, left_out: str
) -> Split:
    """Each group as predicted by a model that was taught by the others, from bases without it."""
    found = np.zeros(len(rows.seconds))
    near = np.zeros(len(rows.seconds))
    sample = np.arange(len(found)) % max(1, len(found) // DOUBTED_ROWS) == 0
    for name in np.unique(group):
        out = group == name
        trees = boosted(rows, ~out & sample, kernel)
        found[out] = predicted(trees, replace(rows, base=base), out)
        known = np.unique(rows.figures[~out], axis=0)
        near[out] = cKDTree(known).query(rows.figures[out])[0]
    return _split(left_out, rows, np.ones(len(found), bool), found, near, group)


def _split(
    left_out: str,
    rows: Rows,
    which: np.ndarray,
    found: np.ndarray,
    near: np.ndarray,
    group: np.ndarray,
) -> Split:
    machine, dtype, part = (x[which] for x in (rows.machine, rows.dtype, rows.part))
    seconds, base = rows.seconds[which], rows.base[which]
    family = group if len(group) else machine
    return Split(left_out, machine, dtype, part, seconds, found, base, near, family)


@dataclass(frozen=True)
class JointModel:
    """A trained model with its splits.

    Parameters
    ----------
    trees : xgboost.Booster
        Taught by four fifths of the sizes.
    harness, latency : np.ndarray
        Seconds by group.
    splits : tuple of Split
        By sizes, machines and, where there are several, harnesses.
    report : dict
        What its file says.
    """

    trees: xgboost.Booster
    harness: np.ndarray
    latency: np.ndarray
    splits: tuple[Split, ...]
    report: dict[str, Any]

    def intervals(self) -> dict[str, np.ndarray]:
        """Arrays of the model file: intervals of machines in the data, and of all others."""
        sizes, machines = self.splits[:2]
        near = factors(sizes.seconds / sizes.predicted, sizes.base, SIZE_ENDS)
        like = ~np.isin(machines.machine, OTHER_VENDORS)
        ratio = (machines.seconds / machines.predicted)[like]
        far = factors(ratio, machines.base[like], FAR_ENDS)
        names = ("edges", "below", "above")
        found = dict(zip(names, near, strict=True))
        return found | dict(zip((f"far_{name}" for name in names), far, strict=True))


def train_joint(kernel: str, folder: Path) -> JointModel | None:
    """Train the joint model of a kernel, and check it in three ways; None without data."""
    learned, read = KERNELS[kernel]
    sweeps = read(folder)
    if not any(sweep.dtype == "bfloat16" for sweep in sweeps):
        return None
    write_floors(learned, sweeps)
    bases = harnesses(learned, sweeps)
    rows = rows_of(learned, sweeps, bases)
    trees = boosted(rows, ~rows.held, kernel)
    new = rows_of(learned, sweeps, bases, known_floor=False).base
    splits = [
        split_sizes(kernel, rows, trees),
        split_groups(kernel, rows, new, rows.family, "machines"),
    ]
    if len(sweeps) > 1:
        splits.append(split_groups(kernel, rows, rows.base, rows.dtype, "harnesses"))
    report = {
        "kernel": kernel,
        "data": "; ".join(dict.fromkeys(sweep.source for sweep in sweeps)),
        "rows": len(rows.seconds),
        "taught": {sweep.dtype: _seen(learned, sweep) for sweep in sweeps},
        "command": "PREDICT_DATA=DIR python examples/benchmarks/prediction/train.py",
        "xgboost": xgboost.__version__,
        "held_out": errors(splits[0].seconds, splits[0].predicted),
        "left_out": {split.left_out: split.errors() for split in splits},
        "error_by_distance": {split.left_out: split.by_distance() for split in splits},
    }
    return JointModel(trees, *bases, tuple(splits), report)


def _seen(kernel: LearnedKernel, sweep: Sweep) -> dict[str, Any]:
    ranges = {
        name: [float(sweep.sizes[name].min()), float(sweep.sizes[name].max())]
        for name in kernel.sizes
    }
    return {"machines": sorted(set(sweep.machine.tolist())), "ranges": ranges}
