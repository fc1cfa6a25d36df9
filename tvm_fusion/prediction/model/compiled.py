# SPDX-License-Identifier: Apache-2.0
"""Calls of our own kernels in a model: it is optimised and scheduled, but no code is generated.

A convolution, or a product of matrices, has the cycles of its cost model in ``sizes``, those of the
knobs that it would be compiled with, recorded ones included. The other kernels have their work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import tvm
from tvm import relax, s_tir, tirx
from tvm.ir.transform import Pass
from tvm.target import Target

from schedules import attributes, cpu
from schedules.cost.cpu_kernels import CONVOLUTIONS
from schedules.cost.decisions import deciding_for
from schedules.cost.kernel_call import KernelCall
from schedules.cost.machine import Machine
from schedules.cpu.core.machine import CPUInfo
from schedules.gpu import CoalescedReduce
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.reduce.plan.configure import read_configured
from schedules.gpu.reduce.plan.group_workload import GroupWorkload
from schedules.gpu.reduce.plan.sister_space import streaming_call
from schedules.tir.expression_walk import nodes
from schedules.tuning.records import Records
from schedules.tuning.tunable_rule import TunableRule
from schedules.workload.conv2d import Conv2DKernel

from ...bench.kernel_work import parameter_bytes
from ...bench.profiler import KernelCost, kernel_costs
from ...compiler import pipeline
from ..machines import predicted_cpu
from .lowered import LoweredKernel, LoweredOp, conv2d_sizes

_CALIBRATED = (*CONVOLUTIONS, "cpu.dense")  # templates whose cycles are related to times
_NAMES = {"dense": "matvec"}  # products of matrices have knobs, and the name of their template


def lower_to_cpu_kernels(
    mod: tvm.IRModule,  # An imported module of static shapes; it is not changed.
    target: Target,  # A resolved CPU, for which the knobs are chosen.
    # The CPU whose time is predicted; its caches may differ from those of the target.
    machine: Machine,
    options: pipeline.Options,  # The user's choices.
) -> list[LoweredOp]:
    """Optimise a Relax module for a CPU, and describe its kernels."""
    plan = pipeline.phases(target, options)
    schedule = plan.pop("schedule")
    mod = pipeline.run_phases(mod, target, plan)
    return describe_cpu_kernels(mod, schedule, target, machine, options.records)


def describe_cpu_kernels(
    mod: tvm.IRModule,
    schedule: Sequence[Pass],
    target: Target,
    machine: Machine,
    records: Records,
    kept_bytes: int | None = None,
) -> list[LoweredOp]:
    """Describe the kernels of a module that all phases but ``schedule`` have optimised.

    ``kept_bytes`` are the weights and largest activations of the model, if others than this one's.
    """
    costs, functions = kernel_costs(mod), dict(mod.functions_items())
    mod = pipeline.run_phases(_without_tunable(mod), target, {"schedule": schedule})
    mod = relax.transform.RewriteDataflowReshape()(mod)  # views are no kernels
    called = [name for name in called_functions(mod) if name in costs]
    if kept_bytes is None:
        kept_bytes = sum(costs[name].cost.weight_bytes for name in called)
        kept_bytes += max((costs[name].cost.activation_bytes for name in called), default=0)
    info = predicted_cpu(machine, target, kept_bytes)
    calls: dict[str, KernelCall] = {}
    for variable, func in functions.items():
        name = variable.name_hint
        if name not in called:
            continue
        rule = _rule(mod[name])
        call = _by_work(name, f"cpu.{_NAMES.get(rule, rule)}", costs[name].cost, func)
        more = {"kept_bytes": kept_bytes, "parallel": int(_is_parallel(mod[name]))}
        known = int((mod[name].attrs or {}).get(attributes.CYCLES, 0))
        op, cycles = _template(func, target, info, records) or (call.op, known)
        if cycles:
            more["cycles"] = cycles
        calls[name] = replace(call, op=op, sizes={**call.sizes, **more})
    return [_op(LoweredKernel(calls[name], costs[name].operator)) for name in called]


def _op(kernel: LoweredKernel) -> LoweredOp:
    return LoweredOp(kernel.call.name, (kernel,))


def called_functions(mod: tvm.IRModule) -> Iterator[str]:
    """Names of the functions that ``main`` calls, in order."""
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            call = binding.value
            if isinstance(call, relax.Call) and call.args:
                if isinstance(call.args[0], tvm.ir.GlobalVar):
                    yield call.args[0].name_hint


def _without_tunable(mod: tvm.IRModule) -> tvm.IRModule:
    """Mark convolutions as scheduled: their cost model needs no schedule."""
    result = mod.clone()
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc) and attributes.WORKLOAD in (func.attrs or {}):
            result.update_func(name, func.with_attr("tirx.is_scheduled", True))
    return result


def _rule(func: tirx.PrimFunc) -> str:
    """Name of the rule that scheduled a function, in small letters, without its nest."""
    return str((func.attrs or {}).get(attributes.RULE, "none")).split()[0].lower()


def _is_parallel(func: tirx.PrimFunc) -> bool:
    """Return whether a scheduled function runs on several threads."""
    return any(loop.kind == tirx.ForKind.PARALLEL for loop in nodes(func.body, tirx.For))


def _template(
    func: tirx.PrimFunc, target: Target, machine: CPUInfo, records: Records
) -> tuple[str, int] | None:
    """The template of a kernel with knobs, and the cycles that it predicts for those chosen."""
    if "tirx.is_scheduled" in (func.attrs or {}):
        return None
    for rule in cpu.rules(records):
        workload = rule.workload(func, target) if isinstance(rule, TunableRule) else None
        if workload is None:
            continue
        here = CPUInfo.from_target(target)
        templates = rule.templates(workload, here)
        recorded = records.find(rule.key(workload, here), templates, workload, here)
        template = recorded[0] if recorded else templates[0]
        if template.name not in _CALIBRATED:
            return None
        knobs = recorded[1] if recorded else template.default(workload, here)
        cycles = template.cycles(workload, knobs, machine)
        if template is cpu.TEMPLATES["cpu.dense"]:  # which assumes two multiply-adds a cycle
            cycles *= 2 / machine.fma_per_cycle
        return template.name, max(1, round(cycles))
    return None


def _by_work(name: str, op: str, cost: KernelCost, func: tirx.PrimFunc) -> KernelCall:
    sizes = {
        "activation_bytes": cost.activation_bytes,
        "weight_bytes": cost.weight_bytes,
        "functions": cost.functions,
    }
    written = parameter_bytes(func.params[-1])
    moved = cost.activation_bytes + cost.weight_bytes
    stored = str(func.params[-1].dtype)
    dtype = stored if cost.numbers == "float32" else cost.numbers
    return KernelCall(op, sizes, dtype, cost.flops, moved - written, written, name)


def lower_to_gpu_kernels(
    mod: tvm.IRModule,  # An imported module of static shapes; it is not changed.
    target: Target,  # A resolved GPU.
    options: pipeline.Options,  # The user's choices.
) -> list[LoweredOp]:
    """Optimise a Relax module for a GPU, and describe its kernels.

    Each comes with the library's kernel that it is compared with for an estimate. Reductions have
    the configuration that a record, or the machine of the options, chooses.
    """
    plan = pipeline.phases(target, options)
    plan.pop("schedule")
    rule = CoalescedReduce(options.records)
    with deciding_for(options.machine):
        mod = pipeline.run_phases(mod, target, plan)
        costs = kernel_costs(mod)
        called = [name for name in called_functions(mod) if name in costs]
        configured = {name: rule.configure(mod[name], target) for name in set(called)}
    lowered: dict[str, LoweredOp] = {}
    ops = []
    for name in called:
        if name not in lowered:
            call = _by_work(name, "gpu", costs[name].cost, mod[name])
            like = _library_call(call, costs[name].kernel, mod[name], target.host)
            ours = replace(call, op=f"our {like.op}")
            call = _one_pass_reduction(configured[name], target, name) or ours
            lowered[name] = _op(LoweredKernel(call, costs[name].operator, like))
        ops.append(lowered[name])
    return ops


def _one_pass_reduction(func: tirx.PrimFunc, target: Target, name: str) -> KernelCall | None:
    """Call of a configured kernel of reductions that reads its data once, for its cost model."""
    found = read_configured(func, GPUInfo.from_target(target))
    workload = None if found is None else GroupWorkload.of(found[0])
    if found is None or workload is None or not workload.is_static or workload.is_chain:
        return None
    return streaming_call(workload, found[1], name)


def _library_call(
    call: KernelCall, kernel: Conv2DKernel | None, func: tirx.PrimFunc, host: Target
) -> KernelCall:
    """The library's kernel for the largest part of one of ours."""
    like = replace(call, sizes={}, op="elementwise")
    if kernel is not None:
        sizes = max(_layers(kernel), key=lambda layer: layer[1])[0]
        return replace(like, op="conv2d", sizes=sizes)
    product = cpu.Dense().workload(func, host)
    if product is not None:
        sizes = {"M": product.rows, "N": product.columns, "K": product.depth}
        op = "gemm" if product.outer == 1 else "bmm"
        return replace(like, op=op, sizes={"B": product.outer, **sizes})
    reduced = [block for block in nodes(func.body, s_tir.SBlock) if _reduces(block)]
    if not reduced:
        return like
    if call.sizes["weight_bytes"] > call.sizes["activation_bytes"]:  # one row times a matrix
        columns = prod(int(extent) for extent in func.params[-1].shape)
        sizes = {"B": 1, "M": 1, "N": columns, "K": max(1, int(call.flops / 2 / columns))}
        return replace(like, op="gemm", sizes=sizes)
    shape = [int(extent) for extent in func.params[0].shape] or [1]
    sizes = {"B": max(1, prod(shape[:-1])), "H": shape[-1]}
    return replace(like, op="softmax" if call.sizes["functions"] else "layer_norm", sizes=sizes)


def _layers(kernel: Conv2DKernel) -> Iterator[tuple[dict[str, int], int]]:
    """Sizes of each convolution as the library's, and its FLOPs."""
    size = (int(kernel.height or 1), int(kernel.width or 1))
    for layer in kernel.layers:
        out = layer.output_size(*size)
        yield conv2d_sizes(kernel.batch or 1, layer, size), layer.flops(*size)
        size = out


def _reduces(block: s_tir.SBlock) -> bool:
    return any(var.iter_type == tirx.IterVar.CommReduce for var in block.iter_vars)
