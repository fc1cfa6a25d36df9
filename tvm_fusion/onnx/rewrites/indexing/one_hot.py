# SPDX-License-Identifier: Apache-2.0
"""Write OneHot as comparisons; the importer takes only integers for its depth.

::

    i = Unsqueeze(indices, axis);    y = Where(i == [0 ... depth) or i == [-depth ... 0), on, off)

Also EyeLike of another type than its input's.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from ...model.graph_edits import attribute
from ..expansion import Expansion


def expand_one_hot(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a OneHot whose depth is constant."""
    indices, depth_name, values = node.input
    depth, dims = expansion.facts.constant(depth_name), expansion.facts.dims(indices)
    if depth is None or depth.size != 1 or dims is None:
        return
    rank = len(dims) + 1
    axis = attribute(node, "axis", -1) % rank
    count = int(depth.item())
    numbers = np.arange(count, dtype=np.int64).reshape([count] + [1] * (rank - 1 - axis))
    off, on = _values(values, expansion)
    whole = expansion.emit("Cast", indices, to=TensorProto.INT64)
    places = expansion.emit("Unsqueeze", whole, expansion.constant("axis", np.array([axis])))
    hits = [
        expansion.emit("Equal", places, expansion.constant("numbers", numbers - start))
        for start in (0, count)
    ]
    expansion.finish(expansion.emit("Where", expansion.emit("Or", *hits), on, off))


def expand_eye_like(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Give an EyeLike a tensor of the type of its result; the importer takes no other."""
    x, kind = node.input[0], attribute(node, "dtype", 0)
    if kind and kind != expansion.facts.dtype(x):
        cast = expansion.emit("Cast", x, to=kind)
        expansion.finish(expansion.emit("EyeLike", cast, k=attribute(node, "k", 0), dtype=kind))


def _values(name: str, expansion: Expansion) -> list[str]:
    """The names of the two values, each a tensor of one element."""
    value = expansion.facts.constant(name)
    if value is not None:
        return [expansion.constant("value", part) for part in np.split(value, 2)]
    ends = [expansion.constant("end", np.array([end])) for end in range(3)]
    return [expansion.emit("Slice", name, ends[i], ends[i + 1]) for i in range(2)]
