# SPDX-License-Identifier: Apache-2.0
"""Matrix products of libraries on GPUs, learned: sizes B, M, N and K, the inner dimension.

B = 1 is a linear layer, which adds a bias; ``bmm`` is a batched product even of a single one.
(Dissertation, section 4.3.2.2, with the features of ``features.py`` beside the sizes.)
"""

from __future__ import annotations

import numpy as np

from ..features import Limits, divisibility, tile_features
from ..kernel_call import KernelCall
from ..learned import LearnedKernel, Sizes, predict_learned
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
    return predict_learned(BMM, call, machine)
