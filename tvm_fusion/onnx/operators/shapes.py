# SPDX-License-Identifier: Apache-2.0
"""Operators that move, join, pad or make elements.

Many tensors are concatenated in groups::

    y = Concat(x_0, ..., x_499)      ->      y = concat(concat(x_0, ..., x_31), concat(...), ...)

LLVM takes a minute for a kernel of 500 arguments, all of which may be in one expression. Others::

    SpaceToDepth:  y = Reshape(Transpose(Reshape(x, [n, c, rows, block, columns, block])))
    Pad:           y = Where(Pad(1) == 1, Pad(x), value) for a value from data
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from tvm import relax, topi

from relay_passes.op.conv_call import OPAQUE_PATTERN

from ..model.expansion import Expansion
from ..model.graph_edits import attribute
from .operator import Operator, operators

WIDE_CONCAT = "tvm_fusion.WideConcat"
"""Operator that :func:`translate_wide_concat` translates."""

GROUP = 32

_WIDE = 2 * GROUP


def name_wide_concat(expansion: Expansion) -> None:
    """Let a Concat of many inputs be a :data:`WIDE_CONCAT`."""
    if len(expansion.node.input) > _WIDE:
        axis = expansion.get("axis", 0)
        expansion.finish(expansion.emit(WIDE_CONCAT, *expansion.node.input, axis=axis))


def translate_wide_concat(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Kernels of ``GROUP`` inputs each, with which nothing is fused."""
    parts = list(inputs)
    axis = attributes["axis"] % len(parts[0].ty.shape)
    while len(parts) > 1:
        groups = [parts[start : start + GROUP] for start in range(0, len(parts), GROUP)]
        parts = [_joined(builder, group, axis) if len(group) > 1 else group[0] for group in groups]
    return parts[0]


def _joined(builder: relax.BlockBuilder, parts: list[Any], axis: int) -> relax.Expr:
    opaque = {"op_pattern": OPAQUE_PATTERN}
    call = builder.call_te(topi.concatenate, parts, axis, primfunc_attrs=opaque)
    return builder.emit(call)


def take_as_vector(expansion: Expansion) -> None:
    """Make a vector of axes, or of a shape, that is a scalar, as ONNX Runtime takes it."""
    value = expansion.facts.constant(expansion.input(1))
    if value is not None and not value.ndim:
        vector = expansion.constant("vector", value.reshape(1))
        expansion.finish(expansion.emit(expansion.node.op_type, expansion.input(0), vector))


def expand_pad(expansion: Expansion) -> None:
    """Replace a Pad with a number from data: ``Where(Pad(1) == 1, Pad(x), value)``."""
    x, pads, value, axes = [*expansion.node.input, "", ""][:4]
    is_constant = expansion.get("mode", b"constant") in (b"constant", "constant")
    if not value or not is_constant or expansion.facts.constant(value) is not None:
        return
    ones = expansion.emit(
        "ConstantOfShape",
        expansion.emit("Shape", x),
        value=numpy_helper.from_array(np.ones(1, np.int32)),
    )
    inside, padded = (expansion.emit("Pad", name, pads, "", axes) for name in (ones, x))
    is_inside = expansion.emit("Equal", inside, expansion.number(1, TensorProto.INT32))
    expansion.finish(expansion.emit("Where", is_inside, padded, value))


def expand_space_to_depth(expansion: Expansion) -> None:
    """Replace a SpaceToDepth of an image whose size is known; ONNX has a body for the newest."""
    dims, block = expansion.facts.dims(expansion.input(0)), expansion.get("blocksize")
    if dims is None or len(dims) != 4 or None in dims[1:]:
        return
    channels, height, width = (dim or 0 for dim in dims[1:])
    rows, columns = height // block, width // block
    split = np.array([0, channels, rows, block, columns, block])
    joined = np.array([0, channels * block**2, rows, columns])
    is_inner = expansion.get("mode", "DCR") == "CRD"
    result = expansion.emit("Reshape", expansion.input(0), expansion.constant("split", split))
    order = [0, 1, 3, 5, 2, 4] if is_inner else [0, 3, 5, 1, 2, 4]
    result = expansion.emit("Transpose", result, perm=order)
    expansion.finish(expansion.emit("Reshape", result, expansion.constant("joined", joined)))


def _split_defect(node: onnx.NodeProto) -> str | None:
    parts = attribute(node, "num_outputs")
    if parts is None or parts == len(node.output):
        return None
    return f"its num_outputs is {parts}, and it has {len(node.output)} outputs"


def _sparse_constant(node: onnx.NodeProto) -> str | None:
    is_sparse = attribute(node, "sparse_value") is not None
    return "its value is sparse; store it as a dense tensor" if is_sparse else None


OPERATORS = (
    *operators("DepthToSpace Flatten Identity Shape Size Transpose"),
    Operator("CenterCropPad", is_defined=True),
    Operator("Concat", expand=name_wide_concat),
    Operator("Constant", refuse=_sparse_constant),
    Operator("ConstantOfShape", shape_inputs=(0,)),
    *operators("Expand Unsqueeze", expand=take_as_vector, shape_inputs=(1,)),
    Operator("Pad", expand=expand_pad, shape_inputs=(1, 3)),
    Operator("Range", shape_inputs=(0, 1, 2)),
    *operators("Reshape Squeeze Tile", shape_inputs=(1,)),
    Operator("Slice", shape_inputs=(1, 2, 3, 4)),
    Operator("SpaceToDepth", expand=expand_space_to_depth),
    Operator("Split", defect=_split_defect, shape_inputs=(1,)),
    Operator(WIDE_CONCAT, translate=translate_wide_concat),
)
