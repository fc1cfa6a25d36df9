# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.byte_matmul``: a product of two tensors of bytes with its epilogue.

::

    sums = permute_dims(left + offset - left_zero) @ permute_dims(right + offset - right_zero)
    value = sums * scale * factor
    value = min(max(round(value), low), high)                          where these are given
    out = permute_dims(value * rescale + added)                        float32
    out = permute_dims(value - low), permute_dims(value - low - 128)   uint8, int8

    left, right, left_zero, right_zero uint8 or int8    factor, added float32    int32 for sums

Sums are exact in int32. Zero points and factor are scalars; ``added`` is broadcast and has as many
dimensions as the product. They may be left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, tirx
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.matmul.byte_matmul import byte_matmul as byte_matmul_kernel
from schedules.cpu.loops.matmul.byte_product import ByteFactor, ByteProduct, ByteResult
from schedules.errors import OpError
from schedules.tir.extents import extent_of

from .register import is_typed, register_op

NAME = "relax.tvm_fusion.byte_matmul"
BYTES = ("uint8", "int8")


def byte_matmul(
    left: relax.Expr,
    right: relax.Expr,
    *,
    left_axes: Sequence[int],
    right_axes: Sequence[int],
    offsets: tuple[int, int] = (0, 0),
    zeros: tuple[relax.Expr | None, relax.Expr | None] = (None, None),
    factor: relax.Expr | None = None,
    scale: float = 1.0,
) -> relax.Call:
    """Multiply tensors of bytes.

    Parameters
    ----------
    left, right : relax.Expr
        uint8 or int8; both of two dimensions or more, whose batches are broadcast.
    left_axes, right_axes : Sequence[int]
        Their axes in the order of the product's: batch, rows, columns.
    offsets : tuple[int, int]
        Constants that are added to them.
    zeros : tuple[relax.Expr | None, relax.Expr | None]
        Scalars of their types that are subtracted.
    factor : relax.Expr | None
        A scalar of float32 that sums are multiplied by.
    scale : float
        A constant.

    Returns
    -------
    relax.Call
        float32 [*batch, rows, columns].

    Raises
    ------
    OpError
        If types or shapes do not fit.
    """
    given = ["left", "right"]
    named = (
        "both"
        if all(zero is not None for zero in zeros)
        else "".join(name for name, zero in zip(given, zeros, strict=True) if zero is not None)
    )
    operands = [left, right, *(zero for zero in (*zeros, factor) if zero is not None)]
    rank = max(len(left_axes), len(right_axes))
    attrs = {
        "left_axes": [*map(int, left_axes)],
        "right_axes": [*map(int, right_axes)],
        "offsets": [*map(int, offsets)],
        "zeros": named,
        "scale": float(scale),
        "axes": [*range(rank)],
        "out_dtype": "float32",
        "has_factor": factor is not None,
        "rescale": 1.0,
        "is_added_to": False,
    }
    call = relax.Call(_BYTE_MATMUL, operands, attrs)
    if is_typed(*operands):
        _infer_type(call)
    return call


def product_of(call: relax.Call) -> ByteProduct:
    """The product that a call computes."""
    attrs = call.attrs
    zeros = str(attrs["zeros"])
    left, right = (
        ByteFactor(
            tuple(map(extent_of, call.args[number].ty.shape.values)),
            tuple(map(int, attrs[f"{side}_axes"])),
            str(call.args[number].ty.dtype),
            int(attrs["offsets"][number]),
            zeros in (side, "both"),
        )
        for number, side in enumerate(("left", "right"))
    )
    bounds = None
    if "low" in attrs.keys():
        bounds = float(attrs["low"]), float(attrs["high"])
    added = None
    if bool(attrs["is_added_to"]):
        added = tuple(map(extent_of, call.args[-1].ty.shape.values))
    result = ByteResult(
        tuple(map(int, attrs["axes"])),
        str(attrs["out_dtype"]),
        float(attrs["scale"]),
        bool(attrs["has_factor"]),
        bounds,
        float(attrs["rescale"]),
        added,
    )
    return ByteProduct(left, right, result)


def changed(call: relax.Call, more: Sequence[relax.Expr] = (), **attrs: object) -> relax.Call:
    """The same product with other attributes, and operands behind its own."""
    return relax.Call(call.op, [*call.args, *more], dict(call.attrs.items()) | attrs)


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    left, right, *others = (operand.ty for operand in call.args)
    for side, ty in (("left", left), ("right", right)):
        shape = ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else [None]
        is_known = all(isinstance(extent, tirx.IntImm) for extent in shape)
        if not is_known or str(ty.dtype) not in BYTES or ty.ndim < 2:
            raise OpError(
                f"{NAME}: {side} is {ty}; expected uint8 or int8 of known shape, and of two "
                "dimensions or more"
            )
        axes = [*map(int, call.attrs[f"{side}_axes"])]
        if sorted(axes) != [*range(ty.ndim)]:
            raise OpError(f"{NAME}: {side}_axes are {axes}; expected an order of {ty.ndim} axes")
    product = product_of(call)
    scalars = [factor.dtype for factor in (product.left, product.right) if factor.has_zero]
    scalars += ["float32"] * product.result.has_factor
    found = [(str(ty.dtype), ty.ndim) for ty in others]
    wanted = [(dtype, 0) for dtype in scalars]
    if product.result.added is not None:
        wanted.append(("float32", len(product.extents)))
    if found != wanted:
        raise OpError(f"{NAME}: other operands are {found}; expected {wanted}")
    depths = product.depth, product.right.extents[-2]
    if depths[0] != depths[1]:
        raise OpError(f"{NAME}: {depths[0]} columns by {depths[1]} rows; expected as many")
    if reason := product.misfit():
        raise OpError(f"{NAME}: {reason}")
    stored = [product.extents[axis] for axis in product.result.axes]
    return relax.TensorType(stored, product.result.dtype)


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    target = Target.current(allow_none=True) or Target("llvm")
    product, cpu = product_of(call), CPUInfo.from_target(target)
    if reason := product.misfit(cpu):
        raise OpError(f"{NAME}: {reason}")
    kernel = byte_matmul_kernel(product, cpu)
    return relax.call_tir(builder.add_func(kernel, "byte_matmul"), list(call.args), call.ty)


_BYTE_MATMUL = register_op(
    NAME, "Product of two tensors of bytes with its epilogue.", _infer_type, _legalize
)
