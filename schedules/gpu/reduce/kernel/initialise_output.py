# SPDX-License-Identifier: Apache-2.0
"""Kernel that stores identities into outputs before blocks update them atomically."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.core.kernel_function import unless_empty
from schedules.gpu.core.machine import GPUInfo
from schedules.tir.index_math import ceildiv, i64
from schedules.workload.reduce_operator import identity

from ..plan.config import ReduceConfig
from ..plan.group import ReduceGroup, Reduction
from .context import ReduceContext


def initialise_output(group: ReduceGroup, config: ReduceConfig, gpu: GPUInfo) -> None:
    """Emit the kernel, for the outputs of all reductions of the group."""
    count = ceildiv(group.outputs, config.threads)
    with unless_empty(count), T.launch_thread("blockIdx.x", count) as block:
        with T.launch_thread("threadIdx.x", i64(config.threads)) as thread:
            ctx = ReduceContext.open(group, config, gpu, block, i64(0), thread)
            m = block * i64(config.threads) + thread
            with T.If(m < i64(group.outputs)):
                with T.Then():
                    for reduction in group.reductions:
                        _write_identity(ctx, reduction, m)


def _write_identity(ctx: ReduceContext, reduction: Reduction, m: tirx.Expr) -> None:
    workload = reduction.workload
    if workload.out_dtype in ("float16", "bfloat16"):
        _write_bits(ctx, reduction, m)
    elif workload.out_dtype == "bool":
        start = tirx.const(workload.operator in ("and", "min"), "bool")
        ctx.write(reduction.output, m, start)
    else:
        wide = replace(workload, acc_dtype=workload.out_dtype)
        ctx.write(reduction.output, m, identity(wide)[0])


def _write_bits(ctx: ReduceContext, reduction: Reduction, m: tirx.Expr) -> None:
    """Store the identity of a 16-bit float by its bits: TVM has infinities of wider types only."""
    assert reduction.output is not None, "atomic is not chosen where there are epilogues"
    operator, dtype = reduction.workload.operator, reduction.workload.out_dtype
    number = {"prod": 1.0, "min": np.inf, "max": -np.inf}.get(operator, -0.0)
    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    bits = int(np.array(number, kind).view(np.uint16))
    outputs = i64(ctx.group.outputs)
    view = T.decl_buffer((outputs,), "uint16", data=reduction.output.data)
    T.buffer_store(view, tirx.const(bits, "uint16"), [m])
