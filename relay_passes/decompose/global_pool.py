# SPDX-License-Identifier: Apache-2.0
"""Pooling of whole images: the mean or the maximum over the spatial axes.

::

    adaptive_avg_pool2d(x, [1, 1])            ->   R.mean(x, axis=[2, 3], keepdims=True)
    avg_pool2d(x, pool_size=[H, W])           ->   R.mean(x, axis=[2, 3], keepdims=True)
    max_pool2d(x, pool_size=[H, W])           ->   R.max(x, axis=[2, 3], keepdims=True)

likewise in one and three dimensions, in every layout whose spatial axes are not split.
"""

from __future__ import annotations

from tvm import relax

from schedules.workload.reduce import constant

from ..core.expressions import Value
from ..core.graph import Graph
from .precision import extents

ADAPTIVE = tuple(f"relax.nn.adaptive_avg_pool{rank}d" for rank in (1, 2, 3))
NAMES = (
    *ADAPTIVE,
    *(f"relax.nn.{kind}_pool{rank}d" for kind in ("avg", "max") for rank in (1, 2, 3)),
)


def global_pool(graph: Graph, call: relax.Call) -> Value:
    """Rewrite a pooling with one output a channel."""
    data, attrs = call.args[0], call.attrs
    shape = extents(data)
    axes = _spatial_axes(str(attrs.layout))
    if shape is None or axes is None or attrs.layout != attrs.out_layout:
        return None
    if any(constant(call.ty.shape.values[axis]) != 1 for axis in axes):
        return None
    if call.op.name not in ADAPTIVE and not _covers_all(attrs, [shape[axis] for axis in axes]):
        return None
    reduce = relax.op.max if "max_pool" in call.op.name else relax.op.mean
    return reduce(data, axes, keepdims=True)


def _spatial_axes(layout: str) -> list[int] | None:
    """Positions of depth, height and width; None if one of them is split."""
    letters = [letter for letter in layout if letter.isalpha()]
    if any(letter in "dhw" for letter in letters):
        return None
    return [position for position, letter in enumerate(letters) if letter in "DHW"]


def _covers_all(attrs: Value, image: list) -> bool:
    """Return whether one window without padding or holes is as large as the image."""
    window = [int(extent) for extent in attrs.pool_size]
    is_dense = not any(attrs.padding) and all(int(step) == 1 for step in attrs.dilation)
    return is_dense and window == [constant(extent) for extent in image]
