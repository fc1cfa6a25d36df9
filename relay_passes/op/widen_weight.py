# SPDX-License-Identifier: Apache-2.0
"""Ops ``widen_weight`` and ``take_widened``: floats that a constant matrix of few bits stands for.

::

    widen_weight(integers, scale, zero)[k, n] = (integers[k, n] - zero[g, n]) * scale[g, n]

    integers [K, N] int8    scale [G, N] float32    zero [G, N] int8 or float32, may be left out

with ``g = k // block``. With ``axis=1`` the blocks are those of a row: ``scale`` is ``[K, G]``, and
``g = n // block``. :class:`relay_passes.MultiplyNarrow` keeps such a matrix as it is stored.

::

    take_widened(rows, integers, scale, zero) = widen_weight(integers, scale, zero)[rows, :]

widens only the rows that are chosen, as of an embedding. Integers of 4 bits are given in pairs,
``[K, ceil(N / 2)]`` uint8, whose low halves come first (:func:`in_pairs`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax, te, tirx
from tvm.ir import GenericConst

from schedules.errors import OpError

from ..core.expressions import Value, op_name
from .register import register_op

NAME, TAKE_NAME = "relax.tvm_fusion.widen_weight", "relax.tvm_fusion.take_widened"

MODES = ("clip", "wrap")
"""Treatments of numbers of rows that are out of range."""

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
        Tensors as in the module's docstring.
    block : int
        Numbers along ``axis`` that share a scale; the last ones may be fewer.
    axis : int
        0 or 1.
    bits : int
        Bits of the integers, which lie between ``-2 ** (bits - 1)`` and ``2 ** (bits - 1) - 1``.
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


def in_pairs(integers: np.ndarray) -> np.ndarray:
    """Integers of 4 bits ``[K, N]``, each with 8 added, as bytes ``[K, ceil(N / 2)]``."""
    halves = (np.pad(integers, [(0, 0), (0, integers.shape[1] % 2)]) + 8).astype(np.uint8)
    return halves[:, ::2] | halves[:, 1::2] << 4


def is_lookup(value: Value) -> bool:
    """Return whether a value is a ``take`` of rows that ``take_widened`` can choose, too."""
    if op_name(value) != "relax.take" or str(value.attrs.mode) not in MODES:
        return False
    axis, rows = value.attrs.axis, value.args[1]
    is_known = isinstance(rows.ty.shape, relax.ShapeExpr) and not isinstance(rows, GenericConst)
    return is_known and axis is not None and int(axis) == 0


def row_inside(row: tirx.Expr, count: int, mode: str) -> tirx.Expr:
    """The row of ``count`` that a number stands for, by the ``mode`` of a ``take``."""
    last = tirx.const(count, row.ty.dtype)
    return tirx.floormod(row, last) if mode == "wrap" else tirx.max(tirx.min(row, last - 1), 0)


def take_widened(
    rows: relax.Expr,
    integers: relax.Expr,
    scale: relax.Expr,
    zero: relax.Expr | None = None,
    *,
    columns: int,
    block: int,
    axis: int = 0,
    mode: str = "clip",
    out_dtype: str = "float32",
) -> relax.Call:
    """Widen chosen rows of a matrix.

    Parameters
    ----------
    rows : relax.Expr
        Their numbers, of an integer type and any shape.
    integers : relax.Expr
        int8 [K, N], or uint8 [K, ceil(N / 2)].
    scale, zero, block, axis, out_dtype
        As for :func:`widen_weight`.
    columns : int
        N.
    mode : str
        What becomes of numbers out of range: ``clip`` or ``wrap``, as of Relax's ``take``.

    Returns
    -------
    relax.Call
        A tensor ``[*rows, N]``.
    """
    operands = [rows, integers, scale, *([] if zero is None else [zero])]
    attrs = {"columns": columns, "block": block, "axis": axis, "mode": mode, "out_dtype": out_dtype}
    return relax.Call(_TAKE_WIDENED, operands, attrs)


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    shape = [int(extent) for extent in call.args[0].ty.shape]
    _check_operands(call, NAME, list(call.args), shape, ("int8",))
    return relax.TensorType(shape, str(call.attrs["out_dtype"]))


def _check_operands(
    call: relax.Call, op: str, operands: list[relax.Expr], shape: list[int], kinds: tuple[str, ...]
) -> None:
    """Check types and shapes of a matrix, its scales and its zero points; else OpError."""
    integers, scale, *zero = (operand.ty for operand in operands)
    types = [str(ty.dtype) for ty in (integers, scale, *zero)]
    axis, block = int(call.attrs["axis"]), int(call.attrs["block"])
    extents = [*shape]
    extents[axis] = -(-shape[axis] // block)
    is_known = types[0] in kinds and types[1] == "float32"
    if not is_known or any(kind not in ZEROS for kind in types[2:]):
        expected = " or ".join(kinds)
        raise OpError(
            f"{op}: operands of {', '.join(types)}; expected {expected}, float32 and {ZEROS}"
        )
    for ty in (scale, *zero):
        if [int(extent) for extent in ty.shape] != extents:
            raise OpError(f"{op}: scales of shape {ty.shape}; expected {extents}")


def _infer_taken(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    rows, *operands = call.args
    count, stored = (int(extent) for extent in operands[0].ty.shape)
    columns, mode = int(call.attrs["columns"]), str(call.attrs["mode"])
    _check_operands(call, TAKE_NAME, operands, [count, columns], ("int8", "uint8"))
    is_paired = str(operands[0].ty.dtype) == "uint8"
    if stored != (-(-columns // 2) if is_paired else columns) or mode not in MODES:
        raise OpError(
            f"{TAKE_NAME}: rows of {stored} elements for {columns} columns, mode {mode!r}; "
            f"expected as many, or half as many of uint8, and {' or '.join(MODES)}"
        )
    return relax.TensorType([*rows.ty.shape.values, columns], str(call.attrs["out_dtype"]))


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    def widen(integers: te.Tensor, *others: te.Tensor) -> te.Tensor:
        def number(*index: tirx.Var) -> tirx.Expr:
            return _number(call, index, integers(*index), others)

        return te.compute(integers.shape, number, name="widen_weight")

    return builder.call_te(widen, *call.args, primfunc_name_hint="widen_weight")


def _number(
    call: relax.Call, index: Sequence[tirx.Expr], integer: tirx.Expr, others: Sequence[te.Tensor]
) -> tirx.Expr:
    """The float that an integer at a row and a column stands for, by scales and zero points."""
    axis, block = int(call.attrs["axis"]), int(call.attrs["block"])
    scale, *zero = others
    group = list(index)
    group[axis] = tirx.floordiv(index[axis], block)
    value = integer.astype("float32")
    for one in zero:
        value = value - one(*group).astype("float32")
    return (value * scale(*group)).astype(str(call.attrs["out_dtype"]))


def _legalize_taken(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    mode, columns = str(call.attrs["mode"]), int(call.attrs["columns"])

    def take(rows: te.Tensor, integers: te.Tensor, *others: te.Tensor) -> te.Tensor:
        def number(*index: tirx.Var) -> tirx.Expr:
            *place, column = index
            inside = row_inside(rows(*place), int(integers.shape[0]), mode)
            return _number(call, (inside, column), _integer(integers, inside, column), others)

        return te.compute([*rows.shape, columns], number, name="take_widened")

    return builder.call_te(take, *call.args, primfunc_name_hint="take_widened")


def _integer(integers: te.Tensor, row: tirx.Expr, column: tirx.Expr) -> tirx.Expr:
    """An element of the matrix of a ``take_widened``."""
    if integers.dtype == "int8":
        return integers(row, column)
    byte = integers(row, tirx.floordiv(column, 2)).astype(str(column.ty.dtype))
    return ((byte >> (tirx.floormod(column, 2) * 4)) & 15) - 8


_TAKE_WIDENED = register_op(
    TAKE_NAME, "Rows of (integers - zero) * scale.", _infer_taken, _legalize_taken
)

_WIDEN_WEIGHT = register_op(
    NAME, "(integers - zero) * scale, of blocks of a matrix.", _infer_type, _legalize
)
