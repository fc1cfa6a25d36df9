# SPDX-License-Identifier: Apache-2.0
"""Run that can be changed and simulated again: a traced one, or a model's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from schedules.cost.machine import Machine

from .report import Answer, report
from .timeline import edits
from .timeline.execution_graph import ExecutionGraph, HostCosts, Op
from .timeline.ranks import Timeline, simulate
from .what_if import change, matching


@dataclass(frozen=True)
class Scenario:
    """Graphs of all ranks and the costs of their hosts; each method returns a changed one.

    Parameters
    ----------
    graphs : tuple of ExecutionGraph
        Graph of each rank.
    costs : HostCosts
        Overheads of the host.
    device : str or Machine
        Device that the times are of; a name as the driver gives it.
    notes : tuple of str
        What times rest on that were not measured.
    """

    graphs: tuple[ExecutionGraph, ...]
    costs: HostCosts
    device: str | Machine
    notes: tuple[str, ...] = ()

    def change(self, text: str) -> Scenario:
        """Make the changes of a text, see :func:`tvm_fusion.prediction.what_if.change`.

        Raises
        ------
        PredictionError
            If a change is unknown, its value is wrong, or it matches no operator.
        """
        after = change(self.graphs, text, self.device)
        return replace(self, graphs=after.graphs, notes=(*self.notes, *after.notes))

    def insert(self, index: int, *ops: Op) -> Scenario:
        """Put operators before the one at an index, on all ranks; their kernels need new ids."""
        return self._each(lambda graph: edits.insert(graph, index, *ops))

    def remove(self, pattern: str) -> Scenario:
        """Leave out the operators whose names hold a regular expression."""
        match = matching(self.graphs, "remove", pattern)
        return self._each(lambda graph: edits.remove(graph, match))

    def replace(self, pattern: str, ops: Callable[[Op], Iterable[Op]]) -> Scenario:
        """Put others in place of operators; kernels that are waited for keep their ids."""
        match = matching(self.graphs, "replace", pattern)
        return self._each(lambda graph: edits.replace(graph, match, ops))

    def resize(self, pattern: str, factor: float) -> Scenario:
        """Multiply the times of the kernels of operators."""
        match = matching(self.graphs, "resize", pattern)
        return self._each(lambda graph: edits.resize(graph, match, factor))

    def parallelize(self, pattern: str) -> Scenario:
        """Give each of a run of neighbouring operators a stream of its own."""
        match = matching(self.graphs, "parallelize", pattern)
        return self._each(lambda graph: edits.parallelize(graph, match))

    def _each(self, edit: Callable[[ExecutionGraph], ExecutionGraph]) -> Scenario:
        return replace(self, graphs=tuple(map(edit, self.graphs)))

    def simulate(self) -> Timeline:
        """Simulate all ranks.

        Raises
        ------
        PredictionError
            If they do not meet in their collectives.
        """
        return simulate(self.graphs, self.costs)

    def answer(self, question: str, before: float) -> Answer:
        """Time of this run beside that of another one, in seconds, and what is critical."""
        after = report(question, self.simulate())
        return Answer(question, after.seconds, before - after.seconds, after.path[0], self.notes)
