# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.widen_weight``: the floats that a constant matrix of few bits stands for.

::

    widen_weight(integers, scale, zero)[k, n] = (integers[k, n] - zero[g, n]) * scale[g, n]

    integers [K, N] int8    scale [G, N] float32    zero [G, N] int8 or float32, may be left out

with ``g = k // block``. With ``axis=1`` the blocks are those of a row: ``scale`` is ``[K, G]``, and
``g = n // block``. :class:`relay_passes.MultiplyNarrow` keeps such a matrix as it is stored.
"""

from __future__ import annotations

import numpy as np
from tvm import relax, te, tirx

from schedules.errors import OpError

from .register import register_op

NAME = "relax.tvm_fusion.widen_weight"

ZEROS = ("int8", "float32")
"""Types of zero points."""

LEAST_ELEMENTS = 4096
"""Elements of a matrix below which its bytes do not matter, and it may as well be of floats."""


def widen_weight(
    integers: relax.Expr,
    scale: relax.Expr,
    zero: relax.Expr | None = None,
    *,
    block: int,
    axis: int = 0,
    bits: int = 8,
    by_bytes: bool = False,
    out_dtype: str = "float32",
) -> relax.Call:
    """Widen a matrix.

    Parameters
    ----------
    integers, scale, zero : relax.Expr
        As in the module's docstring.
    block : int
        Numbers along ``axis`` that share a scale; the last ones may be fewer.
    axis : int
        0 or 1.
    bits : int
        Of the integers, which lie between ``-2 ** (bits - 1)`` and ``2 ** (bits - 1) - 1``.
    by_bytes : bool
        Whether what is multiplied by the matrix may be rounded to 8 bits.
    out_dtype : str
        Type of the result; sums and products are computed in float32.

    Returns
    -------
    relax.Call
        A matrix of the shape of ``integers``.
    """
    operands = [integers, scale] if zero is None else [integers, scale, zero]
    attrs = {
        "block": block,
        "axis": axis,
        "bits": bits,
        "by_bytes": by_bytes,
        "out_dtype": out_dtype,
    }
    return relax.Call(_WIDEN_WEIGHT, operands, attrs)


def widened(
    integers: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, block: int, axis: int
) -> np.ndarray:
    """The float32 matrix that :func:`widen_weight` gives."""

    def spread(values: np.ndarray) -> np.ndarray:
        places = np.arange(integers.shape[axis]) // block
        return np.take(values, places, axis).astype(np.float32)

    centred = integers.astype(np.float32)
    if zero is not None:
        centred -= spread(zero)
    return centred * spread(scale)


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    integers, scale, *zero = (argument.ty for argument in call.args)
    types = [str(ty.dtype) for ty in (integers, scale, *zero)]
    shape = [int(extent) for extent in integers.shape]
    axis, block = int(call.attrs["axis"]), int(call.attrs["block"])
    wanted = [*shape]
    wanted[axis] = -(-shape[axis] // block)
    if types[:2] != ["int8", "float32"] or any(kind not in ZEROS for kind in types[2:]):
        raise OpError(f"{NAME}: operands of {', '.join(types)}; expected int8, float32 and {ZEROS}")
    for ty in (scale, *zero):
        if [int(extent) for extent in ty.shape] != wanted:
            raise OpError(f"{NAME}: scales of shape {ty.shape}; expected {wanted}")
    return relax.TensorType(shape, str(call.attrs["out_dtype"]))


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    axis, block = int(call.attrs["axis"]), int(call.attrs["block"])
    dtype = str(call.attrs["out_dtype"])

    def widen(integers: te.Tensor, scale: te.Tensor, *zero: te.Tensor) -> te.Tensor:
        def number(*index: tirx.Var) -> tirx.Expr:
            group = list(index)
            group[axis] = tirx.floordiv(index[axis], block)
            value = integers(*index).astype("float32")
            for one in zero:
                value = value - one(*group).astype("float32")
            return (value * scale(*group)).astype(dtype)

        return te.compute(integers.shape, number, name="widen_weight")

    return builder.call_te(widen, *call.args, primfunc_name_hint="widen_weight")


_WIDEN_WEIGHT = register_op(
    NAME, "(integers - zero) * scale, of blocks of a matrix.", _infer_type, _legalize
)
