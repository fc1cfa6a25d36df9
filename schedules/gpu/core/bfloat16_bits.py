# SPDX-License-Identifier: Apache-2.0
"""bfloat16 where the GPU lacks it: arithmetic in float32, conversions by their bits.

TVM stores bfloat16 as 16-bit integers there. For OpenCL it prints their conversions as those of
integers; for CUDA it fails at views of tensors.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from schedules import attributes


def convert_by_bits(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace arithmetic and conversions of bfloat16; the parameters keep their type.

    Parameters
    ----------
    func : tirx.PrimFunc
        A function for OpenCL, or for CUDA before sm_80.

    Returns
    -------
    tirx.PrimFunc
        The same in effect; conversions to bfloat16 round to nearest even, NaN stays NaN.
    """
    func = tvm_ffi.structural_map(func, (tirx.Bind, _as_attribute))
    mod = tirx.transform.BF16ComputeLegalize()(tvm.IRModule({"main": func}))
    func = tvm_ffi.structural_map(mod["main"], (tirx.AttrStmt, _as_bind))
    return tvm_ffi.structural_map(func, (tirx.Cast, _convert))


def _as_attribute(bind: tirx.Bind) -> tirx.Stmt:
    """A bound value as an attribute, which TVM's pass reads; it fails on reinterpretations."""
    casts: list[bool] = []

    def look(call: ir.Call) -> None:
        is_bits = getattr(call.op, "name", "") == "tirx.reinterpret"
        casts.append(is_bits and str(call.args[0].ty.dtype) == "bfloat16")

    tvm_ffi.structural_walk(bind.value, (ir.Call, look))
    if any(casts):
        return bind
    return tirx.AttrStmt(bind.var, attributes.BIND, bind.value, tirx.Evaluate(0))


def _as_bind(stmt: tirx.AttrStmt) -> tirx.Stmt:
    return tirx.Bind(stmt.node, stmt.value) if stmt.attr_key == attributes.BIND else stmt


def _convert(cast: tirx.Cast) -> tirx.Expr:
    source, wanted = str(cast.value.ty.dtype), str(cast.ty.dtype)
    if source == "bfloat16":
        bits = tirx.reinterpret("uint16", cast.value).astype("int32")
        number = tirx.reinterpret("float32", bits << tirx.const(16, "int32"))
        return number.astype(wanted)
    if wanted == "bfloat16":
        return _round(cast.value.astype("float32"))
    return cast


def _round(number: tirx.Expr) -> tirx.Expr:
    bits = tirx.reinterpret("int32", number)
    odd = (bits >> tirx.const(16, "int32")) & tirx.const(1, "int32")
    rounded = bits + tirx.const(0x7FFF, "int32") + odd
    kept = tirx.Select(T.isnan(number), tirx.const(0x7FC00000, "int32"), rounded)
    half = (kept >> tirx.const(16, "int32")).astype("uint16")
    return tirx.reinterpret("bfloat16", half)
