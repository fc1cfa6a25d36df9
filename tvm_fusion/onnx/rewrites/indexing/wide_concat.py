# SPDX-License-Identifier: Apache-2.0
"""Concatenation of many tensors, in groups.

::

    y = Concat(x_0, ..., x_499)      ->      y = concat(concat(x_0, ..., x_31), concat(...), ...)

LLVM takes a minute for a kernel of 500 arguments, all of which may be in one expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from tvm import relax, topi

from relay_passes.op.conv_call import OPAQUE_PATTERN

from ...model.graph_edits import attribute
from ..expansion import Expansion

WIDE_CONCAT = "tvm_fusion.WideConcat"
"""Operator that :func:`translate_wide_concat` translates."""

GROUP = 32

_WIDE = 2 * GROUP


def name_wide_concat(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Let a Concat of many inputs be a :data:`WIDE_CONCAT`."""
    if len(node.input) > _WIDE:
        axis = attribute(node, "axis", 0)
        expansion.finish(expansion.emit(WIDE_CONCAT, *node.input, axis=axis))


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
