# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.round_clip``: the rounding of a quantised tensor, whose values stay floats.

::

    round_clip(x, low, high) = min(max(round(x), low), high)        any shape, any float type

Halves are rounded to even. NaN stays NaN as part of a convolution, and on CPUs.
"""

from __future__ import annotations

from tvm import relax, te, tirx, topi

from schedules.workload.conv2d import Activation

from .register import float_tensor_type, is_typed, register_op


def round_clip(data: relax.Expr, low: float, high: float) -> relax.Call:
    """Round every element, and bound it.

    Parameters
    ----------
    data : relax.Expr
        A tensor of a floating-point type.
    low, high : float
        Whole numbers, ``low <= high``.

    Returns
    -------
    relax.Call
        A tensor of the same type and shape.

    Raises
    ------
    OpError
        If ``data`` is no tensor of floats, or the bounds are the wrong way round.
    """
    bounds = Activation("round_clip", float(low), float(high))
    call = relax.Call(_ROUND_CLIP, [data], {"low": bounds.low, "high": bounds.high})
    if is_typed(data):
        float_tensor_type(call)
    return call


def bounds_of(call: relax.Call) -> tuple[float, float]:
    """Return the bounds of a call."""
    return float(call.attrs["low"]), float(call.attrs["high"])


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    low, high = bounds_of(call)

    def rounded(data: te.Tensor) -> te.Tensor:
        # Extremes name their operand once, where choices would double it at each of a chain.
        return topi.clip(te.compute(data.shape, lambda *index: tirx.round(data(*index))), low, high)

    return builder.call_te(rounded, call.args[0], primfunc_name_hint="round_clip")


_ROUND_CLIP = register_op(
    "relax.tvm_fusion.round_clip", "min(max(round(x), low), high).", float_tensor_type, _legalize
)
