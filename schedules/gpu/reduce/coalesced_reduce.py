# SPDX-License-Identifier: Apache-2.0
"""GPU rule for a group of coalesced reductions with their producers and consumers."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import s_tir, tirx
from tvm.target import Target

from schedules import attributes
from schedules.cost.decisions import Comparison, note
from schedules.schedule_rule import KernelFacts

from ..core.machine import GPUInfo
from ..core.rule import TunableGPURule
from .kernel.group_kernel import write_kernel
from .plan.configure import configure, prefers_chain, read_configured
from .plan.group_workload import GroupWorkload
from .plan.read_group import read_group
from .templates import CHAIN, SISTERS, ReduceTemplate

_CLOCK = 1.7e9  # of the cycles that are shown as times; no choice depends on it


class CoalescedReduce(TunableGPURule):
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

    The configuration is that which :meth:`configure` chose; for other functions it is chosen here,
    without a workspace.
    """

    def configure(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
        """Give a function its configuration: that of a record, else the default.

        Parameters
        ----------
        func : tirx.PrimFunc
            Not scheduled.
        target : Target
            A GPU.

        Returns
        -------
        tirx.PrimFunc
            As :func:`schedules.gpu.reduce.plan.configure.configure` does.
        """
        gpu = self.machine(target)
        if gpu.device is not None:
            self._note_cost(self.workload(func, target), gpu, gpu.device)
        workload = self.workload(func, target) if self.records else None
        found = None if workload is None else self.find(workload, target)
        if found is None:
            return configure(func, gpu)
        _, config, about = found
        return configure(func.with_attr(attributes.RECORD, about), gpu, config)

    def _note_cost(self, workload: GroupWorkload | None, gpu: GPUInfo, device: GPUInfo) -> None:
        """Compare the predicted times of a device's own configuration and of the one for all."""
        if workload is None:
            return
        times = {}
        for name, machine in (("of this device", device), ("reproducible", gpu)):
            template = self.templates(workload, machine)[0]
            knobs = template.default(workload, machine)
            times[name] = template.cycles(workload, knobs, device) / _CLOCK
        gain = times["reproducible"] / times["of this device"] - 1
        note(Comparison("order", workload.title, times, gain, "reproducible"))

    def kernel(self, facts: KernelFacts, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        func = facts.func
        found = read_configured(func, gpu)
        return None if found is None else write_kernel(*found, gpu)

    def workload(self, func: tirx.PrimFunc, target: Target) -> GroupWorkload | None:
        """Return the group, if its extents are known and its configuration is not chosen yet."""
        group = None if attributes.REDUCE_CONFIG in func.attrs else read_group(func)
        if group is None:
            return None
        found = GroupWorkload.of(group)
        return found if found.is_static else None

    def recorded(
        self, func: tirx.PrimFunc, workload: GroupWorkload, target: Target
    ) -> s_tir.Schedule | None:
        """Schedule ``func`` by its record, unless it has no workspace and that needs one."""
        found = super().recorded(func, workload, target)
        same = found is not None and len(found.mod["main"].params) == len(func.params)
        return found if same else None

    def templates(self, workload: GroupWorkload, machine: GPUInfo) -> Sequence[ReduceTemplate]:
        """Return the templates that can compute a group, the default's first."""
        if not workload.is_chain:
            return (SISTERS,)
        if workload.one_stage is None:
            return (CHAIN,)
        return (CHAIN, SISTERS) if prefers_chain(workload, machine) else (SISTERS, CHAIN)
