# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.coalesced_reduce``: any reduction over any axes as two flattened loops.

::

    out[p...] = finish(combine over r... of lift(data[p..., r...]))

``operator`` is ``sum``, ``prod``, ``min``, ``max``, ``and``, ``or``, ``mean``, ``sum_squares``,
``argmin`` or ``argmax``. At most one parallel and one reduced extent may be symbolic; at run time
they have to be positive (GPUs also take zero outputs, and, where there is an identity, zero
elements). NaN, infinity and integer wrap-around are as in numpy (subnormal numbers
on CUDA are not: TVM lets them flush to zero); 16-bit floats are accumulated in float32 and rounded
once, 8-bit integers in int32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax, te, tirx

from schedules.compute import coalesced_reduce as compute
from schedules.errors import OpError
from schedules.tir.extents import constant, extent_of
from schedules.workload.reduce import CanonicalLoops, ReduceWorkload
from schedules.workload.reduce_operator import empty_result

from .register import is_typed, register_op

NAME = "relax.tvm_fusion.coalesced_reduce"
REDUCE_PATTERN = 3  # tvm::relax::OpPatternKind::kCommReduce: FuseOps fuses producers into it


def coalesced_reduce(
    data: relax.Expr,
    operator: str = "sum",
    axes: int | Sequence[int] | None = None,
    *,
    keepdims: bool = False,
    acc_dtype: str | None = None,
    finish: str = "auto",
) -> relax.Call:
    """Reduce ``data`` over ``axes``.

    Parameters
    ----------
    data : relax.Expr
        A tensor of float64, float32, float16, bfloat16, int64, int32, int8, uint8 or bool.
    operator : str
        The reduction; ``and``, ``or`` give bool, ``argmin``, ``argmax`` the int64 position of the
        first extreme element in the reduced axes, flattened; the others the type of the data.
    axes : int, Sequence[int] or None
        Reduced axes; None stands for all.
    keepdims : bool
        Whether reduced axes stay with extent 1.
    acc_dtype : str | None
        Type of the accumulators; by default float32 for 16-bit floats, int32 for 8-bit integers and
        bool, else the data's.
    finish : str
        How partial results of several GPU blocks are combined: ``one_block`` (no split, or over one
        cluster where the device has them), ``atomic`` (not for ``argmin`` and ``argmax``),
        ``last_block`` or ``auto``. All but ``atomic`` are deterministic to the bit. CPUs ignore it.
        Outputs of 8 bits, on OpenCL also of 16, are updated with their neighbours in a word of 32
        bits; where an output ends within such a word, whose rest may belong to other data,
        ``atomic`` is ``last_block``.

    Returns
    -------
    relax.Call
        The reduced tensor; its type is inferred when it is emitted.

    Raises
    ------
    OpError
        If an argument does not fit the data, or for an extreme of no elements.
    """
    attrs = {
        "operator": str(operator),
        "axes": None if axes is None else _axes(axes),
        "keepdims": bool(keepdims),
        "acc_dtype": acc_dtype or "",
        "finish": str(finish),
    }
    call = relax.Call(_COALESCED_REDUCE, [data], attrs)
    if is_typed(data):
        _infer_type(call, None)
    return call


def read_workload(call: relax.Call) -> tuple[ReduceWorkload, CanonicalLoops]:
    """Workload of a call of the op.

    Raises OpError if the call is not valid.
    """
    ty = call.args[0].ty
    if not isinstance(ty, relax.TensorType) or ty.shape is None or ty.dtype is None:
        raise OpError(
            f"{NAME}: data is {ty}; expected a tensor with known extents: normalize its producer, "
            "or bind its shape with relax.match_cast"
        )
    attrs = call.attrs
    axes = attrs["axes"]
    try:
        workload = ReduceWorkload.create(
            str(attrs["operator"]),
            None if axes is None else [int(axis) for axis in axes],
            ty.ndim,
            str(ty.dtype),
            bool(attrs["keepdims"]),
            str(attrs["acc_dtype"]) or None,
            str(attrs["finish"]),
        )
    except OpError as error:
        raise OpError(f"{NAME}: {error}") from None
    loops = CanonicalLoops(tuple(map(extent_of, ty.shape)), workload.axes)
    _check_symbolic(loops)
    if constant(loops.reduced) == 0 and empty_result(workload) is None:
        raise OpError(
            f"{NAME}: {workload.operator} over axes {list(workload.axes)} of shape "
            f"{list(loops.shape)} has no elements and no identity; expected at least one element"
        )
    return workload, loops


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None) -> relax.TensorType:
    workload, loops = read_workload(call)
    shape = compute.output_shape(loops, workload.keepdims)
    return relax.TensorType(shape, workload.out_dtype, call.args[0].ty.vdevice)


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    workload, loops = read_workload(call)
    shape = compute.output_shape(loops, workload.keepdims)
    if 0 in (constant(loops.outputs), constant(loops.reduced)):
        return _fill(builder, shape, empty_result(workload) or 0, workload.out_dtype)
    legal = builder.call_te(
        lambda data: compute.coalesced_reduce(data, workload),
        call.args[0],
        primfunc_name_hint=f"coalesced_{workload.operator}",
        primfunc_attrs={"op_pattern": REDUCE_PATTERN},
    )
    # The inferred type, not the compute's: its symbolic extents are simplified.
    return relax.Call(legal.op, legal.args, legal.attrs, ty_args=[call.ty])


def _fill(builder: relax.BlockBuilder, shape: list, value: float, dtype: str) -> relax.Expr:
    """A tensor of equal elements; TVM's own ``full`` fails for NaN."""

    def generate() -> te.Tensor:
        return te.compute(shape, lambda *_: tirx.const(value, dtype), name="fill")

    return builder.call_te(generate, primfunc_name_hint="fill")


def _axes(axes: int | Sequence[int]) -> list[int]:
    given = [axes] if isinstance(axes, int | tirx.IntImm) else list(axes)
    for axis in given:
        if isinstance(axis, bool) or not isinstance(axis, int | np.integer | tirx.IntImm):
            raise OpError(f"{NAME}: axis is {axis!r}; expected an integer")
    return [int(axis) for axis in given]


def _check_symbolic(loops: CanonicalLoops) -> None:
    for kind, axes in (("parallel", loops.parallel_axes), ("reduced", loops.axes)):
        symbolic = [str(loops.shape[axis]) for axis in axes if constant(loops.shape[axis]) is None]
        if len(symbolic) > 1:
            raise OpError(
                f"{NAME}: {len(symbolic)} {kind} extents are symbolic ({', '.join(symbolic)}); "
                "expected at most one: bind the others to numbers"
            )


_COALESCED_REDUCE = register_op(
    NAME, "A reduction over any axes as two coalesced loops.", _infer_type, _legalize
)
