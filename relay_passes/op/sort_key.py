# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.sort_key``: an integer for each number, which is ordered as numbers are.

::

    sort_key(x) = b if b >= 0 else b ^ 0x7fffffff      b being the bits of a float
    sort_key(x) = x ^ 0x80000000                       of integers without sign

Both zeros have one key, and NaN the largest, as numpy and PyTorch sort them: kernels that compare
floats would lose elements beside NaN. The key has 32 bits, or 64 of types with so many.
"""

from __future__ import annotations

from tvm import relax, te, tirx

from schedules.errors import OpError

from .register import is_typed, register_op


def sort_key(data: relax.Expr) -> relax.Call:
    """Return the keys of a tensor's elements.

    Parameters
    ----------
    data : relax.Expr
        Numbers or bools, any shape.

    Returns
    -------
    relax.Call
        The same shape; int64 of types of 64 bits, else int32.
    """
    call = relax.Call(_SORT_KEY, [data])
    if is_typed(data):
        _infer_type(call)
    return call


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    ty = call.args[0].ty
    if not isinstance(ty, relax.TensorType) or ty.dtype is None:
        raise OpError(f"{call.op.name}: data is {ty}; expected a tensor of a known type")
    dtype = _key_type(str(ty.dtype))
    if ty.shape is None:
        return relax.TensorType(None, dtype, ty.vdevice, ty.ndim)
    return relax.TensorType(ty.shape, dtype, ty.vdevice)


def _key_type(dtype: str) -> str:
    return "int64" if dtype.endswith("64") else "int32"


def _key(value: tirx.Expr, dtype: str) -> tirx.Expr:
    key = _key_type(dtype)
    most, least = tirx.max_value(key), tirx.min_value(key)
    if dtype in ("uint32", "uint64"):
        return tirx.reinterpret(key, value) ^ least
    if "float" not in dtype:
        return value.astype(key)
    if not dtype.endswith("64"):
        value = value.astype("float32")
    bits = tirx.reinterpret(key, value)
    ordered = tirx.Select(bits < tirx.const(0, key), bits ^ most, bits)
    is_zero = value == tirx.const(0.0, value.ty.dtype)
    ordered = tirx.Select(is_zero, tirx.const(0, key), ordered)
    return tirx.Select(tirx.isnan(value), most, ordered)


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    def keys(data: te.Tensor) -> te.Tensor:
        dtype = str(data.dtype)
        return te.compute(data.shape, lambda *index: _key(data(*index), dtype), name="sort_key")

    return builder.call_te(keys, call.args[0], primfunc_name_hint="sort_key")


_SORT_KEY = register_op(
    "relax.tvm_fusion.sort_key", "An integer ordered as the number.", _infer_type, _legalize
)
