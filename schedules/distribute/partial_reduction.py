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

Reductions may select, as argmax does: of two states, each a value of every output, one is kept. For
example, of the pairs of an index and a value that with the larger value::

    T_index[v_j], T_value[v_j] = (
        T.Select(T_value[v_j] >= A[v_k, v_j], T_index[v_j], v_k),
        T.Select(T_value[v_j] >= A[v_k, v_j], T_value[v_j], A[v_k, v_j]),
    )

Parts are combined by the same choice between the states of two ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import ir, s_tir, tirx

from ..errors import OpError
from ..tir.block_expressions import Stage, read_stages
from ..tir.expression_walk import is_if_then_else, loads, nodes, op_name, substitute
from ..tir.extents import constant
from ..tir.index_math import as_type
from .localize import whole_function
from .loop_nest import name_of, operands
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
    """A function whose outputs have the parts of a reduction along their first axis."""

    func: tirx.PrimFunc  # The function.
    exact: Mapping[int, tirx.PrimFunc]  # The same for parts of one extent, for each that there is.
    operator: str
    """Operator that combines the parts: ``sum``, ``prod``, ``min``, ``max``, ``and``, ``or``, or
    ``selection``."""
    results: int
    """Number of its outputs, the first ones, that are those of the function before. Of a selection
    all that the block computes are outputs."""
    combine: tirx.PrimFunc | None  # The function that combines the parts of a selection.
    bounds: tuple[int, ...]
    """Part k has the iterations ``[bounds[k], bounds[k + 1])`` of the reduced loop."""

    def of_rank(self, rank: int) -> tirx.PrimFunc:
        """The function of which a rank's part is to be computed."""
        return self.exact[self.extent(rank)]

    def extent(self, rank: int) -> int:
        """Iterations of a rank's part."""
        return self.bounds[rank + 1] - self.bounds[rank]


def partial_reduction(
    # The function, or a schedule of which it is the ``main``, before its loops are split.
    source: tirx.PrimFunc | s_tir.Schedule,
    loop: str | int | s_tir.schedule.LoopRV,
    # Number of parts, which differ by at most one iteration. Not needed with ``sizes``.
    ranks: int | None,
    sizes: Sequence[int] | Sequence[Sequence[int]] | None = None,  # Iterations of each part.
) -> PartialReduction | None:
    """Factor the reduction of an output by the ranks; None if the loop is no reduction.

    Raises ``OpError`` if the loop is a reduction whose parts cannot be combined, or of one of
    several outputs, or of one that another block reads, or if the sizes do not fit the loop.
    """
    func = source.mod["main"] if isinstance(source, s_tir.Schedule) else source
    read = read_stages(func, several=True) if isinstance(func, tirx.PrimFunc) else None
    if not read or isinstance(loop, int):
        return None
    name = name_of(source, loop)
    stages = _without_copy(read, list(func.params))
    outputs = [stage for stage in stages if stage.output in list(func.params)]
    reducing = [stage for stage in outputs if name in stage.loops[len(stage.axes) :]]
    if not reducing or any(constant(n) is None for stage in stages for n in stage.shape):
        return None
    stage = reducing[0]
    number = stage.loops.index(name) - len(stage.axes)
    if constant(stage.reduced[number].dom.extent) is None:
        return None
    block = [part for part in stages if part.output in stage.outputs]
    others = {load.source for part in stages if part not in block for load in loads(part.value)}
    if any(part not in block for part in outputs) or others & {*stage.outputs}:
        raise OpError(
            f"loop {name!r} of block {stage.name!r} is a reduction, which is distributed where its "
            "result is the only output, and no other block reads it"
        )
    bounds = _bounds(stage.reduced[number], name, ranks, sizes)
    extents = {end - begin for begin, end in itertools.pairwise(bounds)}
    hidden = [part for part in stage.outputs if part not in list(func.params)]
    made = [*(part for part in func.params if part in stage.outputs), *hidden]
    combine = combine_parts(block, made, len(bounds) - 1) if len(block) > 1 else None
    operator = "selection" if combine is not None else _operator(block, name)

    def factored(extent: int | None) -> tirx.PrimFunc:
        reducing = _factored(block, name, number, bounds, extent)
        parts = {old.output: new for old, new in zip(block, reducing, strict=True)}
        held = {buffer: new.output for buffer, new in parts.items()}
        params = [held.get(part, part) for part in (*func.params, *hidden)]
        return whole_function(params, [parts.get(part.output, part) for part in stages])

    exact = {extent: factored(extent) for extent in sorted(extents)}
    whole = factored(None) if len(extents) > 1 else exact[bounds[1]]
    return PartialReduction(whole, exact, operator, len(made) - len(hidden), combine, bounds)


def _without_copy(stages: Sequence[Stage], params: Sequence[tirx.Buffer]) -> Sequence[Stage]:
    """The stages without a last one that copies what another computes, as in argmax of topi."""
    *others, last = stages
    value = last.value
    if not isinstance(value, ir.TensorLoad) or value.source in params:
        return stages
    at = zip(value.indices, last.axes, strict=False)
    if len(value.indices) != len(last.axes) or not all(axis.var.same_as(i) for i, axis in at):
        return stages
    renamed = {value.source: last.output}

    def load(old: ir.TensorLoad) -> ir.TensorLoad:
        return last.output[tuple(old.indices)] if old.source in renamed else old

    return [
        replace(
            each,
            output=renamed.get(each.output, each.output),
            value=tvm_ffi.structural_map(each.value, (ir.TensorLoad, load)),
            together=tuple(renamed.get(one, one) for one in each.together),
        )
        for each in others
    ]


def _bounds(
    axis: tirx.IterVar,
    name: str,
    ranks: int | None,
    sizes: Sequence[int] | Sequence[Sequence[int]] | None,
) -> tuple[int, ...]:
    """Bounds of the parts."""
    extent = int(axis.dom.extent)
    if sizes is None:
        return balanced(extent, ranks or 1)
    return sized([extent], [name], sizes, ranks).bounds[0]


def _operator(block: Sequence[Stage], name: str) -> str:
    """The operator of a reduction."""
    stage = block[0]
    operator = _OPERATORS.get(type(stage.value))
    first = _IDENTITIES.get(operator or "")
    known = operator in ("min", "max") or (
        first is not None and getattr(stage.init, "value", None) == first
    )
    if len(block) > 1 or operator is None or not known or not _is_plain(stage):
        raise OpError(
            f"loop {name!r} of block {stage.name!r} is a reduction whose parts cannot be combined "
            "over ranks; expected a sum, product, minimum, maximum, and, or or, each begun with "
            "the value that changes nothing, or a choice by comparisons, such as argmax; or give "
            "each rank its part of an array, and reduce it by distributed.reduce(world, part, "
            "'max_sum_exp') or another operator"
        )
    return operator


def _is_plain(stage: Stage) -> bool:
    """True if what is combined with the accumulator does not read it."""
    operands = (stage.value.a, stage.value.b)
    own = [[load for load in loads(each) if load.source.same_as(stage.output)] for each in operands]
    return sorted(map(len, own)) == [0, 1] and any(
        isinstance(each, ir.TensorLoad) and each.source.same_as(stage.output) for each in operands
    )


def _factored(
    block: Sequence[Stage], name: str, number: int, bounds: Sequence[int], exact: int | None
) -> list[Stage]:
    """The stages of the parts, all or those of one extent: their first axis counts them."""
    axis, ranks = block[0].reduced[number], len(bounds) - 1
    dtype = str(axis.var.ty.dtype)

    def count(value: int) -> tirx.Expr:
        return tirx.const(value, dtype)

    part = tirx.Var(f"{axis.var.name}_part", dtype)
    axes = (tirx.IterVar(ir.Range(0, count(ranks)), part, tirx.IterVar.DataPar), *block[0].axes)
    longest = max(b - a for a, b in itertools.pairwise(bounds)) if exact is None else exact
    inner = tirx.IterVar(ir.Range(0, count(max(longest, 1))), axis.var, axis.iter_type)
    first = _first(part, bounds)
    outputs = {
        stage.output: tirx.decl_buffer(
            (count(ranks), *stage.output.shape), stage.output.dtype, stage.output.name
        )
        for stage in block
    }

    def load(old: ir.TensorLoad) -> ir.TensorLoad:
        indices = (part, *old.indices)
        return outputs[old.source][indices] if old.source in outputs else old

    def of_part(stage: Stage) -> tirx.Expr:
        value = substitute(stage.value, {axis.var: first + axis.var})
        value = tvm_ffi.structural_map(value, (ir.TensorLoad, load))
        if exact is None:
            end = _first(part + count(1), bounds)
            same = outputs[stage.output][tuple(each.var for each in axes)]
            return tirx.if_then_else(axis.var < end - first, value, same)
        return value if exact else stage.init

    reduced = tuple(inner if each is axis else each for each in block[0].reduced)
    inside = [f"{name}_1" if each == name else each for each in block[0].loops]
    return [
        replace(
            stage,
            output=outputs[stage.output],
            axes=axes,
            reduced=reduced,
            value=of_part(stage),
            loops=(name, *inside),
            together=tuple(outputs[each] for each in stage.together),
        )
        for stage in block
    ]


def _first(part: tirx.Expr, bounds: Sequence[int]) -> tirx.Expr:
    """The bound of a part that a variable counts."""
    ranks, extent = len(bounds) - 1, bounds[-1]

    def count(value: int) -> tirx.Expr:
        return tirx.const(value, str(part.ty.dtype))

    if extent % ranks and tuple(bounds) == balanced(extent, ranks):
        return tirx.floordiv(part * count(extent), count(ranks))
    steps = [end - begin for begin, end in itertools.pairwise(bounds)]
    first, begin = None, 0
    for size, group in itertools.groupby(steps):  # Successive parts of equal size.
        end = begin + len(list(group))
        before = tirx.max(part - count(begin), count(0)) if begin else part
        before = tirx.min(before, count(end - begin)) if end < ranks else before
        if size:
            term = before * count(size)
            first = term if first is None else first + term
        begin = end
    return first


_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
_LOGIC = (tirx.And, tirx.Or, tirx.Not, tirx.Select)
_CALLS = ("tirx.isnan", "prim.logical_and", "prim.logical_or", "prim.logical_not")
_CONSTANTS = (tirx.IntImm, tirx.FloatImm)


def combine_parts(
    block: Sequence[Stage],  # The stages of the block, one for each output.
    outputs: Sequence[tirx.Buffer],  # The outputs, in any order.
    ranks: int,  # Number of parts.
) -> tirx.PrimFunc | None:
    """Function that combines the parts of a selection, in the order of the ranks.

    It takes the parts of all outputs, stacked, then the outputs, in their order; None if the block
    does not select.
    """
    new = [_new(stage) for stage in block]
    number = tirx.Var("rank", str(block[0].reduced[0].var.ty.dtype))
    extent = tirx.const(ranks, str(number.ty.dtype))
    parts = [
        tirx.decl_buffer((extent, *stage.output.shape), stage.output.dtype, f"{stage.output.name}s")
        for stage in block
    ]
    at = (number, *(axis.var for axis in block[0].axes))
    taken = [
        (x, as_type(part[at], str(x.ty.dtype)))
        for x, part in zip(new, parts, strict=True)
        if x is not None
    ]
    if len(taken) < len(block):
        return None
    taken.sort(key=lambda pair: -len(nodes(pair[0], ir.Expr)))  # an index may be part of a value
    states = {*parts, *(stage.output for stage in block)}
    stages = []
    for stage, part in zip(block, parts, strict=True):
        value = stage.value
        for x, other in taken:
            value = _replaced(value, x, other)
        if not _selects(value, {stage.output, part}, states):
            return None
        step = tirx.IterVar(ir.Range(0, extent), number, tirx.IterVar.CommReduce)
        loops = (*stage.loops[: len(stage.axes)], "rank")
        stages.append(replace(stage, reduced=(step,), value=value, loops=loops))
    stacked = dict(zip((stage.output for stage in block), parts, strict=True))
    return whole_function([*(stacked[output] for output in outputs), *outputs], stages)


def _new(stage: Stage) -> tirx.Expr | None:
    """Expression that a stage may take in place of its own; None if there is no single one."""
    leaves: list[tirx.Expr] = []
    for leaf in _choices(stage.value):
        held = isinstance(leaf, ir.TensorLoad) and leaf.source.same_as(stage.output)
        if not held and not any(tvm_ffi.structural_equal(leaf, other) for other in leaves):
            leaves.append(leaf)
    if len(leaves) != 1 or isinstance(leaves[0], _CONSTANTS):
        return None
    own = set(stage.outputs)
    return None if any(load.source in own for load in loads(leaves[0])) else leaves[0]


def _choices(value: tirx.Expr) -> list[tirx.Expr]:
    """The expressions one of which a value is."""
    if is_if_then_else(value):
        branches = list(value.args)[1:]
    elif isinstance(value, tirx.Select):
        branches = [value.true_value, value.false_value]
    elif isinstance(value, tirx.Min | tirx.Max):
        branches = [value.a, value.b]
    elif _is_cast_index(value):
        branches = [value.value]
    else:
        return [value]
    return [leaf for branch in branches for leaf in _choices(branch)]


def _is_cast_index(value: tirx.Expr) -> bool:
    """True for an integer as one of another width: TVM computes indices in wider ones."""
    return isinstance(value, tirx.Cast) and all(
        str(each.ty.dtype).startswith("int") for each in (value, value.value)
    )


def _replaced(value: tirx.Expr, old: tirx.Expr, new: tirx.Expr) -> tirx.Expr:
    if isinstance(old, ir.Var):
        return substitute(value, {old: new})

    def replacement(node: tirx.Expr) -> tirx.Expr:
        return new if tvm_ffi.structural_equal(node, old) else node

    return tvm_ffi.structural_map(value, (type(old), replacement))


def _selects(value: tirx.Expr, outputs: set[tirx.Buffer], states: set[tirx.Buffer]) -> bool:
    """True if a value is one of its buffers' elements, chosen by comparisons of states."""
    if is_if_then_else(value):
        condition, *branches = value.args
    elif isinstance(value, tirx.Select):
        condition, *branches = value.condition, value.true_value, value.false_value
    elif isinstance(value, tirx.Min | tirx.Max):
        condition, *branches = tirx.const(True, "bool"), value.a, value.b
    elif _is_cast_index(value):
        return _selects(value.value, outputs, states)
    else:
        return isinstance(value, ir.TensorLoad) and value.source in outputs
    return _compares(condition, states) and all(
        _selects(each, outputs, states) for each in branches
    )


def _compares(condition: tirx.Expr, states: set[tirx.Buffer]) -> bool:
    """True for comparisons of elements of states with each other or constants, and their logic."""
    if isinstance(condition, ir.TensorLoad):
        return condition.source in states
    if isinstance(condition, tirx.Cast):
        return _compares(condition.value, states)
    if isinstance(condition, (*_COMPARISONS, *_LOGIC)) or op_name(condition) in _CALLS:
        return all(_compares(each, states) for each in operands(condition))
    return isinstance(condition, _CONSTANTS)
