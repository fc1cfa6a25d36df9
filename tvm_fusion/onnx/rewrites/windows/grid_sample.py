# SPDX-License-Identifier: Apache-2.0
"""GridSample that reflects at the centres of corner pixels, of an axis with one pixel.

Images of other types than float32 and float64 are cast, as the importer's samples are float32.

The distance of these corners is 0, by which TVM's reflection divides. With the pixel twice the axis
has the same value everywhere::

    y = GridSample(x[n,c,1,w], grid)      ->      y = GridSample(Concat(x, x), grid)
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from ...model.graph_edits import attribute
from ...model.tensor_facts import INTEGER_TYPES
from ..arithmetic.wider_types import HALVES
from ..expansion import Expansion


def expand_grid_sample(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Repeat axes of one pixel between whose ends coordinates are reflected, and cast the image."""
    kind = expansion.facts.dtype(node.input[0])
    whole = kind in INTEGER_TYPES or kind == TensorProto.BOOL
    wide = TensorProto.FLOAT if kind in HALVES else TensorProto.DOUBLE if whole else kind
    axes = _single_pixels(node, expansion)
    if not axes and wide == kind:
        return
    x, grid = node.input
    if wide != kind:
        x, grid = (expansion.emit("Cast", name, to=wide) for name in node.input)
    for axis in axes:
        x = expansion.emit("Concat", x, x, axis=axis)
    result = expansion.emit("GridSample", x, grid)
    expansion.nodes[-1].attribute.extend(node.attribute)
    expansion.finish(result if wide == kind else expansion.emit("Cast", result, to=kind))


def _single_pixels(node: onnx.NodeProto, expansion: Expansion) -> list[int]:
    shape = expansion.facts.shape(node.input[0])
    reflects = attribute(node, "padding_mode", "zeros") == "reflection"
    if shape is None or not reflects or not attribute(node, "align_corners", 0):
        return []
    return [axis for axis, size in enumerate(shape) if axis > 1 and size == 1]
