# SPDX-License-Identifier: Apache-2.0
"""Legalization of ``relax.max`` and ``relax.min`` of floats that begins with an infinity.

TVM begins with the smallest finite number, so that the maximum of nothing but -inf is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import relax, te, tirx
from tvm.ir import Op

FLOATS = ("float16", "float32", "float64")
"""Types of which TVM knows an infinity and begins with another number."""

Legalization = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def legalize_extreme(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """The reduction ``call``, of ``FLOATS`` by our compute, of other types by TVM's."""
    if str(call.args[0].ty.dtype) not in FLOATS:
        return Op.get(call.op.name).get_attr("FLegalize")(builder, call)
    rank = len(call.args[0].ty.shape)
    axes = call.attrs.axis
    reduced = range(rank) if axes is None else [int(axis) % rank for axis in axes]
    name = call.op.name.removeprefix("relax.")
    return builder.call_te(
        extreme,
        call.args[0],
        sorted(reduced),
        bool(call.attrs.keepdims),
        name == "max",
        primfunc_name_hint=name,
    )


def extreme(data: te.Tensor, axes: Sequence[int], keepdims: bool, largest: bool) -> te.Tensor:
    """The largest or the smallest element along some axes; an infinity if there is none."""

    def begin(dtype: str) -> tirx.Expr:
        infinity = tirx.infinity(dtype)
        return -infinity if largest else infinity

    def combine(one: tirx.Expr, other: tirx.Expr) -> tirx.Expr:
        return tirx.max(one, other) if largest else tirx.min(one, other)

    reducer = te.comm_reducer(combine, begin, name="extreme")
    loops = {axis: te.reduce_axis((0, data.shape[axis]), name=f"k{axis}") for axis in axes}
    kept = [axis for axis in range(len(data.shape)) if axis not in loops]
    shape = [
        1 if axis in loops else data.shape[axis]
        for axis in range(len(data.shape))
        if keepdims or axis not in loops
    ]

    def element(*indices: tirx.Var) -> tirx.Expr:
        outer = [indices[axis] for axis in kept] if keepdims else indices
        places = dict(loops) | dict(zip(kept, outer, strict=True))
        ordered = [places[axis] for axis in range(len(data.shape))]
        return reducer(data(*ordered), axis=list(loops.values()))

    return te.compute(shape, element, name=f"{data.op.name}_red")


LEGALIZATIONS: dict[str, Legalization] = {
    "relax.max": legalize_extreme,
    "relax.min": legalize_extreme,
}
"""By op, for ``LegalizeOps`` where no pass has made coalesced reductions of them."""
