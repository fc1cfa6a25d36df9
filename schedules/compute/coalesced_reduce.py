# SPDX-License-Identifier: Apache-2.0
"""TE compute of a coalesced reduction: three stages over the two flattened loops.

Block names are fixed, because schedule rules find their stages by them::

    reduce_value[m, n]  = lift(data[subscripts(m, n)])
    reduce_state[m]     = combine over n of reduce_value[m, n]
    reduce_finish[...]  = finish(reduce_state[m])
"""

from __future__ import annotations

import json

from tvm import te, tirx

from schedules import attributes

from ..tir.extents import constant
from ..tir.index_math import i64, ravel
from ..workload.reduce import CanonicalLoops, ReduceWorkload
from ..workload.reduce_operator import combine, field_dtypes, finish, identity, lift, state_of_one

VALUE, STATE, FINISH = "reduce_value", "reduce_state", "reduce_finish"


def coalesced_reduce(data: te.Tensor, workload: ReduceWorkload) -> te.Tensor:
    """Reduce ``data`` over ``workload.axes``.

    Parameters
    ----------
    data : te.Tensor
        Any number of axes with positive extents, at most one parallel and one reduced extent being
        symbolic.
    workload : ReduceWorkload
        Operator, axes and types.

    Returns
    -------
    te.Tensor
        The parallel axes, and the reduced ones as 1 if ``workload.keepdims``.
    """
    loops = CanonicalLoops(tuple(data.shape), workload.axes)
    outputs, reduced = loops.outputs, loops.reduced
    value = te.compute(
        (i64(outputs), i64(reduced)),
        lambda m, n: lift(workload, data(*loops.subscripts(m, n))),
        name=VALUE,
        attrs={
            attributes.REDUCE: workload.to_json(),
            attributes.REDUCE_SHAPE: json.dumps([constant(extent) for extent in data.shape]),
        },
    )
    state = _reduce(value, workload, i64(outputs), i64(reduced))
    shape = output_shape(loops, workload.keepdims)

    def element(*indices: tirx.Var) -> tirx.Expr:
        m = ravel(indices, shape)
        [result] = finish(workload, tuple(field[m] for field in state), reduced)
        return result

    return te.compute(shape, element, name=FINISH)


def column_sums(data: te.Tensor, axes: tuple[int, ...], rows: int) -> te.Tensor:
    """Sum ``data`` over groups of neighbouring rows, as far as a block of a row kernel goes.

    ::

        out[g, n] = sum over r < rows, g * rows + r < M of data[g * rows + r, n]

    Parameters
    ----------
    data : te.Tensor
        Data of known extents; floats of 16 or 32 bits.
    axes : tuple[int, ...]
        Axes that number the ``M`` rows; the others number the ``N`` columns.
    rows : int
        Rows of a partial sum.

    Returns
    -------
    te.Tensor
        ``float32[ceil(M / rows), N]``; their sum over the first axis is that of ``data``.
    """
    loops = CanonicalLoops(tuple(data.shape), axes)
    count, columns = int(loops.reduced), int(loops.outputs)
    r = te.reduce_axis((0, i64(rows)), name="r")

    def element(group: tirx.Var, n: tirx.Var) -> tirx.Expr:
        m = group * i64(rows) + r
        value = data(*loops.subscripts(n, m)).astype("float32")
        if count % rows:
            value = tirx.if_then_else(m < i64(count), value, tirx.const(0, "float32"))
        return te.sum(value, axis=r)

    shape = (i64(-(-count // rows)), i64(columns))
    return te.compute(shape, element, name="column_sums", attrs={attributes.COLUMN_SUMS: rows})


def output_shape(loops: CanonicalLoops, keepdims: bool) -> list[int | tirx.Expr]:
    """Extents of the output's axes."""
    if keepdims:
        return [1 if axis in loops.axes else size for axis, size in enumerate(loops.shape)]
    return [loops.shape[axis] for axis in loops.parallel_axes]


def _reduce(
    value: te.Tensor, workload: ReduceWorkload, outputs: tirx.Expr, reduced: tirx.Expr
) -> tuple[te.Tensor, ...]:
    n = te.reduce_axis((0, reduced), name="n")
    fields = len(field_dtypes(workload))

    def combined(left, right):
        states = [state if fields > 1 else (state,) for state in (left, right)]
        result = combine(workload, *map(tuple, states))
        return result if fields > 1 else result[0]

    def start(*_):
        return identity(workload) if fields > 1 else identity(workload)[0]

    reducer = te.comm_reducer(combined, start, name=workload.operator)

    def element(m: tirx.Var) -> tirx.Expr:
        state = state_of_one(workload, value[m, n], n.astype("int64"))
        return reducer(state if fields > 1 else state[0], axis=n)

    result = te.compute((outputs,), element, name=STATE)
    return tuple(result) if fields > 1 else (result,)
