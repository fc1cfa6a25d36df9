# SPDX-License-Identifier: Apache-2.0
"""torchvision and transformers, also where the library of its own operators cannot be loaded.

The library of a build for CUDA needs CUDA's. Without it, non-maximum suppression is that of this
file, so that detectors can be traced; other operators are missing.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def import_torchvision() -> Any:
    """Import torchvision; its operators are declared here if its own library is missing."""
    try:
        import torchvision
    except RuntimeError:  # it describes ops that the missing library would have defined
        _declare()
        import torchvision

        torchvision.extension._has_ops = _has_ops
    return torchvision


def _has_ops() -> bool:
    return True


_library: list[torch.library.Library] = []
"""Everything declared; it ends with the object."""


def _declare() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", suppress, "CPU")
    _library.append(library)


def suppress(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Indices of boxes, best first, that overlap no better one by more than a threshold."""
    order = scores.argsort(descending=True, stable=True)
    kept: list[int] = []
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    while order.numel():
        best, order = int(order[0]), order[1:]
        kept.append(best)
        low = torch.maximum(boxes[best, :2], boxes[order, :2])
        high = torch.minimum(boxes[best, 2:], boxes[order, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        order = order[shared / (areas[best] + areas[order] - shared) <= threshold]
    return torch.tensor(kept, dtype=torch.int64)


def import_transformers() -> Any:
    """Import transformers, which imports torchvision where that is installed."""
    with contextlib.suppress(ImportError):
        import_torchvision()
    import transformers

    return transformers
