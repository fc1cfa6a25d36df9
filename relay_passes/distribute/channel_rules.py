# SPDX-License-Identifier: Apache-2.0
"""Channels of ops: the call that makes some channels only, with their share of the weights.

Channels are axis 1 of the result. Each is the same sum in the same order as in the whole call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import relax
from tvm.ir import GenericConst

from ..core.constants import tensor_constant
from ..core.expressions import op_name
from ..op.conv2d import CONV2D
from ..op.conv_types import read_kernel
from ..op.winograd_conv2d import NAME as WINOGRAD
from ..op.winograd_conv2d import read_winograd

_LANES = 64  # features of a block, if they divide by it: whole vectors and cache lines


@dataclass(frozen=True)
class ChannelOp:
    """A call whose channels can be split.

    Parameters
    ----------
    blocks : int
        Equal blocks of channels.
    rebuild : Callable
        From operands and a range of blocks to their call. The first operand is whole; of others
        that are computed, it takes these blocks.
    """

    blocks: int
    rebuild: Callable[[Sequence[relax.Expr], int, int], relax.Call]


def channel_op(value: relax.Expr) -> ChannelOp | None:
    """The channels of a call; None where they cannot be split."""
    name = op_name(value)
    if name in (CONV2D.name, WINOGRAD):
        return _convolution(value)
    return _matmul(value) if name == "relax.matmul" else None


def _convolution(call: relax.Call) -> ChannelOp | None:
    """Dense, and packed: blocks are those of the layout."""
    is_winograd = call.op.name == WINOGRAD
    kernel = read_winograd(call) if is_winograd else read_kernel(call, CONV2D)
    [layer], (weight, bias) = kernel.layers, call.args[1:3]
    constants = isinstance(weight, GenericConst) and isinstance(bias, GenericConst)
    if not constants or layer.groups > 1 or len(bias.ty.shape.values) != 2:
        return None
    blocks, lanes = (int(extent) for extent in bias.ty.shape.values)

    def rebuild(operands: Sequence[relax.Expr], begin: int, end: int) -> relax.Call:
        own, filters = slice(begin, end), weight.value.numpy()
        part = filters[:, own] if is_winograd else filters[own]
        parts = relax.const(part), relax.const(bias.value.numpy()[own])
        channels = min(end * lanes, layer.out_channels) - begin * lanes
        attrs = dict(call.attrs.items()) | {"out_channels": channels}
        return relax.Call(call.op, [operands[0], *parts, *operands[3:]], attrs)

    return ChannelOp(blocks, rebuild)


def _matmul(call: relax.Call) -> ChannelOp | None:
    """A matrix times a constant one."""
    matrix, weight = call.args
    if not isinstance(weight, GenericConst) or isinstance(matrix, GenericConst):
        return None
    if matrix.ty.ndim != 2 or weight.ty.ndim != 2:
        return None
    features = int(weight.ty.shape.values[1])
    width = math.gcd(features, _LANES)

    def rebuild(operands: Sequence[relax.Expr], begin: int, end: int) -> relax.Call:
        part = weight.value.numpy()[:, begin * width : end * width]
        return relax.op.matmul(
            operands[0], tensor_constant(part, weight.ty.dtype), call.attrs.out_dtype
        )

    return ChannelOp(features // width, rebuild)
