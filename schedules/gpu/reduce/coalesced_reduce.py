# SPDX-License-Identifier: Apache-2.0
"""GPU rule for a group of coalesced reductions with their producers and consumers."""

from __future__ import annotations

from tvm import tirx

from ..core.machine import GPUInfo
from ..core.rule import GPURule
from .kernel.group_kernel import write_kernel
from .plan.configure import read_configured


class CoalescedReduce(GPURule):
    """Computes a group of coalesced reductions in one kernel.

    Takes functions with the blocks of :mod:`schedules.compute.coalesced_reduce`: any number of
    reductions with the same parallel and reduced extents and of one form, all other blocks being
    element-wise:

    - producers of what is reduced;
    - epilogues, which use results at the same place;
    - elements with the extents of the reduced tensor, which are stored;
    - such elements that use results of their row, and are stored, or reduced in turn.

    Without the last kind the reductions are spread over many blocks and finished in the same
    kernel; with it, as in a softmax, one block processes a row from the first stage to the last.
    The sum of a softmax alone does not need one block for a row
    (:mod:`schedules.gpu.reduce.plan.online_softmax`). Returns None for everything else.

    The configuration is that which :func:`schedules.gpu.reduce.plan.configure.configure` chose; for
    other functions it is chosen here, without a workspace.
    """

    def kernel(self, func: tirx.PrimFunc, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        found = read_configured(func, gpu)
        return None if found is None else write_kernel(*found, gpu)
