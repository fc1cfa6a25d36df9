# SPDX-License-Identifier: Apache-2.0
"""Kernels store float16 and compute in float32; one that computes in float16 is refused."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx

from schedules.errors import OpError

_BINARY = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod),
    *(tirx.Min, tirx.Max, tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE),
)
_MOVES = ("prim.if_then_else", "tirx.reinterpret", "tirx.call_extern")


def refuse_half_arithmetic(kernel: tirx.PrimFunc) -> None:
    """Check that a kernel loads, stores and converts float16, and does nothing else with it.

    Parameters
    ----------
    kernel : tirx.PrimFunc
        The kernel, after TVM's split into host and device.

    Raises
    ------
    OpError
        Where it computes or compares in float16: sums of many terms would lose their last bits,
        by less than a test of one size may notice.
    """

    def check(expr: tvm.ir.Expr, operand: tvm.ir.Expr) -> None:
        if str(operand.ty).startswith("float16"):
            raise OpError(f"{expr} computes in float16: cast its operands to float32")

    def check_call(call: tvm.ir.Call) -> None:
        if getattr(call.op, "name", "") not in _MOVES:
            check(call, call)

    binary = [(kind, lambda expr: check(expr, expr.a)) for kind in _BINARY]
    tvm_ffi.structural_walk(kernel.body, [*binary, (tvm.ir.Call, check_call)])
