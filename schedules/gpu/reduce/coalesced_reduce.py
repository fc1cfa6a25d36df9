# SPDX-License-Identifier: Apache-2.0
"""GPU rule for a group of coalesced reductions with their producers and consumers."""

from __future__ import annotations

from tvm import tirx

from ..core.machine import GPUInfo
from ..core.rule import GPURule
from .kernel.group_kernel import write_kernel
from .plan.chain_config import choose_chain
from .plan.config import ReduceConfig, choose_sisters
from .plan.group import ReduceGroup
from .plan.online_softmax import avoid_chain
from .plan.read_group import read_group


class CoalescedReduce(GPURule):
    """Computes a group of coalesced reductions in one kernel.

    Takes functions with the blocks of :mod:`schedules.compute.coalesced_reduce`: any number of
    reductions with the same parallel and reduced extents and of one form, all other blocks being
    element-wise:

    - producers of what is reduced;
    - epilogues, which use results at the same place;
    - elements with the extents of the reduced tensor, which may use results of their row, and are
      stored, or reduced in turn.

    Without the last kind the reductions are spread over many blocks and finished in the same
    kernel; with it, as in a softmax, one block processes a row from the first stage to the last.
    The sum of a softmax alone does not need one block for a row
    (:mod:`schedules.gpu.reduce.plan.online_softmax`). Returns None for everything else.
    """

    def kernel(self, func: tirx.PrimFunc, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        group = read_group(func)
        if group is None:
            return None
        group = avoid_chain(group, gpu)
        return write_kernel(group, choose_config(group, gpu), gpu)


def choose_config(group: ReduceGroup, gpu: GPUInfo) -> ReduceConfig:
    """Choose the configuration of a group."""
    if group.is_chain:
        return choose_chain(group, gpu)
    return choose_sisters(
        [(reduction.workload, reduction.loops) for reduction in group.reductions],
        gpu,
        group.scratch_words or (0,),
        min(group.itemsizes()),
        group.row_inputs(),
        group.has_epilogues,
    )
