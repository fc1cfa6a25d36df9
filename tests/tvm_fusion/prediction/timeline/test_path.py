# SPDX-License-Identifier: Apache-2.0
"""Critical paths and idle times of timelines that were worked out by hand; microseconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_graphs import US, RoundCosts, all_reduce, graph, launch, op

from tvm_fusion.prediction.timeline.execution_graph import Wait
from tvm_fusion.prediction.timeline.path import (
    active_seconds,
    critical_path,
    idle_seconds,
    streams,
)
from tvm_fusion.prediction.timeline.timelines import simulate

COSTS = RoundCosts()


def path(timeline) -> list[tuple[int, str, str, float]]:
    return [
        (part.rank, part.op, part.where, round(part.seconds / US, 3))
        for part in critical_path(timeline)
    ]


def idle(timeline, stream: int = 0, rank: int = 0) -> dict[str, float]:
    found = idle_seconds(timeline.ranks[rank], stream)
    return {cause: round(time / US, 3) for cause, time in found.items()}


def test_host_bound() -> None:
    timeline = simulate([graph(op(launch(1, 1), name="a"), op(launch(2, 1), name="b"))], COSTS)
    assert path(timeline) == [(0, "a", "host", 22), (0, "b", "host", 22)]
    # Kernels at 17 and 39, each 1 long; the end is at 44.
    assert idle(timeline) == {"host": 17 + 21, "other rank": 0, "other stream": 0, "end": 4}
    assert active_seconds(timeline.ranks[0]) == pytest.approx(2 * US)


def test_device_bound() -> None:
    timeline = simulate([graph(op(launch(1, 100), name="a"), op(launch(2, 50), name="b"))], COSTS)
    assert path(timeline) == [
        (0, "a", "host", 17),
        (0, "a", "device", 100),
        (0, "b", "device", 1),
        (0, "b", "device", 50),
    ]
    assert idle(timeline) == {"host": 18, "other rank": 0, "other stream": 0, "end": 0}


def test_through_a_wait_of_the_host() -> None:
    ops = op(launch(1, 100, 1), name="a"), op(Wait(), name="w"), op(launch(2, 5), name="b")
    timeline = simulate([graph(*ops)], COSTS)
    assert path(timeline) == [
        (0, "a", "host", 17),
        (0, "a", "device", 100),
        (0, "w", "host", 7),
        (0, "b", "host", 17),
        (0, "b", "device", 5),
    ]
    # Stream 0 starts at 141; the host waited from 37 to 117 for stream 1.
    assert idle(timeline) == {"host": 61, "other rank": 0, "other stream": 80, "end": 0}


def test_across_ranks() -> None:
    def rank(number: int, work: float):
        return graph(
            op(launch(1, work), name="work"),
            op(launch(2, 50, 1, after=(1,), collective=all_reduce(0)), name="reduce"),
            op(launch(3, 20, after=(2,)), name="use"),
            rank=number,
        )

    timeline = simulate([rank(0, 30), rank(1, 200)], COSTS)
    assert path(timeline)[:3] == [
        (1, "work", "host", 17),
        (1, "work", "device", 200),
        (1, "reduce", "collective", 50),
    ]
    assert sum(part.seconds for part in critical_path(timeline)) == pytest.approx(timeline.end)
    # Rank 0: kernel 1 from 17 to 47, the collective from 47, ready 217, to 267, then kernel 3.
    # The third launch is known at 61; until 217 it waits for rank 1, until 267 for the stream.
    expected = {"host": 17 + 14, "other rank": 156, "other stream": 50, "end": 0}
    assert idle(timeline) == expected
    assert idle(timeline, stream=1)["other rank"] == 170
    assert streams(timeline.ranks[1]) == [0, 1]
    assert active_seconds(timeline.ranks[0]) == pytest.approx(100 * US)


KERNELS = st.lists(
    st.tuples(st.integers(0, 90), st.integers(0, 2), st.booleans()), min_size=1, max_size=10
)


@given(st.lists(KERNELS, min_size=2, max_size=2))
def test_parts_sum_up(ranks) -> None:
    graphs = []
    for number, kernels in enumerate(ranks):
        ops = [op(launch(id_, *one), name=f"o{id_}") for id_, one in enumerate(kernels)]
        meet = op(launch(99, 40, 1, collective=all_reduce(0)), name="reduce")
        graphs.append(graph(*ops, meet, op(Wait(), name="w"), rank=number))
    timeline = simulate(graphs, COSTS)
    total = sum(part.seconds for part in critical_path(timeline))
    assert total == pytest.approx(timeline.end, abs=1e-12)
    for rank in timeline.ranks:
        for stream in streams(rank):
            busy = sum(
                run.end - run.ready for run in rank.kernels.values() if run.kernel.stream == stream
            )
            idle_time = sum(idle_seconds(rank, stream).values())
            assert busy + idle_time == pytest.approx(rank.seconds, abs=1e-12)
