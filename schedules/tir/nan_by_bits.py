# SPDX-License-Identifier: Apache-2.0
"""``isnan(x)`` by the bits of ``x``, in operations that vectors have.

TVM 0.27 scalarizes vectors for the call itself, and those of a bound value to a single lane.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx

from .expression_walk import op_name


def nan_by_bits(value: ir.Expr) -> ir.Expr:
    """An expression without calls of ``isnan``."""
    return tvm_ffi.structural_map(value, (ir.Call, isnan_by_bits))


def isnan_by_bits(call: ir.Call) -> ir.Expr:
    """The same call unless it is one of ``isnan``."""
    if op_name(call) != "tirx.isnan":
        return call
    [number] = call.args
    if str(number.ty.dtype) not in _BITS:  # 16 bits
        number = number.astype("float32")
    bits = _BITS[str(number.ty.dtype)]
    integer = tirx.reinterpret(bits.dtype, number)
    magnitude = tirx.bitwise_and(integer, tirx.const(bits.magnitude, bits.dtype))
    return magnitude > tirx.const(bits.infinity, bits.dtype)


@dataclass(frozen=True)
class _Bits:
    """Integer type of a float's bits, all of them but the sign, and those of infinity."""

    dtype: str
    magnitude: int
    infinity: int


_BITS = {
    "float32": _Bits("int32", 0x7FFFFFFF, 0x7F800000),
    "float64": _Bits("int64", 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}
