# SPDX-License-Identifier: Apache-2.0
"""Training of the kernel models from measured times.

    PREDICT_DATA=DIR python examples/benchmarks/prediction/train.py [--only gemm-float32]

Writes ``schedules/cost/models/*.npz`` with a report beside each, and the fitted figures of
streaming kernels into ``schedules/cost/machines``. Needs xgboost (the extra ``tune``). A fifth of
the sizes is never trained on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.benchmarks.prediction.data import (  # noqa: E402
    Sweep,
    conv2d_sweep,
    data_folder,
    errors,
    gemm_fp16_sweep,
    gemm_sweep,
    row_sweeps,
)
from examples.benchmarks.prediction.fit_streaming import fit_streaming  # noqa: E402
from examples.benchmarks.prediction.joint import KERNELS as JOINT_KERNELS  # noqa: E402
from examples.benchmarks.prediction.joint import (  # noqa: E402
    SIZE_ENDS,
    TRUST,
    envelope,
    factors,
    fit_law,
    machine_limits,
    train_joint,
)
from schedules.cost.elementwise import LAYER_NORM, SOFTMAX  # noqa: E402
from schedules.cost.gemm import CONV2D, GEMM, HARNESSES  # noqa: E402
from schedules.cost.learned import (  # noqa: E402
    FOLDER,
    KINDS,
    LearnedKernel,
    model_from_arrays,
    seconds,
)
from schedules.cost.trees import LEAF  # noqa: E402
from tvm_fusion.paths import written_aside

KERNELS = {kernel.name: kernel for kernel in (GEMM, CONV2D, SOFTMAX, LAYER_NORM)}
WIDTH = {"float32": 4, "float16": 2}
SEED = 0
BINS = 6
"""Ranges of the interval, by the seconds that the trees correct."""

PARAMETERS: dict[str, dict[str, Any]] = {
    "gemm": {"rounds": 400, "eta": 0.06, "min_child_weight": 4, "grow_policy": "lossguide"}
    | {"max_depth": 0, "max_leaves": 72, "max_bin": 128},
    "conv2d": {"rounds": 900, "max_depth": 5, "eta": 0.05, "colsample_bynode": 0.3},
    "softmax": {"rounds": 200, "max_depth": 6, "eta": 0.08, "max_bin": 256},
    "layer_norm": {"rounds": 200, "max_depth": 6, "eta": 0.08, "max_bin": 256},
}
"""Parameters of the trees, by kernel."""

DOUBTED: dict[str, Any] = {"rounds": 150, "eta": 0.12}
"""The same of models for GPUs never measured, and of those that are trained to be doubted."""

AVERAGED: dict[str, dict[str, Any]] = {"conv2d": {"rounds": 50, "seeds": 6}}
"""Replacements for GPUs never measured, where the draw of rows decides much: the mean of the
trees of several draws."""

SMALL = 1e5
"""Elements of rows that every machine's host hides."""

ONE_LEAF: dict[str, np.ndarray] = {
    "sizes": np.ones(1, np.int32),
    "split": np.full(1, LEAF, np.uint8),
    "bin": np.zeros(0, np.uint8),
    "leaf": np.zeros(1, np.int8),
    "scale": np.ones(1, np.float32),
    "cuts": np.zeros(0, np.float32),
    "cut_counts": np.zeros(1, np.int32),
    "base": np.zeros(1),
}
"""Trees that correct nothing."""

CONTRADICTORY = {"gemm-float32": "p4"}
"""GPU that teaches nothing about others: P4's linear layers contradict each other."""


def harness(kernel: LearnedKernel, sweep: Sweep) -> tuple[np.ndarray, np.ndarray]:
    """Least seconds by group, median over machines, and the latency within.

    The latency is half of the least time, and all that a harness took more than at the begin.
    Times of float16 are of kernels alone: no harness, and the latency is the least time.
    """
    group = kernel.group(sweep.sizes)
    floors: list[float] = []
    drift = np.zeros(len(group)) if sweep.drift is None else sweep.drift
    for which in range(int(group.max()) + 1):
        shortest = [
            np.percentile(times, 0.5)
            for machine in np.unique(sweep.machine)
            if len(times := sweep.seconds[(group == which) & (sweep.machine == machine)]) > 99
        ]
        floors.append(float(np.median(shortest)) if shortest else float(sweep.seconds.min()))
    least = np.array(floors)
    if sweep.dtype == "float16":
        return np.zeros(len(least)), least
    return least, (least + float(np.median(drift))) / 2


def arrays_of(*boosters: xgboost.Booster) -> dict[str, np.ndarray]:
    """Arrays of a model file from the mean of trained boosters, nodes breadth first."""
    learners = [json.loads(booster.save_raw("json"))["learner"] for booster in boosters]
    trees = [tree for one in learners for tree in one["gradient_booster"]["model"]["trees"]]
    learner = learners[0]  # all have the same base
    count = int(learner["learner_model_param"]["num_feature"])
    base = float(learner["learner_model_param"]["base_score"].strip("[]"))
    split: list[int] = []
    threshold: list[float] = []
    leaf: list[float] = []
    sizes = []
    for tree in trees:
        left, right = tree["left_children"], tree["right_children"]
        order = [0]
        for node in order:
            if left[node] < 0:
                split.append(LEAF)
                leaf.append(tree["split_conditions"][node])
            else:
                split.append(tree["split_indices"][node])
                threshold.append(tree["split_conditions"][node])
                order += [left[node], right[node]]
        sizes.append(len(order))
    asked = np.array([feature for feature in split if feature != LEAF], int)
    values = np.array(threshold, np.float32)
    cuts = [np.unique(values[asked == feature]) for feature in range(count)]
    chosen = np.array([np.searchsorted(cuts[f], v) for f, v in zip(asked, values, strict=True)])
    return {
        "sizes": np.array(sizes, np.int32),
        "split": np.array(split, np.uint8),
        "bin": chosen.astype(np.uint16 if chosen.max(initial=0) > 255 else np.uint8),
        **_packed(np.array(leaf) / len(boosters), (np.array(sizes) + 1) // 2),
        "cuts": _rounded_down(np.concatenate(cuts)),
        "cut_counts": np.array([len(cut) for cut in cuts], np.int32),
        "base": np.array([base]),
    }


def _packed(leaf: np.ndarray, leaves: np.ndarray) -> dict[str, np.ndarray]:
    """Leaves in steps of a 127th of the largest one of their tree."""
    largest = np.maximum.reduceat(np.abs(leaf), np.cumsum(leaves) - leaves)
    scale = np.maximum(largest / 127, 1e-12).astype(np.float32)
    return {"leaf": np.rint(leaf / np.repeat(scale, leaves)).astype(np.int8), "scale": scale}


def _rounded_down(cuts: np.ndarray) -> np.ndarray:
    """Thresholds in half precision, so that a value that is one itself still goes right."""
    if not len(cuts) or np.abs(cuts).max() > np.finfo(np.float16).max:
        return cuts
    found = cuts.astype(np.float16)
    above = found.astype(np.float32) > cuts
    found[above] = np.nextafter(found[above], np.float16(-np.inf))
    return found


def train(kernel: LearnedKernel, sweep: Sweep, changes: dict[str, Any], balanced: bool):
    """Arrays of a model trained on a sweep, intervals still open."""
    least, latency = harness(kernel, sweep)
    bounds, width = machine_limits(sweep), WIDTH[sweep.dtype]
    roofline = bounds.roofline(*kernel.work(sweep.sizes, width))
    group = kernel.group(sweep.sizes)
    base = np.maximum(least[group], latency[group] + roofline)
    rows = kernel.features(sweep.sizes, bounds, roofline, width).astype(np.float32)
    target = np.log(sweep.seconds / base)
    parameters: dict[str, Any] = {"tree_method": "hist", "subsample": 0.8, "max_bin": 64}
    parameters |= {"colsample_bynode": 0.5, "min_child_weight": 3, "nthread": 1}
    parameters |= {**PARAMETERS[kernel.name], **changes, "base_score": float(target.mean())}
    rounds, seeds = int(parameters.pop("rounds")), range(int(parameters.pop("seeds", 1)))
    weight = None
    if balanced:
        _, index, count = np.unique(sweep.machine, return_inverse=True, return_counts=True)
        weight = (1 / np.sqrt(count))[index]
        weight /= weight.mean()
    matrix = xgboost.DMatrix(rows, target, weight=weight)
    drawn = ({**parameters, "seed": SEED + each} for each in seeds)
    arrays = arrays_of(*(xgboost.train(each, matrix, rounds) for each in drawn))
    return arrays | _frame(kernel, sweep, least, latency)


def fit(kernel: LearnedKernel, sweep: Sweep) -> dict[str, np.ndarray]:
    """Arrays of a model that is a law alone, fitted to a sweep."""
    names, index = np.unique(sweep.machine, return_inverse=True)
    floors = np.array([np.percentile(sweep.seconds[sweep.machine == n], 0.5) for n in names])
    small = sweep.sizes["B"] * sweep.sizes["H"] < SMALL
    seen = [floors[at] for at, name in enumerate(names) if (small & (sweep.machine == name)).any()]
    least = np.array([np.median(seen)])
    own = floors[index]
    share = kernel.harness_share
    law = fit_law(kernel, lambda alone: np.maximum(own, share * own + alone), sweep)
    return ONE_LEAF | {"law": law} | _frame(kernel, sweep, least, share * least)


def _frame(
    kernel: LearnedKernel, sweep: Sweep, least: np.ndarray, latency: np.ndarray
) -> dict[str, np.ndarray]:
    """Harness and ranges of a model, intervals still open."""
    ranges = [sweep.sizes[name] for name in kernel.sizes]
    arrays = {"harness": least, "latency": latency, "edges": np.zeros(0)}
    arrays["low"] = np.array([values.min() for values in ranges])
    arrays["high"] = np.array([values.max() for values in ranges])
    return arrays | {"below": np.ones(1), "above": np.ones(1)}


def evaluate(kernel: LearnedKernel, arrays: dict[str, np.ndarray], sweep: Sweep):
    """Predicted seconds and bases of a sweep, by numpy."""
    found = seconds(
        kernel, model_from_arrays(arrays), sweep.sizes, machine_limits(sweep), WIDTH[sweep.dtype]
    )
    return found[0], found[1]


def intervals(
    measured: np.ndarray, predicted: np.ndarray, base: np.ndarray
) -> dict[str, np.ndarray]:
    """Factors between which the errors lie, by range of the base."""
    bins = max(1, min(BINS, len(base) // 50))
    ends = factors(measured / predicted, base, SIZE_ENDS, bins)
    return dict(zip(("edges", "below", "above"), ends, strict=True))


def train_kind(kernel: LearnedKernel, sweep: Sweep, kind: str) -> None:
    """Train one GPU's model and write it."""
    held = sweep.held_out()
    arrays = train(kernel, sweep[~held], {}, False)
    predicted, base = evaluate(kernel, arrays, sweep[held])
    arrays |= intervals(sweep.seconds[held], predicted, base)
    report: dict[str, Any] = {
        "held_out": errors(sweep.seconds[held], predicted),
        "held_out_by_part": by_part(sweep[held], predicted),
        "split": "a fifth of the sizes is held out",
        **growth(sweep),
    }
    if sweep.dtype == "float16":
        report["language_model_left_out"] = leave_one_out(kernel, sweep)
    write(kernel, sweep, kind, arrays, report)


def leave_one_out(kernel: LearnedKernel, sweep: Sweep) -> dict[str, dict[str, float]]:
    """Errors of each part, predicted by a model that is trained on the others."""
    errors_of = {}
    for part in np.unique(sweep.part):
        is_out = sweep.part == part
        arrays = train(kernel, sweep[~is_out], DOUBTED, False)
        predicted, _ = evaluate(kernel, arrays, sweep[is_out])
        errors_of[str(part)] = errors(sweep.seconds[is_out], predicted)
    return errors_of


def train_unseen(kernel: LearnedKernel, sweep: Sweep) -> None:
    """Train the model for GPUs never measured; its errors leave out one GPU each."""
    kinds = np.array([KINDS.get(name, name) for name in sweep.machine.tolist()])
    taught = kinds != CONTRADICTORY.get(f"{kernel.name}-{sweep.dtype}")
    teach = fit if kernel.law is not None else _train_all
    parts, by_gpu = [], {}
    for kind in np.unique(kinds):
        arrays = teach(kernel, sweep[(kinds != kind) & taught])
        part = sweep[kinds == kind]
        predicted, base = evaluate(kernel, arrays, part)
        parts.append((part.seconds, predicted, base, np.full(len(base), kind)))
        by_gpu[str(kind)] = errors(part.seconds, predicted)
    arrays = teach(kernel, sweep[taught])
    measured, predicted, base, kind = (np.concatenate(x) for x in zip(*parts, strict=True))
    ratio = measured / predicted
    for name, row in by_gpu.items():
        others = kind != name
        edges, below, above = envelope(ratio[others], base[others], kind[others])
        at = np.searchsorted(edges, base[~others])
        inside = (below[at] <= ratio[~others]) & (ratio[~others] <= above[at])
        row["inside"] = round(100 * float(inside.mean()), 1)
        row["width"] = round(100 * float(np.median(above[at] - below[at])), 1)
    names = ("edges", "below", "above")
    arrays |= dict(zip(names, envelope(ratio, base, kind), strict=True))
    report = {"held_out": errors(measured, predicted), "held_out_by_gpu": by_gpu}
    report["split"] = "each GPU is predicted from the others"
    write(kernel, sweep, "unseen", arrays, report)


def _train_all(kernel: LearnedKernel, sweep: Sweep) -> dict[str, np.ndarray]:
    """Trees for GPUs never measured."""
    return train(kernel, sweep, DOUBTED | AVERAGED.get(kernel.name, {}), True)


def growth(sweep: Sweep) -> dict[str, float]:
    """Growth of a launch's time from the begin of a GPU's sweep to its end, if that is known.

    It is learned from the rows that are trained on.
    """
    if sweep.drift is None:
        return {}
    return {"harness_growth_seconds": 2 * float(np.median(sweep.drift))}


def by_part(sweep: Sweep, predicted: np.ndarray) -> dict[str, dict[str, float]]:
    """Errors by operator or language model, where there are several."""
    return {
        str(part): errors(sweep.seconds[sweep.part == part], predicted[sweep.part == part])
        for part in np.unique(sweep.part)
    }


def write(
    kernel: LearnedKernel, sweep: Sweep, kind: str, arrays: dict[str, np.ndarray], report
) -> None:
    """Write a model and its report."""
    whole = {
        "kernel": kernel.name,
        "dtype": sweep.dtype,
        "machines": sorted(set(sweep.machine.tolist())),
        "data": sweep.source,
        "rows": len(sweep.seconds),
        "ranges": {
            name: [int(low), int(high)]
            for name, low, high in zip(kernel.sizes, arrays["low"], arrays["high"], strict=True)
        },
        "command": "PREDICT_DATA=DIR python examples/benchmarks/prediction/train.py",
        "xgboost": xgboost.__version__,
        **report,
    }
    _save(f"{kernel.name}-{sweep.dtype}-{kind}", arrays, whole)


def write_joint(kernel: str, folder: Path) -> None:
    """Train a joint model and write it with its report."""
    model = train_joint(kernel, folder)
    if model is None:
        return
    learned, _ = JOINT_KERNELS[kernel]
    near, far = model.intervals()
    ranges = [
        [seen["ranges"][n] for seen in model.report["taught"].values()] for n in learned.sizes
    ]
    frame = {
        "harness": model.harness,
        "latency": model.latency,
        "low": np.array([min(low for low, _ in each) for each in ranges]),
        "high": np.array([max(high for _, high in each) for each in ranges]),
    }
    trees = arrays_of(model.far)
    far |= {"law": model.law}
    if len(model.law):
        far |= {"latency": learned.harness_share * model.harness}
        trees |= {name: TRUST * trees[name] for name in ("scale", "base")}
    if model.usual is not None:
        is_graph = np.arange(len(model.harness)) == HARNESSES.index("graph")
        far |= {"harness": np.where(is_graph, model.usual, model.harness)}
        far |= {"latency": np.where(is_graph, model.usual / 2, model.latency)}
    _save_arrays(f"{kernel}-far", trees | frame | far)
    _save(f"{kernel}-joint", arrays_of(model.trees) | near | frame, model.report)


def _save_arrays(stem: str, arrays: dict[str, np.ndarray]) -> Path:
    path = FOLDER / f"{stem}.npz"
    with written_aside(path) as aside, aside.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    return path


def _save(stem: str, arrays: dict[str, np.ndarray], report: dict[str, Any]) -> None:
    path = _save_arrays(stem, arrays)
    with written_aside(path.with_suffix(".json")) as aside:
        aside.write_text(json.dumps(report, indent=1) + "\n")
    print(path.name, path.stat().st_size, json.dumps(report["held_out"]), flush=True)


def sweeps(folder: Path) -> Iterator[Sweep]:
    """All sweeps that learned models are trained from."""
    rows = row_sweeps(folder)
    found = (gemm_sweep(folder), gemm_fp16_sweep(folder), conv2d_sweep(folder))
    yield from (sweep for sweep in found if sweep is not None)
    yield from (rows[name] for name in ("softmax", "layer_norm") if name in rows)


def main() -> None:
    """Train what ``--only`` names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="KERNEL-DTYPE[-KIND], KERNEL-joint, or streaming"
    )
    only = parser.parse_args().only
    folder = data_folder()
    if folder is None:
        parser.error("PREDICT_DATA names no folder")
    if only in ("", "streaming"):
        fit_streaming(folder)
    for name in JOINT_KERNELS:
        if f"{name}-joint".startswith(only):
            write_joint(name, folder)
    for sweep in sweeps(folder):
        kernel = KERNELS[sweep.kernel]
        kinds = np.array([KINDS.get(name, name) for name in sweep.machine.tolist()])
        for kind in [*np.unique(kinds), "unseen"]:
            if not f"{sweep.kernel}-{sweep.dtype}-{kind}".startswith(only):
                continue
            if kind == "unseen" and sweep.dtype == "float16":
                continue  # the joint model serves those
            if kind == "unseen":
                train_unseen(kernel, sweep)
            else:
                train_kind(kernel, sweep[kinds == kind], str(kind))


if __name__ == "__main__":
    main()
