# SPDX-License-Identifier: Apache-2.0
"""Dependences in a dataflow block some of whose bindings are merged."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tvm import relax

from schedules.errors import OpError

from ..core.expressions import op_name


@dataclass(frozen=True)
class Unit:
    """Bindings that are merged.

    Parameters
    ----------
    computes : tuple[relax.Var, ...]
        In the order of the block; others may compute the same.
    provides : frozenset[relax.Var]
        The variables that others may read.
    turn : int
        A position in the block.
    """

    computes: tuple[relax.Var, ...]
    provides: frozenset[relax.Var]
    turn: int


class BlockOrder:
    """The bindings of a dataflow block as a graph.

    Parameters
    ----------
    block : relax.DataflowBlock
        Dead bindings do not count.

    Attributes
    ----------
    bindings : dict[relax.Var, relax.Binding]
        In the order of the block.
    reads : dict[relax.Var, set[relax.Var]]
        The bindings that a binding reads.
    position : dict[relax.Var, int]
        The number of a binding.
    """

    def __init__(self, block: relax.DataflowBlock) -> None:
        self.bindings = {binding.var: binding for binding in block.bindings}
        self.position = {var: number for number, var in enumerate(self.bindings)}
        self.reads = {
            var: {read for read in relax.analysis.free_vars(binding.value) if read in self.bindings}
            for var, binding in self.bindings.items()
        }
        self._add_fences()
        self._remove_dead()

    def is_convex(
        self, calls: Collection[relax.Var], groups: Mapping[relax.Var, Collection[relax.Var]]
    ) -> bool:
        """Return whether no call depends on another through a binding outside the set.

        Parameters
        ----------
        calls : Collection[relax.Var]
            The calls to merge into one binding.
        groups : Mapping
            For each variable that is merged with others already, all of these.
        """
        first = self._earliest(calls, groups)
        queue = [read for var in calls for read in self.reads[var].difference(calls)]
        seen = set(queue)
        while queue:
            current = queue.pop()
            for var in groups.get(current, (current,)):
                if var in calls:
                    return False
                new = {read for read in self.reads[var] if self.position[read] >= first} - seen
                seen |= new
                queue += new
        return True

    def _earliest(
        self, calls: Collection[relax.Var], groups: Mapping[relax.Var, Collection[relax.Var]]
    ) -> int:
        """The earliest position before which nothing depends on ``calls``."""
        first = min(map(self.position.__getitem__, calls))
        for group in {id(group): group for group in groups.values()}.values():
            places = [self.position[var] for var in group]
            if min(places) < first <= max(places):
                return 0
        return first

    def sort(self, units: Sequence[Unit]) -> list[Unit]:
        """Sort units topologically: each as early as possible, but none before its turn.

        Raises
        ------
        OpError
            If units depend on each other in a cycle.
        """
        source = {var: number for number, unit in enumerate(units) for var in unit.provides}
        waiting = [
            {
                source[read]
                for var in unit.computes
                for read in self.reads[var].difference(unit.computes)
                if read in source
            }
            for unit in units
        ]
        readers: list[list[int]] = [[] for _ in units]
        for number, before in enumerate(waiting):
            for other in before:
                readers[other].append(number)
        ready = [(units[number].turn, number) for number, w in enumerate(waiting) if not w]
        heapq.heapify(ready)
        found: list[Unit] = []
        while ready:
            _, number = heapq.heappop(ready)
            found.append(units[number])
            for reader in readers[number]:
                waiting[reader].discard(number)
                if not waiting[reader]:
                    heapq.heappush(ready, (units[reader].turn, reader))
        if len(found) < len(units):
            left = [var.name for unit in units if unit not in found for var in unit.computes]
            raise OpError(
                f"bindings {', '.join(left)} depend on each other in a cycle once some are merged; "
                "expected convex units: check BlockOrder.is_convex first"
            )
        return found

    def _add_fences(self) -> None:
        """Prevent reordering across a binding that defines extents or writes into its argument."""
        fence: set[relax.Var] = set()
        since: set[relax.Var] = set()
        for var, binding in self.bindings.items():
            self.reads[var] |= fence
            if isinstance(binding, relax.MatchCast) or "inplace" in (op_name(binding.value) or ""):
                self.reads[var] |= since
                fence, since = {var}, set()
            else:
                since.add(var)

    def _remove_dead(self) -> None:
        live = {var for var in self.bindings if _is_root(self.bindings[var])}
        for var in reversed(self.bindings):
            if var in live:
                live |= self.reads[var]
        for var in [var for var in self.bindings if var not in live]:
            del self.bindings[var], self.reads[var]


def _is_root(binding: relax.Binding) -> bool:
    return not isinstance(binding.var, relax.DataflowVar) or isinstance(binding, relax.MatchCast)
