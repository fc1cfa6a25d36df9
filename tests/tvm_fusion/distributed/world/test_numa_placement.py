# SPDX-License-Identifier: Apache-2.0
"""Ranks on NUMA nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from loop_nests import blur
from mpi_ranks import needs_mpi, run_ranks

from tvm_fusion import distributed
from tvm_fusion.distributed.world.local_world import LocalWorld
from tvm_fusion.distributed.world.numa_placement import Placement, placements
from tvm_fusion.errors import InvalidInputError, TargetError
from tvm_fusion.machine.numa import NumaNode, numa_nodes

PROGRAM = Path(__file__).with_name("numa_program.py")
SOCKETS = [NumaNode(0, frozenset(range(4))), NumaNode(1, frozenset(range(4, 8)))]
ALL = tuple(range(8))


def test_one_rank_a_socket() -> None:
    assert placements(SOCKETS, [ALL, ALL], "same") == [
        Placement(0, (0, 1, 2, 3), 0),
        Placement(1, (4, 5, 6, 7), 1),
    ]
    assert [place.memory for place in placements(SOCKETS, [ALL, ALL], "other")] == [1, 0]
    unbound = placements(SOCKETS, [ALL, ALL], "unbound")
    assert [place.memory for place in unbound] == [None, None]
    assert str(unbound[1]) == "processors of node 1, memory not bound"


def test_ranks_of_a_node_share_its_processors() -> None:
    places = placements(SOCKETS, [ALL] * 3, "same")
    assert [place.processors for place in places] == [(0, 1), (2, 3), (4, 5, 6, 7)]
    crowded = placements(SOCKETS, [ALL] * 10, "same")
    assert {place.node for place in crowded[:5]} == {0} and all(p.processors for p in crowded)
    four = [NumaNode(n, frozenset({n})) for n in range(4)]
    assert [place.node for place in placements(four, [ALL] * 2, "same")] == [0, 2]
    bound = placements(SOCKETS, [(0, 1), (5, 6)], "same")  # The launcher has bound them.
    assert [place.processors for place in bound] == [(0, 1), (5, 6)]


def test_refused() -> None:
    with pytest.raises(TargetError, match="numa is 'same', and this machine has one NUMA node; le"):
        placements(SOCKETS[:1], [ALL] * 2, "same")
    with pytest.raises(
        TargetError, match="rank 1 of this machine belongs to NUMA node 1, of which"
    ):
        placements(SOCKETS, [(0, 1), (2, 3)], "other")
    with (
        pytest.raises(InvalidInputError, match="numa is 'both'; expected one of same, other, unb"),
        distributed.session(numa="both"),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.parametrize("timeout", [0, "5", None])
def test_a_timeout_that_is_none(timeout: Any) -> None:
    expected = "expected a positive number of seconds"
    with (
        pytest.raises(InvalidInputError, match=f"timeout is {timeout!r}; {expected}"),
        distributed.session(timeout=timeout),
    ):
        pass


def test_explain() -> None:
    program = distributed.compile(blur(40, 50), 2)

    def work(world: LocalWorld) -> str:
        local = program.on(world)
        local.input("A").window.array[...] = 0
        return local.explain()

    first, _ = distributed.run_ranks(2, work)
    assert first.startswith("rank 0: memory not bound; this machine has ")
    assert "A[0:22, 0:52], 4576 bytes: " in first


@pytest.mark.slow
@needs_mpi
@pytest.mark.skipif(len(numa_nodes()) != 1, reason="the machine has several NUMA nodes, or none")
def test_one_node() -> None:
    outcome = run_ranks(2, PROGRAM, "same")
    assert outcome.code != 0
    assert "DistributedError" not in outcome.stdout
    assert outcome.stderr.count("this machine has one NUMA node; leave numa= out") == 1


@needs_mpi
@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 or not numa_nodes(), reason="one processor")
@pytest.mark.parametrize("numa", ["same", "unbound"])
def test_two_nodes(numa: str) -> None:
    outcome = run_ranks(2, PROGRAM, numa, "divided")
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("all placed") == 2
