# SPDX-License-Identifier: Apache-2.0
"""The GPU rule for one coalesced reduction with the producers that are inlined into it."""

from __future__ import annotations

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.dlight.gpu.base import GPUScheduleRule
from tvm.target import Target

from .bfloat16_bits import convert_by_bits
from .device import GPUInfo
from .reduce_config import choose
from .reduce_function import read_reduction
from .reduce_kernel import write_kernel


class CoalescedReduce(GPUScheduleRule):
    """Spreads a coalesced reduction over many blocks and finishes it in the same kernel.

    Takes functions with the blocks of :mod:`schedules.compute.coalesced_reduce`, all others being
    element-wise producers of the first; returns None for everything else.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """Write the kernel, or return None if the rule does not know the function."""
        if not isinstance(func, tirx.PrimFunc) or target.kind.name not in ("cuda", "opencl"):
            return None
        try:
            reduction = read_reduction(func)
        except s_tir.ScheduleError:
            return None
        if reduction is None:
            return None
        gpu = GPUInfo.from_target(target)
        config = choose(
            reduction.workload,
            reduction.loops,
            gpu,
            scratch_bytes=reduction.scratch_bytes,
            itemsize=reduction.itemsize,
        )
        kernel = write_kernel(reduction, config, gpu)
        if gpu.kind == "opencl":
            kernel = convert_by_bits(kernel)
        return s_tir.Schedule(tvm.IRModule({"main": kernel}))
