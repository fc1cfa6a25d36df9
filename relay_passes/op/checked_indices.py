# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.checked_indices``: an index out of bounds is an error, on CPUs.

No thread of a GPU can raise an error: there, the nearest index inside takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, te, tirx
from tvm.target import Target

from schedules.cpu.loops.checked_indices import check_indices
from schedules.errors import OpError
from schedules.tir.extents import Extent, constant

from .register import is_typed, register_op

OP = "relax.tvm_fusion.checked_indices"


def checked_indices(
    indices: relax.Expr,
    extents: Sequence[Extent],
    message: str,
    guarded: bool = False,
    taken: relax.Expr | None = None,
) -> relax.Call:
    """Check indices, and count those that are negative from the beginning.

    Parameters
    ----------
    indices : relax.Expr
        int32 or int64. With one extent, any shape; with several, [..., len(extents)], coordinates.
    extents : Sequence
        Sizes of the indexed dimensions; they may be symbolic. The indices of one go from
        ``-extent`` to ``extent - 1``.
    message : str
        The error's; where it is empty, the nearest index inside takes the place of one outside.
    guarded : bool
        Whether the reader reads no element where an extent is 0, which has no nearest index.
    taken : relax.Expr, optional
        bool of one element: where it is false, the nearest index inside takes the place of one
        outside, too.

    Returns
    -------
    relax.Call
        Indices from 0 to ``extent - 1``, of the shape and the type of ``indices``.

    Raises
    ------
    OpError
        If the indices have another type or shape; when it is legalized without an error to raise,
        if an extent is symbolic and the reader is not guarded.
    """
    attributes = {"message": message, "guarded": int(guarded)}
    conditions = [] if taken is None else [taken]
    arguments = [indices, relax.ShapeExpr(extents), *conditions]
    call = relax.Call(_CHECKED_INDICES, arguments, attributes)
    if all(map(is_typed, (indices, *conditions))):
        _infer_type(call, None)
    return call


def is_checked(builder: relax.BlockBuilder, value: relax.Expr) -> bool:
    """Return whether a variable is the result of this op."""
    bound = builder.lookup_binding(value) if isinstance(value, relax.Var) else None
    return isinstance(bound, relax.Call) and bound.op == _CHECKED_INDICES


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None) -> relax.TensorType:
    indices, extents, *taken = call.args
    ty, count = indices.ty, len(extents.values)
    if not isinstance(ty, relax.TensorType) or str(ty.dtype) not in ("int32", "int64"):
        raise OpError(f"{OP}: the indices are {ty}; expected int32 or int64")
    if not isinstance(ty.shape, relax.ShapeExpr):
        raise OpError(f"{OP}: the indices are {ty}; expected a known rank")
    for condition in taken:
        is_bool = isinstance(condition.ty, relax.TensorType) and str(condition.ty.dtype) == "bool"
        sizes = condition.ty.shape.values if is_bool and condition.ty.shape is not None else [0]
        if any(constant(size) != 1 for size in sizes):
            raise OpError(f"{OP}: the condition is {condition.ty}; expected a bool of one element")
    if count > 1 and (not ty.shape.values or constant(ty.shape.values[-1]) != count):
        raise OpError(f"{OP}: the indices are {ty}; expected {count} coordinates in the last axis")
    return ty


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    indices, extents = call.args[0], list(call.args[1].values)
    target = Target.current(allow_none=True) or Target("llvm")
    message = str(call.attrs["message"])
    if target.kind.name != "llvm" or not message:
        if not call.attrs["guarded"] and any(constant(extent) is None for extent in extents):
            raise OpError(
                f"{OP}: the size of an indexed dimension is open, and {target.kind.name!r} has no "
                "error to raise here; expected a number: give the model's inputs sizes"
            )
        return builder.call_te(_nearest, indices, extents, primfunc_name_hint="indices_in_bounds")
    ty = _infer_type(call, None)
    taken = call.args[2:]
    sizes = taken[0].ty.shape.values if taken else None
    is_guarded = bool(call.attrs["guarded"])
    kernel = check_indices(ty.shape.values, extents, str(ty.dtype), message, sizes, is_guarded)
    function = builder.add_func(kernel, "checked_indices")
    open_extents = [extent for extent in extents if constant(extent) is None]
    return relax.call_tir(function, [indices, *taken, *open_extents], ty)


def _nearest(indices: te.Tensor, extents: Sequence[tirx.Expr]) -> te.Tensor:
    """The nearest index from 0 to ``extent - 1``; 0 where the extent is."""

    def index(*place: tirx.Var) -> tirx.Expr:
        bound = extents[0]
        for axis, extent in enumerate(extents[1:], start=1):
            bound = tirx.Select(place[-1] == axis, extent, bound)
        value = tirx.Cast("int64", indices(*place))
        from_start = tirx.Select(value < 0, value + bound, value)
        return tirx.Cast(indices.dtype, tirx.max(tirx.min(from_start, bound - 1), 0))

    return te.compute(indices.shape, index, name="indices_in_bounds")


_CHECKED_INDICES = register_op(
    OP, "Indices from the beginning, checked to be within bounds.", _infer_type, _legalize
)
