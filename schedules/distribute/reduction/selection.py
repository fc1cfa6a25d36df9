# SPDX-License-Identifier: Apache-2.0
"""Reductions that select, such as argmax: of two states, each a value of every output, one is kept.

For example, of the pairs of an index and a value that with the larger value::

    T_index[v_j], T_value[v_j] = (
        T.Select(T_value[v_j] >= A[v_k, v_j], T_index[v_j], v_k),
        T.Select(T_value[v_j] >= A[v_k, v_j], T_value[v_j], A[v_k, v_j]),
    )

Parts are combined by the same choice between the states of two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tvm_ffi
from tvm import ir, tirx

from ...tir.block_expressions import Stage
from ...tir.expression_walk import is_if_then_else, loads, nodes, op_name, substitute
from ...tir.index_math import as_type
from ..localize import whole_function
from ..loop_nest import operands

_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
_LOGIC = (tirx.And, tirx.Or, tirx.Not, tirx.Select)
_CALLS = ("tirx.isnan", "prim.logical_and", "prim.logical_or", "prim.logical_not")
_CONSTANTS = (tirx.IntImm, tirx.FloatImm)


def combine_parts(
    block: Sequence[Stage], outputs: Sequence[tirx.Buffer], ranks: int
) -> tirx.PrimFunc | None:
    """Function that combines the parts of a selection, in the order of the ranks.

    Parameters
    ----------
    block : Sequence[Stage]
        The stages of the block, one for each output.
    outputs : Sequence[tirx.Buffer]
        The outputs, in any order.
    ranks : int
        Number of parts.

    Returns
    -------
    tirx.PrimFunc or None
        Takes the parts of all outputs, stacked, then the outputs, in their order; None if the block
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
    """What a stage may take in place of what it has; None if that is no single expression."""
    found: list[tirx.Expr] = []
    for leaf in _choices(stage.value):
        held = isinstance(leaf, ir.TensorLoad) and leaf.source.same_as(stage.output)
        if not held and not any(tvm_ffi.structural_equal(leaf, other) for other in found):
            found.append(leaf)
    if len(found) != 1 or isinstance(found[0], _CONSTANTS):
        return None
    own = set(stage.outputs)
    return None if any(load.source in own for load in loads(found[0])) else found[0]


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


def _selects(value: tirx.Expr, own: set[tirx.Buffer], states: set[tirx.Buffer]) -> bool:
    """True if a value is one of its buffers' elements, chosen by comparisons of states."""
    if is_if_then_else(value):
        condition, *branches = value.args
    elif isinstance(value, tirx.Select):
        condition, *branches = value.condition, value.true_value, value.false_value
    elif isinstance(value, tirx.Min | tirx.Max):
        condition, *branches = tirx.const(True, "bool"), value.a, value.b
    elif _is_cast_index(value):
        return _selects(value.value, own, states)
    else:
        return isinstance(value, ir.TensorLoad) and value.source in own
    return _compares(condition, states) and all(_selects(each, own, states) for each in branches)


def _compares(condition: tirx.Expr, states: set[tirx.Buffer]) -> bool:
    """True for comparisons of elements of states with each other or constants, and their logic."""
    if isinstance(condition, ir.TensorLoad):
        return condition.source in states
    if isinstance(condition, tirx.Cast):
        return _compares(condition.value, states)
    if isinstance(condition, (*_COMPARISONS, *_LOGIC)) or op_name(condition) in _CALLS:
        return all(_compares(each, states) for each in operands(condition))
    return isinstance(condition, _CONSTANTS)
