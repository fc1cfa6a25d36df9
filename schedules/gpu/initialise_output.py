# SPDX-License-Identifier: Apache-2.0
"""The kernel that puts the identity into an output before blocks update it atomically."""

from __future__ import annotations

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
            output = ReduceContext.open(reduction, config, gpu, block, i64(0), thread).flat(
                reduction.output
            )
            m = block * i64(config.threads) + thread
            with T.If(m < i64(reduction.outputs)):
                with T.Then():
                    T.buffer_store(output, identity(workload)[0].astype(output.dtype), [m])
