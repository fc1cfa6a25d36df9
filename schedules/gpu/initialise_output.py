# SPDX-License-Identifier: Apache-2.0
"""The kernel that puts the identity into an output before blocks update it atomically."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..reduce_operator import identity
from .device import GPUInfo
from .index_math import ceildiv, i64
from .reduce_config import ReduceConfig
from .reduce_context import ReduceContext
from .reduce_function import ReduceFunction


def initialise_output(reduction: ReduceFunction, config: ReduceConfig, gpu: GPUInfo) -> None:
    """Emit the kernel."""
    workload = reduction.workload
    with T.launch_thread("blockIdx.x", ceildiv(reduction.outputs, config.threads)) as block:
        with T.launch_thread("threadIdx.x", i64(config.threads)) as thread:
            ctx = ReduceContext.open(reduction, config, gpu, block, i64(0), thread)
            m = block * i64(config.threads) + thread
            with T.If(m < i64(reduction.outputs)):
                with T.Then():
                    if workload.out_dtype in ("float16", "bfloat16"):
                        _write_bits(ctx, m)
                    elif workload.out_dtype == "bool":
                        ctx.write(m, tirx.const(workload.operator in ("and", "min"), "bool"))
                    else:
                        ctx.write(m, identity(replace(workload, acc_dtype=workload.out_dtype))[0])


def _write_bits(ctx: ReduceContext, m: tirx.Expr) -> None:
    """Store the identity of a 16-bit float by its bits: TVM has infinities of wider types only."""
    operator, dtype = ctx.workload.operator, ctx.workload.out_dtype
    number = {"prod": 1.0, "min": np.inf, "max": -np.inf}.get(operator, -0.0)
    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    bits = int(np.array(number, kind).view(np.uint16))
    outputs = i64(ctx.reduction.outputs)
    view = T.decl_buffer((outputs,), "uint16", data=ctx.reduction.output.data)
    T.buffer_store(view, tirx.const(bits, "uint16"), [m])
