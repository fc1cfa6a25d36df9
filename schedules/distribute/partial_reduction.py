# SPDX-License-Identifier: Apache-2.0
"""Reduced loops over ranks: each computes a part of the reduction, and the parts are combined.

The reduction is factored, as by ``rfactor`` of a schedule, by a loop over the ranks, which is then
distributed like any other. This, over four ranks::

    for j, k in T.grid(8, 40):
        with T.sblock("C"):
            vj, vk = T.axis.remap("SR", [j, k])
            with T.init():
                C[vj] = 0
            C[vj] = C[vj] + A[vk, vj]

becomes::

    for k, j, k_1 in T.grid(4, 8, 10):
        with T.sblock("C"):
            vp, vj, vk = T.axis.remap("SSR", [k, j, k_1])
            with T.init():
                C[vp, vj] = 0
            C[vp, vj] = C[vp, vj] + A[10 * vp + vk, vj]

Parts differ by at most one iteration, or have given sizes. Where they differ, the function of all
parts leaves out by a condition what a part has not; kernels are made of functions of parts of one
extent, without one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import ir, s_tir, tirx

from ..errors import OpError
from ..tir.block_expressions import Stage, read_stages
from ..tir.expression_walk import loads, substitute
from ..workload.reduce import constant
from .localize import whole_function
from .loop_nest import name_of
from .partition import balanced, sized

_OPERATORS = {
    tirx.Add: "sum",
    tirx.Mul: "prod",
    tirx.Min: "min",
    tirx.Max: "max",
    tirx.And: "and",
    tirx.Or: "or",
}
_IDENTITIES = {"sum": 0, "prod": 1, "and": 1, "or": 0}
"""First values that parts may share; those of extremes may be any, since they are idempotent."""


@dataclass(frozen=True)
class PartialReduction:
    """A function whose output has the parts of a reduction along its first axis.

    Parameters
    ----------
    func : tirx.PrimFunc
        The function.
    exact : Mapping[int, tirx.PrimFunc]
        The same for parts of one extent, for each that there is.
    operator : str
        What combines the parts: ``sum``, ``prod``, ``min``, ``max``, ``and`` or ``or``.
    bounds : tuple[int, ...]
        Part k has the iterations ``[bounds[k], bounds[k + 1])`` of the reduced loop.
    """

    func: tirx.PrimFunc
    exact: Mapping[int, tirx.PrimFunc]
    operator: str
    bounds: tuple[int, ...]

    def of_rank(self, rank: int) -> tirx.PrimFunc:
        """The function of which a rank's part is to be computed."""
        return self.exact[self.extent(rank)]

    def extent(self, rank: int) -> int:
        """Iterations of a rank's part."""
        return self.bounds[rank + 1] - self.bounds[rank]


def partial_reduction(
    source: tirx.PrimFunc | s_tir.Schedule,
    loop: str | int | s_tir.schedule.LoopRV,
    ranks: int | None,
    sizes: Sequence[int] | None = None,
) -> PartialReduction | None:
    """Factor the reduction of an output by the ranks; None if the loop is no reduction.

    Parameters
    ----------
    source : tirx.PrimFunc or s_tir.Schedule
        The function, or a schedule of which it is the ``main``, before its loops are split.
    loop : str, int or LoopRV
        The loop.
    ranks : int, optional
        Number of parts, which differ by at most one iteration. Not needed with ``sizes``.
    sizes : Sequence[int], optional
        Iterations of each part.

    Raises
    ------
    OpError
        If the loop is a reduction whose parts cannot be combined, or of one of several outputs, or
        of one that another block reads, or if the sizes do not fit the loop.
    """
    func = source.mod["main"] if isinstance(source, s_tir.Schedule) else source
    stages = read_stages(func) if isinstance(func, tirx.PrimFunc) else None
    if stages is None or isinstance(loop, int):
        return None
    name = name_of(source, loop)
    outputs = [stage for stage in stages if stage.output in list(func.params)]
    found = [stage for stage in outputs if name in stage.loops[len(stage.axes) :]]
    if not found or any(constant(n) is None for stage in stages for n in stage.shape):
        return None
    [stage] = found[:1]
    number = stage.loops.index(name) - len(stage.axes)
    if constant(stage.reduced[number].dom.extent) is None:
        return None
    read = [load.source for other in stages if other is not stage for load in loads(other.value)]
    if len(outputs) > 1 or stage.output in read:
        raise OpError(
            f"loop {name!r} of block {stage.name!r} is a reduction, which is distributed where its "
            "result is the only output, and no other block reads it"
        )
    operator = _operator(stage, name)
    bounds = _bounds(stage.reduced[number], name, ranks, sizes)
    extents = {end - begin for begin, end in itertools.pairwise(bounds)}

    def factored(extent: int | None) -> tirx.PrimFunc:
        parts = _factored(stage, name, number, bounds, extent)
        params = [parts.output if each.same_as(stage.output) else each for each in func.params]
        return whole_function(params, [parts if each is stage else each for each in stages])

    exact = {extent: factored(extent) for extent in sorted(extents)}
    whole = factored(None) if len(extents) > 1 else exact[bounds[1]]
    return PartialReduction(whole, exact, operator, bounds)


def _bounds(
    axis: tirx.IterVar, name: str, ranks: int | None, sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """Bounds of the parts."""
    extent = int(axis.dom.extent)
    if sizes is None:
        return balanced(extent, ranks or 1)
    return sized([extent], [name], sizes, ranks).bounds[0]


def _operator(stage: Stage, name: str) -> str:
    """The operator of a reduction."""
    operator = _OPERATORS.get(type(stage.value))
    first = _IDENTITIES.get(operator or "")
    known = operator in ("min", "max") or (
        first is not None and getattr(stage.init, "value", None) == first
    )
    if operator is None or not known or len(_operands(stage)) != 1:
        raise OpError(
            f"loop {name!r} of block {stage.name!r} is a reduction whose parts cannot be combined "
            "over ranks; expected a sum, product, minimum, maximum, and, or or, each begun with "
            "the value that changes nothing"
        )
    return operator


def _operands(stage: Stage) -> list[tirx.Expr]:
    """What is combined with the accumulator: one operand, which does not read it."""
    both = [stage.value.a, stage.value.b]
    return [
        operand
        for operand, other in zip(both, reversed(both), strict=True)
        if isinstance(other, ir.TensorLoad)
        and other.source.same_as(stage.output)
        and not any(load.source.same_as(stage.output) for load in loads(operand))
    ]


def _factored(
    stage: Stage, name: str, number: int, bounds: Sequence[int], exact: int | None
) -> Stage:
    """The stage of the parts, all or those of one extent: its first axis counts them."""
    axis, extent, ranks = stage.reduced[number], bounds[-1], len(bounds) - 1
    dtype = str(axis.var.ty.dtype)

    def count(value: int) -> tirx.Expr:
        return tirx.const(value, dtype)

    part = tirx.Var(f"{axis.var.name}_part", dtype)
    longest = max(b - a for a, b in itertools.pairwise(bounds)) if exact is None else exact
    inner = tirx.IterVar(ir.Range(0, count(max(longest, 1))), axis.var, axis.iter_type)
    first = _first(part, bounds)
    [operand] = _operands(stage)
    operand = substitute(operand, {axis.var: first + axis.var})
    if exact is None:
        end = _first(part + count(1), bounds)
        operand = tirx.if_then_else(axis.var < end - first, operand, stage.init)
    elif exact == 0:
        operand = stage.init
    output = tirx.decl_buffer(
        (count(ranks), *stage.output.shape), stage.output.dtype, stage.output.name
    )
    axes = (tirx.IterVar(ir.Range(0, count(ranks)), part, tirx.IterVar.DataPar), *stage.axes)
    accumulator = output[tuple(each.var for each in axes)]
    reduced = [inner if each is axis else each for each in stage.reduced]
    inside = [f"{name}_1" if each == name else each for each in stage.loops]
    return replace(
        stage,
        output=output,
        axes=axes,
        reduced=tuple(reduced),
        value=type(stage.value)(accumulator, operand),
        loops=(name, *inside),
    )


def _first(part: tirx.Expr, bounds: Sequence[int]) -> tirx.Expr:
    """The bound of a part that a variable counts."""
    ranks, extent = len(bounds) - 1, bounds[-1]

    def count(value: int) -> tirx.Expr:
        return tirx.const(value, str(part.ty.dtype))

    if extent % ranks and tuple(bounds) == balanced(extent, ranks):
        return tirx.floordiv(part * count(extent), count(ranks))
    steps = [end - begin for begin, end in itertools.pairwise(bounds)]
    first, begin = None, 0
    for size, group in itertools.groupby(steps):  # as many as each of some successive parts
        end = begin + len(list(group))
        before = tirx.max(part - count(begin), count(0)) if begin else part
        before = tirx.min(before, count(end - begin)) if end < ranks else before
        if size:
            term = before * count(size)
            first = term if first is None else first + term
        begin = end
    return first
