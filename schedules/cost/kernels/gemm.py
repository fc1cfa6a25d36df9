# SPDX-License-Identifier: Apache-2.0
"""Matrix products of libraries on GPUs, learned: sizes B, M, N and K, the inner dimension.

B = 1 is a linear layer, which adds a bias; ``bmm`` is a batched product even of a single one.
Products of float32, and of float16 on a GPU where that was measured, have a model a GPU; types of
16 bits have one for all GPUs, that has learned from all types. (Dissertation, section 4.3.2.2, with
the features of ``features.py`` beside the sizes.)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..features import TILES, Limits, divisibility, tile_features
from ..kernel_call import KernelCall
from ..learned import LearnedKernel, Sizes, find_model, predict_jointly, predict_learned
from ..machine import Machine
from ..prediction import Prediction


def _work(sizes: Sizes, width: int) -> tuple[np.ndarray, np.ndarray]:
    b, m, n, k = (sizes[name] for name in "BMNK")
    return 2 * b * m * n * k, width * b * (m * k + k * n + m * n)


def _features(sizes: Sizes, machine: Limits, roofline: np.ndarray, width: int) -> np.ndarray:
    b, m, n, k = (sizes[name] for name in "BMNK")
    flops, moved = _work(sizes, width)
    ridge = machine.peak / machine.bandwidth
    columns = [_is_linear(sizes), *(np.log(size) for size in (b, m, n, k, flops, moved, roofline))]
    columns += [np.log(flops / moved / ridge), np.log(moved / machine.cache)]
    columns += [divisibility(size) for size in (m, n, k)]
    columns += tile_features(b, m, n, k, roofline, machine)
    return np.stack(columns + machine.features(len(b)), axis=1)


def _is_linear(sizes: Sizes) -> np.ndarray:
    return (sizes["B"] == 1) & (sizes.get("batched", np.zeros(1)) == 0)


def _group(sizes: Sizes) -> np.ndarray:
    return np.where(_is_linear(sizes), 0, 1)


GEMM = LearnedKernel("gemm", ("B", "M", "N", "K"), _work, _features, _group, ("B",))


def predict_gemm(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a matrix product: a linear layer if B is 1."""
    if call.dtype in _JOINT and not _has_own(call, machine):
        return predict_jointly(JOINT, call, machine, harness=_JOINT[call.dtype])
    return predict_learned(GEMM, call, machine)


BMM = LearnedKernel(
    "gemm",
    ("B", "M", "N", "K"),
    _work,
    lambda sizes, *rest: _features({**sizes, "batched": np.ones(1)}, *rest),
    lambda sizes: np.ones(len(sizes["B"]), int),
)


def predict_bmm(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a batched matrix product."""
    if call.dtype in _JOINT and not _has_own(call, machine):
        return predict_jointly(JOINT, call, machine, harness=_JOINT[call.dtype])
    return predict_learned(BMM, call, machine)


HARNESSES = ("linear", "batched", "layers", "graph")
"""How products were timed: linear layers and batched products of float32 launch by launch, layers
of language models in float16 by a profiler, products in bfloat16 in a graph of launches."""

_JOINT = {"float16": 3, "bfloat16": 3, "tfloat32": 1}
"""Harness whose times are predicted, by the types that the joint model serves."""


def _has_own(call: KernelCall, machine: Machine) -> bool:
    """Return whether float16 was measured on this GPU by itself."""
    found = find_model("gemm", call.dtype, machine.name)
    return found is not None and not found[1].endswith("unseen")


def _joint_features(sizes: Sizes, machine: Limits, roofline: np.ndarray, width: int) -> np.ndarray:
    rows = _features({**sizes, "batched": sizes["harness"] == 1}, machine, roofline, width)
    count = len(rows)
    columns = [sizes["harness"], np.broadcast_to(width, (count,)), *machine.chip(count)]
    return np.concatenate([rows, np.stack(columns, axis=1)], axis=1)


_MOST_WAVES = 64
"""Waves of blocks from which on it does not matter how many there are."""


def _far_features(sizes: Sizes, machine: Limits, roofline: np.ndarray, width: int) -> np.ndarray:
    """Ratios that mean the same on every machine, beside the inner dimension and the roofline."""
    b, m, n, k = (sizes[name] for name in "BMNK")
    flops, moved = _work(sizes, width)
    ridge = machine.peak / machine.bandwidth
    columns = [np.log(flops / moved / ridge), np.log(moved / machine.cache), np.log(k)]
    for rows, across in TILES:
        down, along = np.ceil(m / rows), np.ceil(n / across)
        rounds = b * down * along / machine.multiprocessors
        columns += [np.log(np.minimum(rounds, _MOST_WAVES)), rounds / np.ceil(rounds)]
        columns.append(m * n / (down * rows * along * across))
    columns += [np.log(roofline), *(divisibility(size) for size in (m, n, k))]
    return np.stack(columns, axis=1)


FAR = LearnedKernel(
    "gemm",
    ("B", "M", "N", "K"),
    _work,
    _far_features,
    lambda sizes: sizes["harness"].astype(int),
    ("B",),
    is_inner=True,
)

JOINT = replace(FAR, features=_joint_features, is_inner=False, far=FAR)
