# SPDX-License-Identifier: Apache-2.0
"""GPU rule for a group of coalesced reductions with producers and consumers, and its templates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tvm import s_tir, tirx
from tvm.target import Target

from schedules import attributes
from schedules.cost.decisions import Comparison, note
from schedules.errors import OpError
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.rule import GPUTemplate, TunableGPURule
from schedules.schedule_rule import KernelFacts

from .kernel.group_kernel import write_kernel
from .plan.chain_config import chain_settings, chain_terms, choose_chain, is_chain_setting
from .plan.config import ReduceConfig, choose_sisters
from .plan.configure import configure, prefers_chain, read_configured, read_group
from .plan.group_workload import GroupWorkload
from .plan.sister_space import is_sister_setting, sister_settings, sister_terms


class ReduceTemplate(GPUTemplate[GroupWorkload, ReduceConfig]):
    """Base of both templates; the knobs are the configuration of the kernel."""

    knobs = ReduceConfig
    rule = "CoalescedReduce"
    most = 1 << 40  # the number of settings hardly depends on the extents

    def read_workload(self, text: str) -> GroupWorkload:
        """Read the JSON of a workload."""
        return GroupWorkload.from_json(text)

    def describe(self, workload: GroupWorkload) -> str:
        """Return operators, type and loops."""
        return workload.title

    def kernel(
        self, func: tirx.PrimFunc, workload: GroupWorkload, knobs: ReduceConfig, gpu: GPUInfo
    ) -> tirx.PrimFunc:
        """Write the kernel; with the finish ``last_block`` its first parameter is a workspace.

        That is as :func:`.plan.configure.configure` adds it.
        """
        found = read_configured(configure(func, gpu, knobs), gpu)
        assert found is not None, "the workload was read from another function"
        return write_kernel(*found, gpu)

    def cycles(self, workload: GroupWorkload, knobs: ReduceConfig, machine: GPUInfo) -> float:
        """Return the cycles of reading, or of beginning blocks, and of the finish."""
        terms = self.terms(workload, knobs, machine)
        return max(terms["reads"], terms["blocks"]) + terms["finish_cycles"]

    def features(
        self, workload: GroupWorkload, knobs: ReduceConfig, machine: GPUInfo
    ) -> dict[str, float]:
        """Return the knobs, the terms of :meth:`cycles`, and the finish as yes or no."""
        terms = self.terms(workload, knobs, machine)
        finishes = ("atomic", "last_block", "cluster")
        kinds = {f"is_{finish}": float(knobs.finish == finish) for finish in finishes}
        return super().features(workload, knobs, machine) | terms | kinds

    def contains(self, workload: GroupWorkload, knobs: ReduceConfig, machine: GPUInfo) -> bool:
        """Return whether a setting is legal."""
        is_default = knobs == self.default(workload, machine)
        return is_default or self.has_setting(workload, knobs, machine)

    @abstractmethod
    def has_setting(self, workload: GroupWorkload, knobs: ReduceConfig, machine: GPUInfo) -> bool:
        """Return whether a setting is one of :meth:`settings`, without listing them."""

    @abstractmethod
    def terms(
        self, workload: GroupWorkload, knobs: ReduceConfig, machine: GPUInfo
    ) -> dict[str, float]:
        """Return ``reads``, ``blocks`` and ``finish_cycles`` in cycles, and what they depend on."""


class SistersTemplate(ReduceTemplate):
    """One pass over the data; rows may be split among blocks.

    Of a chain that is possible as :mod:`.plan.group` has it.
    """

    name = "gpu.reduce"
    version = 5

    def default(self, workload: GroupWorkload, machine: GPUInfo) -> ReduceConfig:
        """Return the configuration that is chosen without records."""
        return self._as_whole(workload, choose_sisters(_in_one_stage(workload), machine))

    def settings(self, workload: GroupWorkload, machine: GPUInfo) -> Iterator[ReduceConfig]:
        """Yield legal configurations."""
        for config in sister_settings(_in_one_stage(workload), machine):
            yield self._as_whole(workload, config)

    def has_setting(self, workload: GroupWorkload, knobs: ReduceConfig, machine: GPUInfo) -> bool:
        """Return whether a setting is one of :meth:`settings`."""
        plain = replace(knobs, is_online=False)
        same = knobs.is_online == workload.is_chain
        return same and is_sister_setting(_in_one_stage(workload), plain, machine)

    def terms(
        self, workload: GroupWorkload, knobs: ReduceConfig, machine: GPUInfo
    ) -> dict[str, float]:
        """Return the terms of the cost model."""
        return sister_terms(_in_one_stage(workload), knobs, machine)

    def _as_whole(self, workload: GroupWorkload, config: ReduceConfig) -> ReduceConfig:
        return replace(config, is_online=workload.is_chain)


class ChainTemplate(ReduceTemplate):
    """A block, or a cluster, has whole rows."""

    name = "gpu.reduce_chain"
    version = 3

    def default(self, workload: GroupWorkload, machine: GPUInfo) -> ReduceConfig:
        """Return the configuration that is chosen without records."""
        return choose_chain(workload, machine)

    def settings(self, workload: GroupWorkload, machine: GPUInfo) -> Iterator[ReduceConfig]:
        """Yield legal configurations."""
        return chain_settings(workload, machine)

    def has_setting(self, workload: GroupWorkload, knobs: ReduceConfig, machine: GPUInfo) -> bool:
        """Return whether a setting is one of :meth:`settings`."""
        return is_chain_setting(workload, knobs, machine)

    def terms(
        self, workload: GroupWorkload, knobs: ReduceConfig, machine: GPUInfo
    ) -> dict[str, float]:
        """Return the terms of the cost model."""
        return chain_terms(workload, knobs, machine)


def _in_one_stage(workload: GroupWorkload) -> GroupWorkload:
    """The workload of the kernel; only groups that can be one stage have this template.

    Raises ``OpError`` if the group cannot.
    """
    found = workload.one_stage if workload.is_chain else workload
    if found is None:
        raise OpError("the chain of reductions cannot be computed in one stage")
    return found


SISTERS, CHAIN = SistersTemplate(), ChainTemplate()


_CLOCK = 1.7e9  # Clock of the cycles that are shown as times; no choice depends on it.


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
    (:mod:`schedules.gpu.reduce.plan.group`). Returns None for everything else.

    The configuration is that which :meth:`configure` chose; for other functions it is chosen here,
    without a workspace.
    """

    def configure(
        self,
        func: tirx.PrimFunc,  # Not scheduled.
        target: Target,
    ) -> tirx.PrimFunc:
        """Give a function its configuration: that of a record, else the default.

        The result is that of :func:`schedules.gpu.reduce.plan.configure.configure`.
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
