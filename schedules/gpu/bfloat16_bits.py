# SPDX-License-Identifier: Apache-2.0
"""bfloat16 for OpenCL, which lacks it: arithmetic in float32, conversions by their bits.

TVM stores bfloat16 as 16-bit integers there, but prints conversions as those of integers.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import tirx as T


def convert_by_bits(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace arithmetic and conversions of bfloat16; the parameters keep their type.

    Parameters
    ----------
    func : tirx.PrimFunc
        A function for OpenCL.

    Returns
    -------
    tirx.PrimFunc
        The same in effect; conversions to bfloat16 round to nearest even, NaN stays NaN.
    """
    mod = tirx.transform.BF16ComputeLegalize()(tvm.IRModule({"main": func}))
    return tvm_ffi.structural_map(mod["main"], (tirx.Cast, _convert))


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
