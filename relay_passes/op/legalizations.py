# SPDX-License-Identifier: Apache-2.0
"""Legalizations in the place of TVM's.

Convolutions are legalized in one module, so that the function of equal kernels is written once;
types and numbers that TVM's kernels get wrong are computed otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm import relax, te, tirx, topi
from tvm.ir import GenericConst, Op

from schedules.compute.edge_values import max_pool, quantize, sign

from .conv2d import CONV2D, FUSED_CONV2D, PAIR, legalize_fused, legalize_pair
from .conv2d import legalize as legalize_conv2d
from .conv_call import Known
from .quantized_conv2d import FUSED_QUANTIZED_CONV2D, QUANTIZED_CONV2D, legalize_fused_quantized
from .quantized_conv2d import legalize as legalize_quantized
from .winograd_conv2d import NAME as WINOGRAD
from .winograd_conv2d import legalize as legalize_winograd

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def shared_legalizations() -> dict[str, Legalize]:
    """Legalization of our convolutions, for one ``relax.transform.LegalizeOps``."""
    known: Known = {}
    return {
        CONV2D.name: partial(legalize_conv2d, known=known),
        FUSED_CONV2D.name: partial(legalize_fused, known=known),
        FUSED_QUANTIZED_CONV2D.name: partial(legalize_fused_quantized, known=known),
        QUANTIZED_CONV2D.name: partial(legalize_quantized, known=known),
        PAIR: partial(legalize_pair, known=known),
        WINOGRAD: partial(legalize_winograd, known=known),
    }


_FUNCTIONS = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh", "tan")
_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
_EXTREMES = ("maximum", "minimum")
_LOGIC = ("logical_and", "logical_or", "logical_xor")
_FOLDED = ("divide", "floor_divide", "floor_mod", "mod", "multiply")


def exact_legalizations() -> dict[str, Legalize]:
    """Legalization of each op whose kernel of TVM's is wrong somewhere; the rest goes to TVM's.

    ::

        sign(x)                         NaN stays NaN; 0 or 1 of integers without sign
        equal(x, y), ... of bools       those of int8: LLVM has no ordered comparison of bools
        asin(x), ... of float16         in float32: no target has them in 16 bits
        quantize(x)                     NaN becomes the lowest number, not the highest
        max_pool2d(x), ...              begins with -inf, and a window with NaN is NaN
        logical_not(x), ... of bools    by bits: TVM's simplifier makes y < x of not (x <= y)
        x * 0, 0 / x, x / 0             TVM folds them, and so loses NaN, or fails
    """
    pools = {f"relax.nn.max_pool{rank}d": _legalize_max_pool for rank in (1, 2, 3)}
    functions = {f"relax.{name}": _in_type(name, "float16", "float32") for name in _FUNCTIONS}
    others = (*_COMPARISONS, *_EXTREMES)
    of_bools = {f"relax.{name}": _in_type(name, "bool", "int8") for name in others}
    logic = {f"relax.{name}": _by_bits(name) for name in _LOGIC}
    folded = {f"relax.{name}": _with_zeros(name) for name in _FOLDED}
    single = {
        "relax.logical_not": _legalize_not,
        "relax.quantize": _legalize_quantize,
        "relax.sign": _legalize_sign,
    }
    return {**pools, **functions, **of_bools, **logic, **folded, **single}


def _legalize_sign(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(sign, call.args[0], primfunc_name_hint="tir_sign")


def _legalize_quantize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, *parameters = call.args
    axis, dtype = int(call.attrs.axis), str(call.attrs.out_dtype)
    if "int" not in dtype:
        return _registered("quantize")(builder, call)
    numbers = [_number(parameter) for parameter in parameters]
    return builder.call_te(quantize, data, *numbers, axis, dtype, primfunc_name_hint="quantize")


def _number(operand: relax.Expr) -> relax.Expr | tirx.Expr:
    """The number of a constant of no dimensions; any other operand itself."""
    if isinstance(operand, GenericConst) and not operand.ty.shape:
        return tirx.const(operand.value.numpy().item(), str(operand.ty.dtype))
    return operand


def _registered(name: str) -> Legalize:
    return Op.get(f"relax.{name}").get_attr("FLegalize")


def _legalize_not(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if str(call.args[0].ty.dtype) != "bool":
        return _registered("logical_not")(builder, call)

    def inverted(x: te.Tensor) -> te.Tensor:
        return topi.bitwise_xor(x, tirx.const(True, "bool"))

    return builder.call_te(inverted, call.args[0], primfunc_name_hint="logical_not")


def _by_bits(name: str) -> Legalize:
    """Compute an op on bools by that on bits, of which the simplifier knows nothing."""
    compute = getattr(topi, name.replace("logical", "bitwise"))

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if str(call.args[0].ty.dtype) != "bool":
            return _registered(name)(builder, call)
        return builder.call_te(compute, *call.args, primfunc_name_hint=name)

    return legalize


def _with_zeros(name: str) -> Legalize:
    """Leave a constant zero in memory."""

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not any(_is_zero(operand) for operand in call.args):
            return _registered(name)(builder, call)
        return builder.call_te(getattr(topi, name), *call.args, primfunc_name_hint=name)

    return legalize


def _is_zero(operand: relax.Expr) -> bool:
    """Return whether an operand is the constant 0 of a floating-point type."""
    if not isinstance(operand, GenericConst) or "float" not in str(operand.ty.dtype):
        return False
    value = operand.value.numpy()
    return bool(value.size == 1 and not value.any())


def _in_type(name: str, narrow: str, wide: str) -> Legalize:
    """Compute what one type cannot in another."""
    registered = _registered(name)

    def computed(*operands: te.Tensor) -> te.Tensor:
        result = getattr(topi, name)(*(topi.cast(operand, wide) for operand in operands))
        return topi.cast(result, narrow) if result.dtype == wide else result

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if str(call.args[0].ty.dtype) != narrow:
            return registered(builder, call)
        return builder.call_te(computed, *call.args, primfunc_name_hint=f"tir_{name}")

    return legalize


def _legalize_max_pool(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    if attrs.out_layout != attrs.layout:
        return call
    rank = len(attrs.pool_size)
    return builder.call_te(
        max_pool,
        call.args[0],
        [int(size) for size in attrs.pool_size],
        [int(step) for step in attrs.strides],
        [int(step) for step in attrs.dilation],
        [int(size) for size in attrs.padding],
        bool(attrs.ceil_mode),
        str(attrs.layout),
        primfunc_name_hint=f"max_pool{rank}d",
    )
