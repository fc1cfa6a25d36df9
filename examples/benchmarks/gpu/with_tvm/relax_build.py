# SPDX-License-Identifier: Apache-2.0
"""A case as a Relax function, and its CUDA kernels by our schedule rules or by TVM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.relax.backend.cuda import pipeline as stock
from tvm.s_tir import dlight
from tvm.target import Target

from examples.benchmarks.reduction_cases import Case, Reduction
from relay_passes import (
    CoalesceReduction,
    ConfigureReductions,
    FuseReductionProducers,
    FuseReductions,
)
from relay_passes.op import coalesced_reduce
from schedules import gpu
from schedules.workload.reduce import ReduceWorkload
from tvm_fusion.codegen.nvrtc import tvm_compiler
from tvm_fusion.errors import EngineError

from ..array_steps import sizes

Reduce = Callable[[relax.Expr, ReduceWorkload], relax.Expr]


def cuda_target(arch: str) -> Target:
    """The target of an architecture such as ``sm_90``."""
    return Target(
        {
            "kind": "cuda",
            "arch": arch,
            "max_num_threads": 1024,
            "thread_warp_size": 32,
            "max_shared_memory_per_block": 49152,
        }
    )


def relax_module(case: Case, reduce: Reduce, finish: str = "auto") -> tvm.IRModule:
    """A case as the function ``main``: a tensor for each input, a tuple of all outputs."""
    builder = relax.BlockBuilder()
    inputs = [
        relax.Var(f"x{number}", relax.TensorType(case.shape, case.dtype))
        for number in range(case.inputs)
    ]
    with builder.function("main", inputs):
        with builder.dataflow():
            found = []
            for reduction in case.reductions:
                value = _steps(builder, reduction, inputs)
                found.append(builder.emit(reduce(value, case.workload(reduction, finish))))
            output = builder.emit_output(relax.Tuple(found))
        builder.emit_func_output(output)
    return builder.get()


def our_reduce(value: relax.Expr, workload: ReduceWorkload) -> relax.Expr:
    """The op of this project."""
    return coalesced_reduce(value, workload.operator, workload.axes, finish=workload.finish)


def stock_reduce(value: relax.Expr, workload: ReduceWorkload) -> relax.Expr:
    """TVM's own ops; 16-bit floats are cast to float32 first, else sums would lose digits."""
    axes, operator, wide = list(workload.axes), workload.operator, workload.acc_dtype
    if operator in ("min", "max") and workload.dtype != "bool":
        return getattr(relax.op, operator)(value, axes)
    if workload.out_dtype == "bool":  # TVM has no logical reductions
        bits = relax.op.astype(relax.op.astype(value, "bool"), "int32")
        extreme = relax.op.min if operator in ("and", "min") else relax.op.max
        return relax.op.astype(extreme(bits, axes), "bool")
    if wide != workload.dtype:
        value = relax.op.astype(value, wide)
    if operator == "sum_squares":
        operator, value = "sum", relax.op.multiply(value, value)
    result = getattr(relax.op, operator)(value, axes)
    return result if wide == workload.out_dtype else relax.op.astype(result, workload.out_dtype)


def our_passes() -> list[tvm.transform.Pass]:
    """Passes from Relax ops to scheduled kernels.

    Raises
    ------
    EngineError
        If this version has no schedule rules for GPUs.
    """
    rules = getattr(gpu, "RULES", ())
    if not rules:
        raise EngineError("schedules.gpu has no RULES in this version")
    return [
        CoalesceReduction(),
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        FuseReductions(),
        FuseReductionProducers(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
        ConfigureReductions(),
        dlight.ApplyDefaultSchedule(*rules),
        *_stock_rules(),
    ]


def stock_passes() -> list[tvm.transform.Pass]:
    """TVM's default passes for CUDA, without those for constants, which these functions lack."""
    return [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        *_stock_rules(),
    ]


def build(module: tvm.IRModule, passes: Sequence[tvm.transform.Pass], arch: str) -> Any:
    """Compile a module; the CUDA text becomes machine code only where a GPU is found.

    Raises
    ------
    TargetError
        If there is a GPU but no compiler for it.
    """
    target = cuda_target(arch)
    lower = tvm.transform.Sequential(
        [*passes, *stock.dataflow_lower_passes(target), *stock.finalize_passes(target)]
    )
    with tvm_compiler(arch), target:
        return tvm.compile(module, target, relax_pipeline=lower)


def cuda_texts(executable: Any) -> list[str]:
    """The CUDA source of every kernel module of an executable."""
    texts: list[str] = []
    waiting = [executable.mod]
    while waiting:
        module = waiting.pop()
        if module.kind == "cuda":
            texts.append(module.inspect_source("cuda"))
        waiting.extend(module.imports)
    return texts


def kernel_count(executable: Any) -> int:
    """Kernels of an executable."""
    return sum(text.count("__global__ void") for text in cuda_texts(executable)) // 2


def _stock_rules() -> list[tvm.transform.Pass]:
    rules = dlight.gpu
    return [
        dlight.ApplyDefaultSchedule(
            rules.Matmul(),
            rules.GEMV(),
            rules.Reduction(),
            rules.GeneralReduction(),
            rules.Fallback(),
        )
    ]


def _steps(
    builder: relax.BlockBuilder, reduction: Reduction, inputs: Sequence[relax.Var]
) -> relax.Expr:
    value: relax.Expr = inputs[reduction.source]
    for step in reduction.steps:
        word, _, argument = step.partition(" ")
        if word == "cast":
            call = relax.op.astype(value, argument)
        elif word == "reshape":
            call = relax.op.reshape(value, sizes(argument))
        elif word in ("add", "mul"):
            function = relax.op.add if word == "add" else relax.op.multiply
            call = function(value, inputs[int(argument)])
        else:
            names = {"neg": "negative"}
            call = getattr(relax.op, names.get(word, word))(value)
        value = builder.emit(call)
    return value
