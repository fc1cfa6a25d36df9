# SPDX-License-Identifier: Apache-2.0
"""GridSample that reflects at the centres of corner pixels, of an axis with one pixel.

The distance of these corners is 0, by which TVM's reflection divides. With the pixel twice the axis
has the same value everywhere::

    y = GridSample(x[n,c,1,w], grid)      ->      y = GridSample(Concat(x, x), grid)
"""

from __future__ import annotations

import onnx

from ...model.graph_edits import attribute
from ..expansion import Expansion


def widen_reflection(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Repeat axes of one pixel between whose ends coordinates are reflected."""
    shape = expansion.facts.shape(node.input[0])
    reflects = attribute(node, "padding_mode", "zeros") == "reflection"
    if shape is None or not reflects or not attribute(node, "align_corners", 0):
        return
    x, grid = node.input
    axes = [axis for axis, size in enumerate(shape) if axis > 1 and size == 1]
    for axis in axes:
        x = expansion.emit("Concat", x, x, axis=axis)
    if axes:
        result = expansion.emit("GridSample", x, grid)
        expansion.nodes[-1].attribute.extend(node.attribute)
        expansion.finish(result)
