# SPDX-License-Identifier: Apache-2.0
"""The kernel that puts the identity into an output before blocks update it atomically."""

from __future__ import annotations

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
    start = identity(workload)[0].astype(workload.out_dtype)
    with T.launch_thread("blockIdx.x", ceildiv(reduction.outputs, config.threads)) as block:
        with T.launch_thread("threadIdx.x", i64(config.threads)) as thread:
            ctx = ReduceContext.open(reduction, config, gpu, block, i64(0), thread)
            m = block * i64(config.threads) + thread
            with T.If(m < i64(reduction.outputs)):
                with T.Then():
                    if workload.out_dtype == "float16" and gpu.kind == "opencl":
                        _write_bits(ctx, m, float(start))
                    else:
                        ctx.write(m, start)


def _write_bits(ctx: ReduceContext, m: tirx.Expr, value: float) -> None:
    """Store a constant by its bits: OpenCL has infinities of float32 only."""
    output = ctx.reduction.output
    bits = int(np.float16(value).view(np.uint16))
    view = T.decl_buffer((i64(ctx.reduction.outputs),), "uint16", data=output.data)
    T.buffer_store(view, tirx.const(bits, "uint16"), [m])
