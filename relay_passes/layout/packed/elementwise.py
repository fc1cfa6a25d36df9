# SPDX-License-Identifier: Apache-2.0
"""Element-wise ops on packed tensors.

Lanes past the last channel are computed along with the others and have to stay finite, because the
next convolution multiplies them by zero. So each op here has a function that bounds its result in
them; where the bound is too large or unknown, the op stays in NCHW. If the channels fill their
blocks, there are no such lanes and no such limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import relax, tirx
from tvm.ir import GenericConst

from schedules.tir.extents import extent_of

from ...op.channels import pack
from ...op.elementwise import BYTE, bounds_of, in_bytes
from .packing_state import Packed, Rule, Scope, channels_of


@dataclass(frozen=True)
class PackedOperand:
    """One side of a binary op on packed tensors.

    Parameters
    ----------
    make : Callable
        Emits the operand in a form that broadcasts against NCHW[x]c; called once the op is sure
        to be packed.
    low, high : float
        Smallest and largest magnitude in lanes past the last channel.
    """

    make: Callable[[], relax.Expr]
    low: float
    high: float


def _same(call: relax.Call, bound: float) -> float:
    return bound


def _one(call: relax.Call, bound: float) -> float:
    return 1.0


def _exp(call: relax.Call, bound: float) -> float:
    return math.exp(min(bound, 700.0))


def _clip(call: relax.Call, bound: float) -> float:
    low, high = (float(limit.value) for limit in call.args[1:])
    return max(bound, low, -high)


def _round_clip(call: relax.Call, bound: float) -> float:
    if in_bytes(call):
        return BYTE
    low, high = bounds_of(call)
    return max(bound + 0.5 if bound else 0.0, low, -high)


def _leaky(call: relax.Call, bound: float) -> float:
    return bound * max(1.0, abs(float(call.attrs.alpha)))


def _softplus(call: relax.Call, bound: float) -> float:
    return bound + 1.0 / abs(float(call.attrs.beta))


_UNARY: dict[str, Callable[[relax.Call, float], float]] = {
    "relax.abs": _same,
    "relax.astype": _same,
    "relax.clip": _clip,
    "relax.erf": _one,
    "relax.exp": _exp,
    "relax.log": lambda call, bound: math.inf,
    "relax.negative": _same,
    "relax.nn.gelu": _same,
    "relax.nn.gelu_tanh": _same,
    "relax.nn.leakyrelu": _leaky,
    "relax.nn.relu": _same,
    "relax.nn.relu6": _same,
    "relax.nn.silu": _same,
    "relax.nn.softplus": _softplus,
    "relax.sigmoid": _one,
    "relax.sqrt": lambda call, bound: math.inf if bound else 0.0,
    "relax.square": lambda call, bound: bound * bound,
    "relax.tanh": _one,
    "relax.tvm_fusion.hardswish": _same,
    "relax.tvm_fusion.round_clip": _round_clip,
}

_BINARY: dict[str, Callable[[PackedOperand, PackedOperand], float]] = {
    "relax.add": lambda a, b: a.high + b.high,
    "relax.divide": lambda a, b: a.high / b.low if b.low else math.inf,
    "relax.maximum": lambda a, b: max(a.high, b.high),
    "relax.minimum": lambda a, b: max(a.high, b.high),
    "relax.multiply": lambda a, b: a.high * b.high if a.high and b.high else 0.0,
    "relax.subtract": lambda a, b: a.high + b.high,
}


def pack_unary(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Apply an op of one tensor to the packed tensor."""
    call = binding.value
    data = scope.lookup(call.args[0])
    if data is None or not scope.is_worth_packing(binding):
        return None
    packed = relax.Call(call.op, [data.expr, *call.args[1:]], call.attrs, call.ty_args)
    return scope.result(packed, data.channels, _UNARY[call.op.name](call, data.bound))


def pack_binary(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Apply an op of two operands of which at least one is packed.

    The packed one has all channels of the result. The other may be a packed tensor, a scalar, a
    constant, or anything that broadcasts without being packed; it is packed if it is small or if
    the result reaches a convolution.
    """
    call = binding.value
    channels = channels_of(binding.var)
    found = [scope.lookup(argument) for argument in call.args]
    if channels is None or all(tensor is None or tensor.channels != channels for tensor in found):
        return None
    if not scope.is_worth_packing(binding):
        return None
    wanted = binding.var in scope.uses.wanted
    left, right = (_operand(scope, argument, channels, wanted) for argument in call.args)
    if left is None or right is None:
        return None
    bound = _BINARY[call.op.name](left, right)
    if not scope.is_safe(channels, bound):
        return None
    packed = relax.Call(call.op, [left.make(), right.make()], call.attrs, call.ty_args)
    return scope.result(packed, channels, bound)


def _operand(scope: Scope, expr: relax.Expr, channels: int, required: bool) -> PackedOperand | None:
    """``expr`` as an operand, or None where its layout would cost too much."""
    if isinstance(expr, tirx.FloatImm | tirx.IntImm):
        return PackedOperand(lambda: expr, abs(float(expr.value)), abs(float(expr.value)))
    found = scope.lookup(expr)
    if found is not None and found.channels == channels:
        return PackedOperand(lambda: found.expr, 0.0, found.bound)
    shape = _extents(expr)
    if shape is None or len(shape) > 4:
        return None
    low, high = _magnitudes(expr)
    if all(extent == 1 for extent in shape):
        return PackedOperand(lambda: scope.visit(expr), low, high)
    rank4 = [1] * (4 - len(shape)) + shape
    if rank4[1] == 1 and channels > 1:
        return PackedOperand(lambda: _append_axis(scope, expr, rank4), low, high)
    if rank4[1] != channels:
        return None
    if isinstance(expr, GenericConst):
        constant = relax.const(expr.value.numpy().reshape(rank4), str(expr.ty.dtype))
        return PackedOperand(lambda: scope.pack(constant).expr, 0.0, 0.0)
    if required or rank4[2:] == [1, 1]:
        return PackedOperand(lambda: _pack_rank4(scope, expr, rank4), 0.0, 0.0)
    return None


def _extents(expr: relax.Expr) -> list[int | tirx.Expr] | None:
    """The extents of a tensor, constant ones as integers; None where they are unknown."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    return list(map(extent_of, ty.shape.values))


def _magnitudes(expr: relax.Expr) -> tuple[float, float]:
    """Smallest and largest magnitude of the elements, as far as they are known."""
    if not isinstance(expr, GenericConst):
        return 0.0, math.inf
    magnitudes = np.abs(expr.value.numpy().astype("float64"))
    return float(magnitudes.min()), float(magnitudes.max())


def _pack_rank4(scope: Scope, expr: relax.Expr, rank4: list[int | tirx.Expr]) -> relax.Expr:
    """Pack a tensor that may lack its first axes."""
    if channels_of(expr) is not None:
        return scope.pack(expr).expr
    reshaped = scope.emit(relax.op.reshape(scope.visit(expr), rank4))
    return scope.emit(pack(reshaped, scope.blocks.of(int(rank4[1]))))


def _append_axis(scope: Scope, expr: relax.Expr, rank4: list[int | tirx.Expr]) -> relax.Expr:
    """A tensor without channels, to be broadcast over blocks and lanes."""
    if isinstance(expr, GenericConst):
        array = expr.value.numpy().reshape([*rank4, 1])
        return relax.const(array, str(expr.ty.dtype))
    return scope.emit(relax.op.reshape(scope.visit(expr), [*rank4, 1]))


def pack_prelu(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Write ``max(x, 0) + slope * min(x, 0)`` with constant slopes in blocks.

    The op itself has slopes along one axis only, not blocks and lanes.
    """
    call = binding.value
    data = scope.lookup(call.args[0])
    if (
        data is None
        or channels_of(call.args[0]) is None
        or not isinstance(call.args[1], GenericConst)
    ):
        return None
    slopes = call.args[1].value.numpy().reshape(-1)
    # Equal slopes may be along any axis.
    if int(call.attrs.axis) % 4 != 1 and not (slopes == slopes[0]).all():
        return None
    # A product of zero and infinity would be NaN where the op itself gives a number.
    if not np.isfinite(slopes).all() or not scope.is_safe(data.channels, data.bound):
        return None
    if not scope.is_worth_packing(binding):
        return None
    dtype = str(call.args[1].ty.dtype)
    rank4 = np.resize(slopes, (1, data.channels, 1, 1))
    packed = scope.pack(relax.const(rank4, dtype)).expr
    zero = relax.const(0, dtype)
    above = scope.emit(relax.op.nn.relu(data.expr))
    below = scope.emit(relax.op.multiply(scope.emit(relax.op.minimum(data.expr, zero)), packed))
    # The lanes past the last channel have a slope of zero.
    return scope.result(relax.op.add(above, below), data.channels, data.bound)


ELEMENTWISE_RULES: dict[str, Rule] = {
    **dict.fromkeys(_UNARY, pack_unary),
    **dict.fromkeys(_BINARY, pack_binary),
    "relax.nn.prelu": pack_prelu,
}
