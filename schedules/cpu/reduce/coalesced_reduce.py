# SPDX-License-Identifier: Apache-2.0
"""CPU rule for the op ``coalesced_reduce``: chooses the nest, the vectors and the threads."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.target import Target

from schedules.schedule_rule import KernelFacts

from ..core.machine import CPUInfo
from ..core.rule import TunableCPURule
from .read_source import read_source
from .reduce_knobs import find_stream, prefers_rows
from .reduction_loops import ReductionLoops
from .templates import COLUMNS, ROWS, STREAM, ReduceTemplate


class CoalescedReduce(TunableCPURule):
    """One reduction over any axes: a legalized ``coalesced_reduce``, or one of TVM's operators.

    Producers and epilogue are computed with it. Rows (:mod:`.coalesced_rows`) where the reduced
    loop scans consecutive addresses, else columns (:mod:`.coalesced_columns`), or a stream
    (:mod:`.coalesced_stream`) where there are few of them; the attribute ``RULE`` of the function
    names the choice. NaN wins every minimum and maximum, whose identity is an infinity. Left alone:
    functions with no or several reductions, consumers of another shape than the result, and
    reductions of TVM's operators under a condition (padding) or to positions.
    """

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a function, or return None if it holds anything else."""
        source = read_source(facts)
        if source is None:
            return None
        loops, cpu = ReductionLoops.of(source), source.cpu
        recorded = self.recorded(facts.func, loops, facts.target) if loops.is_static else None
        template = self.templates(loops, cpu)[0]
        return recorded or template.write_source(source, template.default(loops, cpu))

    def workload(self, func: tirx.PrimFunc, target: Target) -> ReductionLoops | None:
        """Return the loops of the reduction, if all their extents are known."""
        source = read_source(KernelFacts(func, target))
        loops = None if source is None else ReductionLoops.of(source)
        return loops if loops is not None and loops.is_static else None

    def templates(self, workload: ReductionLoops, cpu: CPUInfo) -> list[ReduceTemplate]:
        """Return the nests that can compute a reduction, the one that suits it best first."""
        narrow = find_stream(workload, cpu) is not None
        if workload.kinds[-1] == "R":
            found: list[ReduceTemplate] = [ROWS, COLUMNS] if workload.parallel else [ROWS]
            return found if prefers_rows(workload, cpu) else found[::-1]
        return [STREAM, COLUMNS] if narrow else [COLUMNS]
