# SPDX-License-Identifier: Apache-2.0
"""Templates of reduction kernels: sisters, and chains in which a block processes whole rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace

from tvm import tirx

from schedules.errors import OpError

from ..core.machine import GPUInfo
from ..core.rule import GPUTemplate
from .kernel.group_kernel import write_kernel
from .plan.chain_config import choose_chain
from .plan.chain_space import chain_settings, chain_terms, is_chain_setting
from .plan.config import ReduceConfig, choose_sisters
from .plan.configure import configure, read_configured
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

    Of a chain that is possible as :mod:`.plan.online_softmax` has it.
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

    Raises
    ------
    OpError
        If the group cannot.
    """
    found = workload.one_stage if workload.is_chain else workload
    if found is None:
        raise OpError("the chain of reductions cannot be computed in one stage")
    return found


SISTERS, CHAIN = SistersTemplate(), ChainTemplate()
