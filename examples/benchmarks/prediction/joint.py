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
from scipy.optimize import least_squares
from scipy.spatial import cKDTree

from examples.benchmarks.prediction.data import (
    Sweep,
    attention_sweeps,
    errors,
    joint_gemm_sweeps,
)
from examples.benchmarks.prediction.machine_files import write_figures
from schedules.cost.attention import ATTENTION
from schedules.cost.gemm import JOINT
from schedules.cost.kernel_call import element_bytes
from schedules.cost.learned import APART, FARTHER, LearnedKernel, Limits, limits
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

PARAMETERS: dict[str, Any] = {
    "rounds": 300,
    "max_depth": 0,
    "grow_policy": "lossguide",
    "max_leaves": 200,
    "eta": 0.08,
    "min_child_weight": 4,
}
DOUBTED: dict[str, Any] = {**PARAMETERS, "rounds": 200, "eta": 0.12}
"""The same of models that are trained to be doubted."""

FAR_PARAMETERS: dict[str, Any] = {"rounds": 100, "max_depth": 5, "eta": 0.08, "min_child_weight": 4}
INNER_PARAMETERS: dict[str, Any] = {**FAR_PARAMETERS, "rounds": 60, "eta": 0.12}
LEAST_ALONE = 0.02
"""Least share of a launch that is no latency."""
LAW_ROWS = 12_000
TRUST = 0.5
"""Share of what trees correct in a law that counts on a machine of another family."""
DOUBTED_ROWS = 40_000
"""Rows that teach a model which is trained to be doubted, about."""
BINS = 6
LEAST_LAUNCHES = 20
"""Launches of a family in a range, fewer of which say nothing."""
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

    @property
    def target(self) -> np.ndarray:
        """(launches,) logarithms that trees learn."""
        return np.log(self.seconds / self.base)

    @property
    def weight(self) -> np.ndarray:
        """(launches,) share of a time that its correction changes."""
        return np.ones(len(self.seconds))

    def corrected(self, which: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Seconds of the rows of a mask, from what trees say of them."""
        return self.base[which] * np.exp(found)


@dataclass(frozen=True)
class InnerRows(Rows):
    """Launches of which trees correct the roofline alone.

    Parameters
    ----------
    parts : np.ndarray
        (3, launches) seconds: harness, latency and roofline.
    """

    parts: np.ndarray

    @property
    def _alone(self) -> np.ndarray:
        return np.maximum(self.seconds - self.parts[1], LEAST_ALONE * self.seconds)

    @property
    def target(self) -> np.ndarray:
        """(launches,) logarithms that trees learn."""
        return np.log(self._alone / self.parts[2])

    @property
    def weight(self) -> np.ndarray:
        """(launches,) share of a time that its correction changes."""
        return self._alone / self.seconds

    def corrected(self, which: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Seconds of the rows of a mask, from what trees say of them."""
        harness, latency, roofline = self.parts[:, which]
        return np.maximum(harness, latency + roofline * np.exp(found))


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
    floors: dict[int, tuple[float, float]] = {}
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
            floors[which] = (0.0, least) if sweep.dtype == "float16" else (least, least / 2)
    both = [floors.get(which, (0.0, 0.0)) for which in range(max(floors) + 1)]
    return np.array([one for one, _ in both]), np.array([one for _, one in both])


def fit_law(kernel: LearnedKernel, base: Callable[[np.ndarray], np.ndarray], sweep: Sweep):
    """Constants of a kernel's law, by robust least squares of logarithms; few launches count more.

    Parameters
    ----------
    kernel : LearnedKernel
        Its law and where to begin.
    base : Callable
        (launches,) seconds with harness, from those without.
    sweep : Sweep
        Measured launches.
    """
    bounds, width = machine_limits(sweep), element_bytes(sweep.dtype)
    _, index, count = np.unique(
        np.char.add(sweep.machine, sweep.part.astype(str)), return_inverse=True, return_counts=True
    )
    weight = np.sqrt((1 / np.sqrt(count))[index])
    weight /= weight.mean()

    def error(constants: np.ndarray) -> np.ndarray:
        alone = kernel.unhindered(sweep.sizes, bounds, width, np.exp(constants))
        return weight * np.log(base(alone) / sweep.seconds)

    begin, range_ = np.log(kernel.start), np.log(1e3)
    ends = begin - range_, begin + range_
    found = least_squares(error, begin, loss="soft_l1", f_scale=0.1, max_nfev=40, bounds=ends)
    return np.exp(found.x)


def bases_of(
    kernel: LearnedKernel,
    sweep: Sweep,
    bases: tuple[np.ndarray, np.ndarray],
    law: np.ndarray,
    known_floor: bool = True,
) -> np.ndarray:
    """Seconds that trees correct; without floors every machine has the usual one, as a new one."""
    alone = kernel.unhindered(sweep.sizes, machine_limits(sweep), element_bytes(sweep.dtype), law)
    return with_harness(kernel, sweep, bases, known_floor, bool(len(law)))(alone)


def with_harness(
    kernel: LearnedKernel,
    sweep: Sweep,
    bases: tuple[np.ndarray, np.ndarray],
    known_floor: bool,
    is_law: bool,
) -> Callable[[np.ndarray], np.ndarray]:
    """Make the function that adds the harness to times of kernels."""
    harness, latency = floors_of(kernel, sweep, bases, known_floor)
    if is_law:
        latency = kernel.harness_share * harness
    return lambda alone: np.maximum(harness, latency + alone)


def floors_of(
    kernel: LearnedKernel, sweep: Sweep, bases: tuple[np.ndarray, np.ndarray], known_floor: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Harness and latency of each launch, by its machine's own floor where that counts."""
    bounds, group = machine_limits(sweep), kernel.group(sweep.sizes)
    own = (bounds.floor > 0) & (bases[0][group] > 0) & known_floor
    harness = np.where(own, bounds.floor, bases[0][group])
    return harness, np.where(own, bounds.floor / 2, bases[1][group])


def rows_of(
    kernel: LearnedKernel,
    sweeps: Sequence[Sweep],
    bases: tuple[np.ndarray, np.ndarray],
) -> Rows:
    """Rows of sweeps, whose base is that of the roofline."""
    parts = []
    for sweep in sweeps:
        bounds, width = machine_limits(sweep), element_bytes(sweep.dtype)
        roofline = bounds.roofline(*kernel.work(sweep.sizes, width))
        figures = np.stack([getattr(bounds, name) for name in LIMITS[:5]], axis=1)
        parts.append(
            Rows(
                kernel.features(sweep.sizes, bounds, roofline, width).astype(np.float32),
                sweep.seconds,
                bases_of(kernel, sweep, bases, NEVER),
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


def boosted(rows: Rows, taught: np.ndarray, chosen: dict[str, Any]) -> xgboost.Booster:
    """Trees taught by the rows of a mask; few launches of a machine count more, each."""
    names = np.char.add(rows.machine[taught], rows.dtype[taught])
    _, index, count = np.unique(names, return_inverse=True, return_counts=True)
    weight = (1 / np.sqrt(count))[index] * rows.weight[taught]
    target = rows.target[taught]
    parameters: dict[str, Any] = {"tree_method": "hist", "subsample": 0.8, "nthread": 1}
    parameters |= {"colsample_bynode": 0.5, "base_score": float(target.mean()), "max_bin": 64}
    parameters |= chosen
    rounds = int(parameters.pop("rounds"))
    matrix = xgboost.DMatrix(rows.features[taught], target, weight=weight / weight.mean())
    return xgboost.train(parameters, matrix, rounds)


def predicted(
    trees: xgboost.Booster, rows: Rows, which: np.ndarray, trust: float = 1.0
) -> np.ndarray:
    """Seconds of the rows of a mask, of whose correction a share counts."""
    found = trees.predict(xgboost.DMatrix(rows.features[which]))
    return rows.corrected(which, trust * found)


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


def envelope(
    ratio: np.ndarray, base: np.ndarray, family: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges and percentiles as :func:`factors` has them, the widest of any family.

    Launches of one family err alike, so that a new one is another draw of families, not of
    launches: an interval holds what any of those left out needed, and more the fewer they are.
    """
    edges, below, above = factors(ratio, base, FAR_ENDS)
    which = np.searchsorted(edges, base)
    for name in np.unique(family):
        for at in np.unique(which):
            mine = ratio[(family == name) & (which == at)]
            if len(mine) >= LEAST_LAUNCHES:
                low, high = np.percentile(mine, FAR_ENDS)
                below[at], above[at] = min(below[at], low), max(above[at], high)
    wider = 1 + 1 / len(np.unique(family))
    return edges, below**wider, above**wider


def spreads(
    ratio: np.ndarray, base: np.ndarray, name: np.ndarray, ends: tuple[np.ndarray, ...]
) -> dict[str, float]:
    """Exponents of factors, as :func:`factors` has them, that hold enough of each name."""
    edges, below, above = ends
    at = np.searchsorted(edges, base)
    limit = np.where(ratio < 1, np.minimum(below[at], 0.999), np.maximum(above[at], 1.001))
    needed = np.log(ratio) / np.log(limit)
    share = SIZE_ENDS[1] - SIZE_ENDS[0]
    return {
        str(each): round(float(np.percentile(needed[name == each], share)), 3)
        for each in np.unique(name)
    }


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

    @property
    def name(self) -> np.ndarray:
        """(launches,) names of machine and type."""
        return np.char.add(np.char.add(self.machine, " "), self.dtype)

    def errors(self) -> list[dict[str, Any]]:
        """Errors by machine, type and part, with the share inside intervals of other families."""
        low, high = self.intervals()
        rows = []
        for key in sorted(set(zip(self.machine, self.dtype, self.part, strict=True))):
            mine = (self.machine == key[0]) & (self.dtype == key[1]) & (self.part == key[2])
            inside = (low <= self.seconds) & (self.seconds <= high)
            names = ("machine", "dtype", "part")
            row: dict[str, Any] = dict(zip(names, map(str, key), strict=True))
            row |= errors(self.seconds[mine], self.predicted[mine])
            row["inside"] = round(100 * float(inside[mine].mean()), 1)
            width = np.median((high - low)[mine] / self.predicted[mine])
            rows.append(row | {"width": round(100 * float(width), 1)})
        return rows

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
        by_size = self.left_out == "sizes"
        groups = np.arange(len(ratio)) % 2 if by_size else self.family
        for group in np.unique(groups):
            mine = groups == group
            others = ~mine & (by_size | ~np.isin(self.machine, OTHER_VENDORS))
            others = others if others.any() else mine
            if by_size:
                bounds = factors(ratio[others], self.base[others], SIZE_ENDS)
                known = spreads(ratio[others], self.base[others], self.name[others], bounds)
                spread = np.array([known.get(each, 1.0) for each in self.name[mine].tolist()])
            else:
                bounds = envelope(ratio[others], self.base[others], self.family[others])
                spread = np.maximum(1.0, self.distance[mine] / APART)
            edges, below, above = bounds
            at = np.searchsorted(edges, self.base[mine])
            if group in OTHER_VENDORS:
                spread = spread * FARTHER
            low[mine] *= below[at] ** spread
            high[mine] *= above[at] ** spread
        return low, high


SIZE_ENDS, FAR_ENDS = (8, 92), (6, 94)
"""Percentiles: a little more than four fifths, of other sizes, and of each family left out."""


def split_sizes(rows: Rows, trees: xgboost.Booster) -> Split:
    """The sizes that the model of the package was not taught."""
    near = np.zeros(int(rows.held.sum()))
    for dtype in np.unique(rows.dtype):
        known = cKDTree(np.unique(rows.place[~rows.held & (rows.dtype == dtype)], axis=0))
        mine = rows.dtype[rows.held] == dtype
        near[mine] = known.query(rows.place[rows.held][mine])[0]
    return _split("sizes", rows, rows.held, predicted(trees, rows, rows.held), near, NEVER)


def split_groups(
    rows: Rows,
    group: np.ndarray,
    left_out: str,
    teach: Callable[[np.ndarray], tuple[xgboost.Booster, Rows]],
    trust: float = 1.0,
) -> Split:
    """Each group as predicted by a model that was taught by the others.

    Parameters
    ----------
    rows : Rows
        All launches.
    group : np.ndarray
        (launches,) names.
    left_out : str
        What groups are.
    teach : Callable
        Trees taught by the rows of a mask, and how a model without the others sees all rows.
    trust : float
        Share of what they correct that counts.
    """
    estimate = np.zeros(len(rows.seconds))
    near, base = estimate.copy(), estimate.copy()
    sample = np.arange(len(estimate)) % max(1, len(estimate) // DOUBTED_ROWS) == 0
    for name in np.unique(group):
        out = group == name
        trees, seen = teach(~out & sample)
        estimate[out], base[out] = predicted(trees, seen, out, trust), seen.base[out]
        known = np.unique(rows.figures[~out], axis=0)
        near[out] = cKDTree(known).query(rows.figures[out])[0]
    every = np.ones(len(estimate), bool)
    return _split(left_out, replace(rows, base=base), every, estimate, near, group)


def _split(
    left_out: str,
    rows: Rows,
    which: np.ndarray,
    estimate: np.ndarray,
    near: np.ndarray,
    group: np.ndarray,
) -> Split:
    machine, dtype, part = (x[which] for x in (rows.machine, rows.dtype, rows.part))
    seconds, base = rows.seconds[which], rows.base[which]
    family = group if len(group) else machine
    return Split(left_out, machine, dtype, part, seconds, estimate, base, near, family)


@dataclass(frozen=True)
class JointModel:
    """A trained model with its splits.

    Parameters
    ----------
    trees : xgboost.Booster
        Taught by four fifths of the sizes.
    far : xgboost.Booster
        Trees for machines that no row is of.
    law : np.ndarray
        Constants that the far trees correct; none where they correct the roofline.
    usual : float, optional
        Least seconds of a launch on a machine whose floor is not known, if not the harness.
    harness, latency : np.ndarray
        Seconds by group.
    splits : tuple of Split
        Splits by sizes, machines and, where there are several, harnesses.
    report : dict
        What its file says.
    """

    trees: xgboost.Booster
    far: xgboost.Booster
    law: np.ndarray
    usual: float | None
    harness: np.ndarray
    latency: np.ndarray
    splits: tuple[Split, ...]
    report: dict[str, Any]

    def intervals(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Arrays of the model files: intervals of machines in the data, and of all others."""
        sizes, machines = self.splits[:2]
        near = factors(sizes.seconds / sizes.predicted, sizes.base, SIZE_ENDS)
        like = ~np.isin(machines.machine, OTHER_VENDORS)
        ratio = (machines.seconds / machines.predicted)[like]
        far = envelope(ratio, machines.base[like], machines.family[like])
        names = ("edges", "below", "above")
        return dict(zip(names, near, strict=True)), dict(zip(names, far, strict=True))


@dataclass(frozen=True)
class Teacher:
    """Training of a law, and trees that correct it, for machines that no row is of.

    Parameters
    ----------
    kernel : LearnedKernel
        The kernel.
    sweeps : Sequence of Sweep
        All launches.
    bases : tuple of np.ndarray
        Harness and latency by group.
    rows : Rows
        Rows of the sweeps.
    """

    kernel: LearnedKernel
    sweeps: Sequence[Sweep]
    bases: tuple[np.ndarray, np.ndarray]
    rows: Rows

    def law(self, taught: np.ndarray) -> np.ndarray:
        """Constants by the rows of a mask."""
        (sweep,) = self.sweeps
        at = np.flatnonzero(taught)
        part = sweep[at[:: max(1, len(at) // LAW_ROWS)]]
        return fit_law(self.kernel, with_harness(self.kernel, part, self.bases, True, True), part)

    def __call__(self, taught: np.ndarray) -> tuple[xgboost.Booster, Rows]:
        """Trees of the rows of a mask, and the rows as new machines have them."""
        taught = taught & ~np.isin(self.rows.machine, OTHER_VENDORS)
        law = self.law(taught)
        known, new = (
            np.concatenate(
                [bases_of(self.kernel, s, self.bases, law, is_known) for s in self.sweeps]
            )
            for is_known in (True, False)
        )
        features = self.rows.features[:, : self.kernel.of_new_machines]
        trees = boosted(replace(self.rows, base=known, features=features), taught, FAR_PARAMETERS)
        return trees, replace(self.rows, base=new, features=features)


def inner_rows(
    kernel: LearnedKernel, sweep: Sweep, bases: tuple[np.ndarray, np.ndarray]
) -> InnerRows:
    """Rows of a sweep as :data:`LearnedKernel.far` sees them."""
    bounds, width = machine_limits(sweep), element_bytes(sweep.dtype)
    roofline = bounds.roofline(*kernel.work(sweep.sizes, width))
    harness, latency = floors_of(kernel, sweep, bases, True)
    rows = rows_of(kernel, [sweep], bases)
    shared = {name: getattr(rows, name) for name in Rows.__dataclass_fields__}
    shared["base"] = np.maximum(harness, latency + roofline)
    return InnerRows(**shared, parts=np.stack([harness, latency, roofline]))


@dataclass(frozen=True)
class InnerTeacher:
    """Training of trees that correct the roofline alone, for machines that no row is of.

    Parameters
    ----------
    rows : InnerRows
        Rows with the floors of their machines.
    """

    rows: InnerRows

    def usual(self, taught: np.ndarray) -> float:
        """Least seconds of a launch on a machine whose floor is not known."""
        machine, floor = self.rows.machine[taught], self.rows.parts[0][taught]
        return float(np.median([floor[machine == name][0] for name in np.unique(machine)]))

    def __call__(self, taught: np.ndarray) -> tuple[xgboost.Booster, Rows]:
        """Trees of the rows of a mask, and the rows as new machines have them."""
        taught = taught & ~np.isin(self.rows.machine, OTHER_VENDORS)
        harness, roofline = np.full(len(taught), self.usual(taught)), self.rows.parts[2]
        base = np.maximum(harness, harness / 2 + roofline)
        parts = np.stack([harness, harness / 2, roofline])
        return boosted(self.rows, taught, INNER_PARAMETERS), replace(
            self.rows, base=base, parts=parts
        )


def train_joint(kernel: str, folder: Path) -> JointModel | None:
    """Train the joint model of a kernel, and check it in three ways; None without data."""
    learned, read = KERNELS[kernel]
    sweeps = read(folder)
    if not any(sweep.dtype == "bfloat16" for sweep in sweeps):
        return None
    write_floors(learned, sweeps)
    bases = harnesses(learned, sweeps)
    rows = rows_of(learned, sweeps, bases)
    trees = boosted(rows, ~rows.held, PARAMETERS)
    teacher, far_rows = far_teacher(learned, sweeps, bases, rows)
    trust = TRUST if learned.of_new_machines else 1.0
    splits = [
        split_sizes(rows, trees),
        split_groups(far_rows, far_rows.family, "machines", teacher, trust),
    ]
    if len(sweeps) > 1:
        near = lambda taught: (boosted(rows, taught, DOUBTED), rows)  # noqa: E731
        splits.append(split_groups(rows, rows.dtype, "harnesses", near))
    taught = ~far_rows.held & ~np.isin(far_rows.machine, OTHER_VENDORS)
    far, law, usual = teacher(taught)[0], NEVER, None
    if isinstance(teacher, Teacher):
        law = teacher.law(taught)
    else:
        usual = teacher.usual(taught)
    sizes = splits[0]
    ratio = sizes.seconds / sizes.predicted
    known = spreads(ratio, sizes.base, sizes.name, factors(ratio, sizes.base, SIZE_ENDS))
    report = {
        "kernel": kernel,
        "data": "; ".join(dict.fromkeys(sweep.source for sweep in sweeps)),
        "rows": len(rows.seconds),
        "taught": {sweep.dtype: _seen(learned, sweep, known) for sweep in sweeps},
        "command": "PREDICT_DATA=DIR python examples/benchmarks/prediction/train.py",
        "xgboost": xgboost.__version__,
        "held_out": errors(splits[0].seconds, splits[0].predicted),
        "left_out": {split.left_out: split.errors() for split in splits},
        "error_by_distance": {split.left_out: split.by_distance() for split in splits},
    }
    return JointModel(trees, far, law, usual, *bases, tuple(splits), report)


def far_teacher(
    kernel: LearnedKernel,
    sweeps: Sequence[Sweep],
    bases: tuple[np.ndarray, np.ndarray],
    rows: Rows,
) -> tuple[Teacher | InnerTeacher, Rows]:
    """Who trains the model for machines that no row is of, and the rows that it is taught by."""
    if kernel.far is None:
        return Teacher(kernel, sweeps, bases, rows), rows
    (sweep,) = (sweep for sweep in sweeps if sweep.dtype == "bfloat16")
    known = inner_rows(kernel.far, sweep, bases)
    return InnerTeacher(known), known


def _seen(kernel: LearnedKernel, sweep: Sweep, known: dict[str, float]) -> dict[str, Any]:
    ranges = {
        name: [float(sweep.sizes[name].min()), float(sweep.sizes[name].max())]
        for name in kernel.sizes
    }
    machines = {name: known[f"{name} {sweep.dtype}"] for name in np.unique(sweep.machine).tolist()}
    return {"machines": machines, "ranges": ranges}
