# SPDX-License-Identifier: Apache-2.0
"""2-D convolutions of libraries on GPUs, learned.

Sizes B, IC, OC, H, W (of the input), FH, FW, OH, OW and groups (1 if left out). The library may
choose an implicit matrix product, Winograd's minimal filtering or a Fourier transform, so the
features are the waves and padding of each. Trained on 3 x 3 kernels of one group, stride 1.
"""

from __future__ import annotations

import numpy as np

from ..features import Limits, divisibility, tile_features, waves
from ..kernel_call import KernelCall
from ..learned import LearnedKernel, Sizes, predict_learned
from ..machine import Machine
from ..prediction import Prediction

_NAMES = ("B", "IC", "OC", "H", "W", "FH", "FW", "OH", "OW")
_WINOGRAD_OUTPUTS = (2, 4, 6)
_WINOGRAD_TILES = ((32, 32), (64, 64), (128, 64), (128, 128))
_SPATIAL_TILES = (8, 16, 32)


def _work(sizes: Sizes, width: int) -> tuple[np.ndarray, np.ndarray]:
    b, ic, oc, h, w, fh, fw, oh, ow = (sizes[name] for name in _NAMES)
    taps = ic / sizes["groups"] * fh * fw
    return 2 * b * oc * oh * ow * taps, width * (b * (ic * h * w + oc * oh * ow) + oc * taps)


def _features(sizes: Sizes, machine: Limits, roofline: np.ndarray, width: int) -> np.ndarray:
    b, ic, oc, h, _, fh, fw, oh, ow = (sizes[name] for name in _NAMES)
    flops, moved = _work(sizes, width)
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
    found = []
    for m in _WINOGRAD_OUTPUTS:
        tiles = b * np.ceil(oh / m) * np.ceil(ow / m)
        points = (m + 2) ** 2
        found.append(b * oh * ow / (tiles * m * m))
        found.append(np.log(2 * tiles * ic * oc * points / machine.peak / roofline))
        for rows, columns in _WINOGRAD_TILES:
            blocks = points * np.ceil(tiles / rows) * np.ceil(oc / columns)
            found += waves(blocks, 2.0 * rows * columns * ic, roofline, machine)
        blocks = np.ceil(tiles / 32) * np.ceil(oc / 64)
        found += waves(blocks, 2.0 * 32 * 64 * ic * points, roofline, machine)[2:]
    return found


def _spatial(b, oc, oh, ow, taps, roofline, machine: Limits) -> list[np.ndarray]:
    """Blocks of square output tiles by output channels."""
    found = []
    for side in _SPATIAL_TILES:
        tiles = b * np.ceil(oh / side) * np.ceil(ow / side)
        found.append(b * oh * ow / (tiles * side * side))
        for channels in (32, 64, 128):
            flops = 2.0 * side * side * channels * taps
            found += waves(tiles * np.ceil(oc / channels), flops, roofline, machine)[2:]
    return found


def _fourier(b, ic, oc, h, w, roofline, machine: Limits) -> list[np.ndarray]:
    """Transforms of whole images padded to a power of two, and of tiles of 32 x 32."""
    found = []
    whole = 2.0 ** np.ceil(np.log2(np.maximum(h, w)))
    pieces = np.ceil((h - 2) / 30) * np.ceil((w - 2) / 30)
    for side, count in ((whole, b), (32.0, b * pieces)):
        points = side * (side / 2 + 1)
        products = 8 * points * count * ic * oc / machine.peak
        moved = 8 * points * (count * (ic + oc) + ic * oc) * 2 / machine.bandwidth
        found += [np.log(products / roofline), np.log(moved / roofline)]
    return found + [np.maximum(h, w) / whole]


CONV2D = LearnedKernel(
    "conv2d",
    (*_NAMES, "groups"),
    _work,
    _features,
    lambda sizes: np.zeros(len(sizes["B"]), int),
    ("groups",),
)


def predict_conv2d(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a convolution."""
    return predict_learned(CONV2D, call, machine)
