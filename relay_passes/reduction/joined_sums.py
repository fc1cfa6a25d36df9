# SPDX-License-Identifier: Apache-2.0
"""Sums that a kernel of whole rows computes on the way: those of exponentials, and of columns.

A sum of exponentials that uses the maximum, as ``sum(exp(x - max(x)))`` of a softmax does, can be
computed together with it. Where no block can process a row, its kernel has a state of two fields
instead (:mod:`schedules.gpu.reduce.plan.online_softmax`). The calls between the maximum and the sum
are then computed in this kernel only: other readers recompute them, so that their results are never
stored.

The gradient of a layer norm needs sums over each row, and sums over all rows, of functions of the
same data. Each block of the kernel of the rows has some rows, and sums their columns in registers
(:func:`schedules.compute.coalesced_reduce.column_sums`); a small reduction adds the blocks' sums,
in a fixed order. That pays off if fewer bytes move, those of the blocks' sums included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import relax, te

from schedules.compute.coalesced_reduce import coalesced_reduce, column_sums
from schedules.cost.decisions import compare
from schedules.cost.gpu_kernels import STORE
from schedules.cost.kernel_call import KernelCall
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS
from schedules.gpu.reduce.plan.chain_config import choose_chain
from schedules.gpu.reduce.plan.configure import read_group
from schedules.gpu.reduce.plan.group import in_one_stage
from schedules.gpu.reduce.plan.group_workload import GroupWorkload
from schedules.tir.extents import constant
from schedules.tir.index_math import ravel
from schedules.workload.reduce import ReduceWorkload

from ..op.coalesced_reduce import REDUCE_PATTERN
from .groups import ReductionGroup, ReductionGroups
from .row_space import ROW, TILE
from .tir_calls import CallGroup, TIRCalls, Unit, count_bytes

Links = dict[relax.Var, frozenset[relax.Var]]
"""The calls between each such sum and its maximum that have the size of the data."""


@dataclass(frozen=True)
class OnlineSum:
    """A sum of exponentials."""

    # The sum, and the maximum that it uses.
    total: relax.Var
    maximum: relax.Var
    # The calls between them that have the size of the data, in the order of the block.
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

    Returns the block with a copy of the links before each sum, and the copies.
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
    groups: ReductionGroups, reached: Mapping[relax.Expr, frozenset[relax.Var]], total: relax.Var
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
    between, queue = {data}, [data]
    while queue:
        for tensor in groups.calls.tensors(queue.pop()):
            if tensor != maximum and maximum in reached.get(tensor, ()) and tensor not in between:
                between.add(tensor)
                queue.append(tensor)
    return sorted(between, key=groups.order.position.__getitem__)


def _together(
    groups: ReductionGroups, maximum: relax.Var, total: relax.Var, between: Sequence[relax.Var]
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


Kernels = Mapping[Unit, ReductionGroup]

_TYPES = ("float32", "float16", "bfloat16")
_IN_FLIGHT = 2  # times the bytes that hide the latency: blocks also wait between passes over a row


def find_column_sums(groups: ReductionGroups) -> dict[relax.Var, int]:
    """Sums whose columns a kernel of rows may sum, and of how many rows at a time."""
    sums: dict[relax.Var, int] = {}
    for var in groups.calls.reductions:
        workload = groups.calls.workload(var)
        is_sum = workload.operator == "sum" and workload.acc_dtype == "float32"
        own = groups.group_of(var)
        if not is_sum or workload.dtype not in _TYPES or workload.finish != "auto":
            continue
        group = groups.rows_of(var) if own and own.space.form == "y" else None
        if group is None or own is None or not group.space.is_transposed(own.space):
            continue
        count = constant(group.space.outputs)
        width = sum(count_bytes(e) for e in groups.large_inputs(group)) if count else 0
        if count and width:
            rows = _rows(count, width // count, groups.gpu)
            if rows > 1:
                sums[var] = rows
    return sums


def with_column_sums(
    block: relax.DataflowBlock,
    calls: TIRCalls,
    chosen: Mapping[relax.Var, int],
    builder: relax.BlockBuilder,
) -> tuple[relax.DataflowBlock, dict[relax.Var, relax.Var]]:
    """Replace sums by sums over groups of rows, and sums of these.

    Returns the block, and of the sum over each group of rows the original one.
    """
    bindings: list[relax.Binding] = []
    originals: dict[relax.Var, relax.Var] = {}
    for binding in block.bindings:
        var = binding.var
        if var not in chosen:
            bindings.append(binding)
            continue
        workload, [data] = calls.workload(var), calls.tensors(var)
        attributes = {"op_pattern": REDUCE_PATTERN}
        partial = builder.normalize(
            builder.call_te(
                lambda data, axes=workload.axes, rows=chosen[var]: column_sums(data, axes, rows),
                data,
                primfunc_name_hint="column_sums",
                primfunc_attrs=attributes,
            )
        )
        sums = relax.DataflowVar("lv", partial.ty)
        total = builder.call_te(
            lambda sums, like=var.ty: _total(sums, like),
            sums,
            primfunc_name_hint="coalesced_sum",
            primfunc_attrs=attributes,
        )
        bindings.append(relax.VarBinding(sums, partial))
        bindings.append(relax.VarBinding(var, builder.normalize(total)))
        originals[sums] = var
    return relax.DataflowBlock(bindings), originals


def are_kept(group: ReductionGroup, unit: Unit, groups: ReductionGroups) -> bool:
    """Return whether the rule for reductions takes a kernel that sums columns, too."""
    calls = groups.calls
    results = [var for var in unit.computes if groups.is_result(var, group)]
    fused = CallGroup({var: calls.call(var) for var in unit.computes}, results)
    found = read_group(fused.prim_func(calls.mod))
    if found is None or not found.columns:
        return False
    return choose_chain(GroupWorkload.of(found), groups.gpu).kept > 0


def pays_off(
    sums: relax.Var,
    together: tuple[Kernels, ReductionGroups],
    apart: tuple[Kernels, ReductionGroups],
    gpu: GPUInfo,
) -> bool:
    """Return whether the kernels of a block take less time with its column sums than without."""
    moved = {"one pass": _traffic(*together), "two passes": _traffic(*apart)}
    cycles = {
        name: launches * COSTS.launch + size / (gpu.multiprocessors * COSTS.memory_bytes)
        for name, (size, launches) in moved.items()
    }
    alternatives = {
        name: [
            KernelCall(
                STORE, {"blocks": gpu.multiprocessors, "launches": launches}, read_bytes=size
            )
        ]
        for name, (size, launches) in moved.items()
    }
    return compare("columns", sums.name, alternatives, 0.0, cycles).chosen == "one pass"


def _rows(count: int, width: int, gpu: GPUInfo) -> int:
    """Rows of a block, so that all multiprocessors have enough bytes in flight."""
    in_flight = COSTS.loads_in_flight * COSTS.widest_load * COSTS.hiding_threads
    at_once = gpu.multiprocessors * max(_IN_FLIGHT, _IN_FLIGHT * in_flight // width)
    return -(-count // at_once)


def _total(sums: te.Tensor, like: relax.TensorType) -> te.Tensor:
    """The sum of all groups of rows, in the shape and type of the original sum."""
    total = coalesced_reduce(sums, ReduceWorkload.create("sum", [0], 2, "float32"))
    shape, dtype = [int(extent) for extent in like.shape], str(like.dtype)
    if len(shape) == 1 and dtype == "float32":
        return total
    return te.compute(
        shape, lambda *at: total(ravel(at, shape)).astype(dtype), name="reduce_result"
    )


def _traffic(kernels: Kernels, groups: ReductionGroups) -> tuple[int, int]:
    """Bytes that the kernels of reductions read and write, and their number."""
    moved = launches = 0
    calls = groups.calls
    for unit, group in kernels.items():
        inside = set(unit.computes)
        read = {e for var in inside for e in calls.tensors(var)} - inside
        written = {var for var in inside if groups.is_result(var, group)}
        moved += sum(map(count_bytes, read | written))
        launches += 1
    inside = {var for unit in kernels for var in unit.computes}
    for var in {*calls.reductions, *calls.injective} - inside:
        if not calls.is_reshape(var):
            moved += sum(map(count_bytes, {var, *calls.tensors(var)}))
            launches += 1
    return moved, launches
