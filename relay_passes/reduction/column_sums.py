# SPDX-License-Identifier: Apache-2.0
"""Sums of columns that a kernel of whole rows computes on the way.

The gradient of a layer norm needs sums over each row, and sums over all rows, of functions of the
same data. Each block of the kernel of the rows has some rows, and sums their columns in registers
(:func:`schedules.compute.coalesced_reduce.column_sums`); a small reduction adds the blocks' sums,
in a fixed order. That pays off if fewer bytes move, those of the blocks' sums included.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax, te

from schedules.compute.coalesced_reduce import coalesced_reduce, column_sums
from schedules.cost.decisions import compare
from schedules.cost.gpu_kernels import STORE
from schedules.cost.kernel_call import KernelCall
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS
from schedules.gpu.reduce.plan.chain_config import choose_chain
from schedules.gpu.reduce.plan.configure import read_group
from schedules.gpu.reduce.plan.group_workload import GroupWorkload
from schedules.tir.extents import constant
from schedules.tir.index_math import ravel
from schedules.workload.reduce import ReduceWorkload

from ..op.coalesced_reduce import REDUCE_PATTERN
from .call_group import CallGroup
from .dependences import Unit
from .groups import ReductionGroup, ReductionGroups
from .primfunc_calls import TIRCalls, count_bytes

Kernels = Mapping[Unit, ReductionGroup]

_TYPES = ("float32", "float16", "bfloat16")
_IN_FLIGHT = 2  # times the bytes that hide the latency: blocks also wait between passes over a row


def find_column_sums(groups: ReductionGroups) -> dict[relax.Var, int]:
    """Sums whose columns a kernel of rows may sum, and of how many rows at a time."""
    found: dict[relax.Var, int] = {}
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
                found[var] = rows
    return found


def with_column_sums(
    block: relax.DataflowBlock,
    calls: TIRCalls,
    chosen: Mapping[relax.Var, int],
    builder: relax.BlockBuilder,
) -> tuple[relax.DataflowBlock, dict[relax.Var, relax.Var]]:
    """Replace sums by sums over groups of rows, and sums of these.

    Returns
    -------
    tuple[relax.DataflowBlock, dict[relax.Var, relax.Var]]
        The block, and of the sum over each group of rows the original one.
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
