# SPDX-License-Identifier: Apache-2.0
"""Sums of exponentials that one kernel can compute together with the maximum of their rows.

Such a sum uses the maximum, as ``sum(exp(x - max(x)))`` of a softmax does. Where no block can
process a row, its kernel has a state of two fields instead
(:mod:`schedules.gpu.reduce.plan.group`). The calls between the maximum and the sum are
then computed in this kernel only: other readers recompute them, so that their results are never
stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import relax

from schedules.gpu.reduce.plan.configure import read_group
from schedules.gpu.reduce.plan.group import in_one_stage

from .call_group import CallGroup
from .groups import ReductionGroup, ReductionGroups
from .row_space import ROW, TILE

Links = dict[relax.Var, frozenset[relax.Var]]
"""The calls between each such sum and its maximum that have the size of the data."""


@dataclass(frozen=True)
class OnlineSum:
    """A sum of exponentials.

    Parameters
    ----------
    total, maximum : relax.Var
        The sum, and the maximum that it uses.
    links : tuple[relax.Var, ...]
        The calls between them that have the size of the data, in the order of the block.
    """

    total: relax.Var
    maximum: relax.Var
    links: tuple[relax.Var, ...]


def find_online_sums(groups: ReductionGroups) -> list[OnlineSum]:
    """The sums that are in another group than their maximum, but need not be."""
    reached = _reached(groups)
    found = (_find(groups, reached, total) for total in groups.calls.reductions)
    return [online for online in found if online is not None]


def with_own_links(
    block: relax.DataflowBlock, sums: Sequence[OnlineSum]
) -> tuple[relax.DataflowBlock, Links]:
    """Give every sum links that nothing else reads.

    Returns
    -------
    tuple[relax.DataflowBlock, Links]
        The block with a copy of the links before each sum, and the copies.
    """
    by_total = {online.total: online for online in sums}
    bindings: list[relax.Binding] = []
    values = {binding.var: binding.value for binding in block.bindings}
    links: Links = {}
    for binding in block.bindings:
        if binding.var not in by_total:
            bindings.append(binding)
            continue
        copies: dict[relax.Expr, relax.Var] = {}
        for link in by_total[binding.var].links:
            copy = relax.DataflowVar(link.name, link.ty)
            bindings.append(relax.VarBinding(copy, _rebound(values[link], copies)))
            copies[link] = copy
        bindings.append(relax.VarBinding(binding.var, _rebound(binding.value, copies)))
        links[binding.var] = frozenset(copies.values())
    return relax.DataflowBlock(bindings), links


def _reached(groups: ReductionGroups) -> dict[relax.Expr, frozenset[relax.Var]]:
    """The reductions that an injective call uses, directly or indirectly."""
    calls = groups.calls
    reached: dict[relax.Expr, frozenset[relax.Var]] = {}
    for var in groups.order.bindings:
        if var in calls.reductions:
            reached[var] = frozenset({var})
        elif var in calls.injective:
            before = (reached.get(tensor, frozenset()) for tensor in calls.tensors(var))
            reached[var] = frozenset().union(*before)
    return reached


def _find(
    groups: ReductionGroups,
    reached: Mapping[relax.Expr, frozenset[relax.Var]],
    total: relax.Var,
) -> OnlineSum | None:
    calls = groups.calls
    if calls.workload(total).operator != "sum":
        return None
    data = calls.tensors(total)[0]
    for maximum in sorted(reached.get(data, ()), key=groups.order.position.__getitem__):
        if calls.workload(maximum).operator == "max" and data != maximum:
            between = _between(groups, reached, data, maximum)
            group = _together(groups, maximum, total, between)
            if group is not None and _is_recognised(groups, group, maximum, total):
                return OnlineSum(total, maximum, tuple(v for v in between if v in group.links))
    return None


def _between(
    groups: ReductionGroups,
    reached: Mapping[relax.Expr, frozenset[relax.Var]],
    data: relax.Var,
    maximum: relax.Var,
) -> list[relax.Var]:
    """The users of the maximum on the paths to ``data``, in the order of the block."""
    found, queue = {data}, [data]
    while queue:
        for tensor in groups.calls.tensors(queue.pop()):
            if tensor != maximum and maximum in reached.get(tensor, ()) and tensor not in found:
                found.add(tensor)
                queue.append(tensor)
    return sorted(found, key=groups.order.position.__getitem__)


def _together(
    groups: ReductionGroups,
    maximum: relax.Var,
    total: relax.Var,
    between: Sequence[relax.Var],
) -> ReductionGroup | None:
    """The group of both, if that is needed and possible."""
    first, second = groups.group_of(maximum), groups.group_of(total)
    if first is None or second is None or first is second or first.finish != second.finish:
        return None
    kinds = {var: first.space.kind(var) for var in between}
    links = frozenset(var for var in between if kinds[var] == TILE)
    group = ReductionGroup(
        first.space,
        first.finish,
        frozenset({maximum, total}),
        rows=frozenset(var for var in between if kinds[var] == ROW),
        tiles=(first.tiles | second.tiles) - links,
        links=links,
    )
    possible = None not in kinds.values() and first.space.is_same(second.space)
    return group if possible and groups.is_kernel(group) else None


def _is_recognised(
    groups: ReductionGroups, group: ReductionGroup, maximum: relax.Var, total: relax.Var
) -> bool:
    """Return whether the rule finds the sum of exponentials in the function of a group."""
    calls = groups.calls
    in_order = sorted(group.members, key=groups.order.position.__getitem__)
    fused = CallGroup({var: calls.call(var) for var in in_order}, [maximum, total])
    found = read_group(fused.prim_func(calls.mod))
    return found is not None and in_one_stage(found) is not None


def _rebound(call: relax.Call, copies: Mapping[relax.Expr, relax.Var]) -> relax.Call:
    """A ``call_tir`` that reads the copies."""
    function, arguments = call.args
    fields = [copies.get(field, field) for field in arguments.fields]
    found = relax.Call(call.op, [function, relax.Tuple(fields)], call.attrs, call.ty_args)
    return relax.BlockBuilder().normalize(found)
