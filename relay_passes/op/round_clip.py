# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.round_clip``: the rounding of a quantised tensor.

::

    round_clip(x, low, high) = min(max(round(x), low), high)        any shape, any float type
    round_clip(x, low, high, "uint8") = min(max(round(x), low), high) - low, as bytes

Halves are rounded to even. NaN stays NaN as part of a convolution, and on CPUs; as a byte it is 0.
"""

from __future__ import annotations

from tvm import relax, te, tirx, topi

from schedules.compute.conv2d import activate_to_bytes
from schedules.errors import OpError
from schedules.workload.conv2d import Activation

from .register import float_tensor_type, is_typed, register_op

BYTE = 255
"""Largest difference of numbers that bytes stand for."""


def round_clip(
    data: relax.Expr, low: float, high: float, out_dtype: str | None = None
) -> relax.Call:
    """Round every element, and bound it.

    Parameters
    ----------
    data : relax.Expr
        A tensor of a floating-point type.
    low, high : float
        Whole numbers, ``low <= high``.
    out_dtype : str | None
        ``uint8`` for the differences from ``low``, of which the largest is 255; the type of
        ``data`` if None.

    Returns
    -------
    relax.Call
        A tensor of the same shape.

    Raises
    ------
    OpError
        If ``data`` is no tensor of floats, the bounds are the wrong way round, or bytes cannot
        hold the differences.
    """
    bounds = Activation("round_clip", float(low), float(high))
    attrs: dict[str, float | str] = {"low": bounds.low, "high": bounds.high}
    if out_dtype is not None:
        check_bytes(bounds, out_dtype, "round_clip")
        attrs["out_dtype"] = out_dtype
    call = relax.Call(_ROUND_CLIP, [data], attrs)
    if is_typed(data):
        _infer_type(call)
    return call


def check_bytes(activation: Activation, out_dtype: str, op: str) -> None:
    """Reject an output of bytes that do not hold the numbers of its activation."""
    span = activation.high - activation.low
    if out_dtype != "uint8" or activation.kind != "round_clip" or span > BYTE:
        raise OpError(
            f"{op}: out_dtype is {out_dtype!r} after {activation}; expected 'uint8' after a "
            f"round_clip whose bounds are at most {BYTE} apart"
        )


def in_bytes(call: relax.Call) -> bool:
    """Return whether a call gives bytes."""
    return "out_dtype" in call.attrs.keys()


def bounds_of(call: relax.Call) -> tuple[float, float]:
    """Return the bounds of a call."""
    return float(call.attrs["low"]), float(call.attrs["high"])


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    ty = float_tensor_type(call)
    return relax.TensorType(ty.shape, "uint8", ty.vdevice) if in_bytes(call) else ty


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    low, high = bounds_of(call)

    def rounded(data: te.Tensor) -> te.Tensor:
        if in_bytes(call):
            bounds = Activation("round_clip", low, high)
            return te.compute(
                data.shape, lambda *index: activate_to_bytes(data(*index), bounds, data.dtype)
            )
        # Extremes name their operand once, where choices would double it at each of a chain.
        return topi.clip(te.compute(data.shape, lambda *index: tirx.round(data(*index))), low, high)

    return builder.call_te(rounded, call.args[0], primfunc_name_hint="round_clip")


_ROUND_CLIP = register_op(
    "relax.tvm_fusion.round_clip", "min(max(round(x), low), high).", _infer_type, _legalize
)
