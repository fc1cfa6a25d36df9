# SPDX-License-Identifier: Apache-2.0
"""Matrix products and 2-D convolutions of libraries on GPUs, learned.

Products have sizes B, M, N and K, the inner dimension. B = 1 is a linear layer, which adds a bias;
``bmm`` is a batched product even of a single one. Products of float32, and of float16 on a GPU
where that was measured, have a model a GPU; types of 16 bits have one for all GPUs, that has
learned from all types. (Dissertation, section 4.3.2.2, with the features of a tile beside the
sizes.)

Convolutions have sizes B, IC, OC, H, W (of the input), FH, FW, OH, OW and groups (1 if left out).
The library may choose an implicit matrix product, Winograd's minimal filtering or a Fourier
transform, so the features are the waves and padding of each. Trained on 3 x 3 kernels of one group,
stride 1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .kernel_call import KernelCall, Prediction
from .learned import (
    TILES,
    LearnedKernel,
    Limits,
    Sizes,
    divisibility,
    find_model,
    predict_jointly,
    predict_learned,
    tile_features,
    waves,
)
from .machine import Machine


def _gemm_work(sizes: Sizes, width: int) -> tuple[np.ndarray, np.ndarray]:
    b, m, n, k = (sizes[name] for name in "BMNK")
    return 2 * b * m * n * k, width * b * (m * k + k * n + m * n)


def _gemm_features(sizes: Sizes, machine: Limits, roofline: np.ndarray, width: int) -> np.ndarray:
    b, m, n, k = (sizes[name] for name in "BMNK")
    flops, moved = _gemm_work(sizes, width)
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


GEMM = LearnedKernel("gemm", ("B", "M", "N", "K"), _gemm_work, _gemm_features, _group, ("B",))


def predict_gemm(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a matrix product: a linear layer if B is 1."""
    if call.dtype in _JOINT and not _has_own(call, machine):
        return predict_jointly(JOINT, call, machine, harness=_JOINT[call.dtype])
    return predict_learned(GEMM, call, machine)


BMM = LearnedKernel(
    "gemm",
    ("B", "M", "N", "K"),
    _gemm_work,
    lambda sizes, *rest: _gemm_features({**sizes, "batched": np.ones(1)}, *rest),
    lambda sizes: np.ones(len(sizes["B"]), int),
)


def predict_bmm(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a batched matrix product."""
    if call.dtype in _JOINT and not _has_own(call, machine):
        return predict_jointly(JOINT, call, machine, harness=_JOINT[call.dtype])
    return predict_learned(BMM, call, machine)


HARNESSES = ("linear", "batched", "layers", "graph")
"""Harnesses that timed products: linear layers and batched products of float32 launch by launch,
layers of language models in float16 by a profiler, products in bfloat16 in a graph of launches."""

_JOINT = {"float16": 3, "bfloat16": 3, "tfloat32": 1}
"""Harness whose times are predicted, by the types that the joint model serves."""


def _has_own(call: KernelCall, machine: Machine) -> bool:
    """Return whether float16 was measured on this GPU by itself."""
    found = find_model("gemm", call.dtype, machine.name)
    return found is not None and not found[1].endswith("unseen")


def _joint_features(sizes: Sizes, machine: Limits, roofline: np.ndarray, width: int) -> np.ndarray:
    rows = _gemm_features({**sizes, "batched": sizes["harness"] == 1}, machine, roofline, width)
    count = len(rows)
    columns = [sizes["harness"], np.broadcast_to(width, (count,)), *machine.chip(count)]
    return np.concatenate([rows, np.stack(columns, axis=1)], axis=1)


_MOST_WAVES = 64
"""Waves of blocks from which on it does not matter how many there are."""


def _far_features(sizes: Sizes, machine: Limits, roofline: np.ndarray, width: int) -> np.ndarray:
    """Ratios that mean the same on every machine, beside the inner dimension and the roofline."""
    b, m, n, k = (sizes[name] for name in "BMNK")
    flops, moved = _gemm_work(sizes, width)
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
    _gemm_work,
    _far_features,
    lambda sizes: sizes["harness"].astype(int),
    ("B",),
    is_inner=True,
)

JOINT = replace(FAR, features=_joint_features, is_inner=False, far=FAR)


_NAMES = ("B", "IC", "OC", "H", "W", "FH", "FW", "OH", "OW")
_WINOGRAD_OUTPUTS = (2, 4, 6)
_WINOGRAD_TILES = ((32, 32), (64, 64), (128, 64), (128, 128))
_SPATIAL_TILES = (8, 16, 32)


def _conv2d_work(sizes: Sizes, width: int) -> tuple[np.ndarray, np.ndarray]:
    b, ic, oc, h, w, fh, fw, oh, ow = (sizes[name] for name in _NAMES)
    taps = ic / sizes["groups"] * fh * fw
    return 2 * b * oc * oh * ow * taps, width * (b * (ic * h * w + oc * oh * ow) + oc * taps)


def _conv2d_features(sizes: Sizes, machine: Limits, roofline: np.ndarray, width: int) -> np.ndarray:
    b, ic, oc, h, _, fh, fw, oh, ow = (sizes[name] for name in _NAMES)
    flops, moved = _conv2d_work(sizes, width)
    groups = sizes["groups"]
    taps = ic / groups * fh * fw
    ridge = machine.peak / machine.bandwidth
    columns = [np.log(size) for size in (b, ic, oc, oh, taps, flops, moved, roofline, groups)]
    columns += [np.log(flops / moved / ridge), np.log(moved / machine.cache), np.log(h / oh)]
    columns += [divisibility(size) for size in (b, ic, oc, b * oh * ow)]
    columns += [oh % 2, oh % 4, oh % 8, oh, b, np.log(ic * oc / (b * oh * ow))]
    columns += tile_features(groups, b * oh * ow, oc / groups, taps, roofline, machine)
    columns += _winograd(b, ic, oc, oh, ow, roofline, machine)
    columns += _spatial(b, oc, oh, ow, taps, roofline, machine)
    columns += _fourier(b, ic, oc, oh + fh - 1, ow + fw - 1, roofline, machine)
    return np.stack(columns + machine.features(len(b)), axis=1)


def _winograd(b, ic, oc, oh, ow, roofline, machine: Limits) -> list[np.ndarray]:
    """F(m x m, 3 x 3) for several m: useful share of its tiles, its products and their waves."""
    features = []
    for m in _WINOGRAD_OUTPUTS:
        tiles = b * np.ceil(oh / m) * np.ceil(ow / m)
        points = (m + 2) ** 2
        features.append(b * oh * ow / (tiles * m * m))
        features.append(np.log(2 * tiles * ic * oc * points / machine.peak / roofline))
        for rows, columns in _WINOGRAD_TILES:
            blocks = points * np.ceil(tiles / rows) * np.ceil(oc / columns)
            features += waves(blocks, 2.0 * rows * columns * ic, roofline, machine)
        blocks = np.ceil(tiles / 32) * np.ceil(oc / 64)
        features += waves(blocks, 2.0 * 32 * 64 * ic * points, roofline, machine)[2:]
    return features


def _spatial(b, oc, oh, ow, taps, roofline, machine: Limits) -> list[np.ndarray]:
    """Blocks of square output tiles by output channels."""
    columns = []
    for side in _SPATIAL_TILES:
        tiles = b * np.ceil(oh / side) * np.ceil(ow / side)
        columns.append(b * oh * ow / (tiles * side * side))
        for channels in (32, 64, 128):
            flops = 2.0 * side * side * channels * taps
            columns += waves(tiles * np.ceil(oc / channels), flops, roofline, machine)[2:]
    return columns


def _fourier(b, ic, oc, h, w, roofline, machine: Limits) -> list[np.ndarray]:
    """Transforms of whole images padded to a power of two, and of tiles of 32 x 32."""
    columns = []
    whole = 2.0 ** np.ceil(np.log2(np.maximum(h, w)))
    pieces = np.ceil((h - 2) / 30) * np.ceil((w - 2) / 30)
    for side, count in ((whole, b), (32.0, b * pieces)):
        points = side * (side / 2 + 1)
        products = 8 * points * count * ic * oc / machine.peak
        moved = 8 * points * (count * (ic + oc) + ic * oc) * 2 / machine.bandwidth
        columns += [np.log(products / roofline), np.log(moved / roofline)]
    return columns + [np.maximum(h, w) / whole]


CONV2D = LearnedKernel(
    "conv2d",
    (*_NAMES, "groups"),
    _conv2d_work,
    _conv2d_features,
    lambda sizes: np.zeros(len(sizes["B"]), int),
    ("groups",),
)


def predict_conv2d(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a convolution."""
    return predict_learned(CONV2D, call, machine)
