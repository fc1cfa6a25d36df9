# SPDX-License-Identifier: Apache-2.0
"""Ranks on NUMA nodes: the processors and the memory of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from ...errors import TargetError
from ...machine.numa import NumaNode, bind_memory

Numa = Literal["same", "other", "unbound"]
NUMA: tuple[Numa, ...] = ("same", "other", "unbound")


@dataclass(frozen=True)
class Placement:
    """Place of a rank."""

    node: int  # NUMA node whose processors it has.
    processors: tuple[int, ...]  # Its share of them, ascending.
    memory: int | None  # Node to which its memory is bound; None where it is not.

    def __str__(self) -> str:
        bound = "not bound" if self.memory is None else f"bound to node {self.memory}"
        return f"processors of node {self.node}, memory {bound}"


def placements(
    nodes: Sequence[NumaNode],  # The nodes of the machine.
    allowed: Sequence[Sequence[int]],  # Processors that each rank may use.
    # Memory on the ``same`` node as the processors, on the next (``other``) one, or ``unbound``.
    numa: Numa,
) -> list[Placement]:
    """Places of all ranks of a machine: in order, in equal numbers on its nodes.

    Raises ``TargetError`` if there are less than two nodes, or a rank may use no processor of its
    node.
    """
    if len(nodes) < 2:
        raise TargetError(
            f"numa is {numa!r}, and this machine has {'one NUMA node' if nodes else 'none'}; leave "
            "numa= out, all memory is as near to all of its processors"
        )
    count = len(allowed)
    homes = [rank * len(nodes) // count for rank in range(count)]
    placed = []
    for rank, home in enumerate(homes):
        usable = sorted(nodes[home].processors & set(allowed[rank]))
        same = [r for r in range(count) if homes[r] == home and allowed[r] == allowed[rank]]
        share = part(usable, same.index(rank), len(same)) or usable
        if not usable:
            raise TargetError(
                f"rank {rank} of this machine belongs to NUMA node {nodes[home].number}, of which "
                "it may use no processor; let mpiexec not bind ranks (-bind-to none)"
            )
        memory = {"same": home, "other": (home + 1) % len(nodes)}.get(numa)
        number = None if memory is None else nodes[memory].number
        placed.append(Placement(nodes[home].number, tuple(share), number))
    return placed


@contextmanager
def memory_bound(placement: Placement | None) -> Iterator[None]:
    """Bind what this rank allocates from now on."""
    if placement is None or placement.memory is None:
        yield
        return
    bind_memory(placement.memory)
    try:
        yield
    finally:
        bind_memory(None)


def part(items: Sequence[int], number: int, parts: int) -> Sequence[int]:
    """One of a number of parts of a sequence, whose lengths differ by one at most."""
    return items[len(items) * number // parts : len(items) * (number + 1) // parts]
