# SPDX-License-Identifier: Apache-2.0
"""Timelines of several ranks against ones that were worked out by hand; times in microseconds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_graphs import US, RoundCosts, all_reduce, graph, launch, op

from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.timeline.execution_graph import HOST, Collective, Wait
from tvm_fusion.prediction.timeline.timelines import simulate

COSTS = RoundCosts()
COMM = 1


def reduce_op(id_: int, micros: float, sequence: int = 0, **more):
    return op(launch(id_, micros, COMM, collective=all_reduce(sequence), **more), name="all_reduce")


def times(timeline, id_: int) -> list[tuple[float, float, float]]:
    """Start, last start and end of a kernel on each rank."""
    return [
        tuple(round(time / US, 3) for time in (run.start, run.ready, run.end))
        for run in (rank.kernels[id_] for rank in timeline.ranks)
    ]


def test_late_rank_holds_all() -> None:
    # Rank 1 starts 100 later; the collective takes the least of its times, 50.
    early, late = graph(reduce_op(1, 120)), graph(reduce_op(1, 50), rank=1, start=100)
    timeline = simulate([early, late], COSTS)
    assert times(timeline, 1) == [(17, 117, 167), (117, 117, 167)]
    assert timeline.ranks[0].kernels[1].last_rank == 1
    assert round(timeline.seconds / US, 3) == 167


def test_the_host_waits_before_an_operator() -> None:
    # Known at 17, it ends at 67: before that the host has ended the operator at 32. T1 follows.
    timeline = simulate([graph(reduce_op(1, 50), op(name="next", after=(1,)))], COSTS)
    without = simulate([graph(reduce_op(1, 50), op(name="next"))], COSTS)
    begins, waited = (found.ranks[0].host[1].start / US for found in (without, timeline))
    t1 = begins - without.ranks[0].host[0].end / US
    assert t1 > 0 and round(waited, 3) == round(67 + t1, 3)
    (wait,) = timeline.ranks[0].waits
    assert (round(wait.end / US, 3), wait.kernel, wait.op) == (67, 1, 1)
    with pytest.raises(PredictionError, match="next waits for kernel 1, .* or later: a cycle"):
        graph(op(name="next", after=(1,)), reduce_op(1, 50))


def test_collective_waits_for_its_stream_and_its_input() -> None:
    slow = op(launch(1, 300))
    first = graph(slow, reduce_op(2, 50, after=(1,)))
    second = graph(op(launch(1, 10)), reduce_op(2, 50, after=(1,)), rank=1)
    # Known at 39 on both; the kernel of rank 0 ends at 317.
    assert times(simulate([first, second], COSTS), 2) == [(317, 317, 367), (39, 317, 367)]


def test_two_buckets_overlap_the_backward_pass() -> None:
    # Kernels of 100: bucket 0 after the first, bucket 1 after the second, beside the third.
    def rank(number: int, delay: float):
        return graph(
            op(launch(1, 100)),
            reduce_op(2, 150, 0, after=(1,)),
            op(launch(3, 100)),
            reduce_op(4, 150, 1, after=(3,)),
            op(launch(5, 100)),
            op(launch(6, 10, after=(2, 4)), name="step"),
            rank=number,
            start=delay,
        )

    timeline = simulate([rank(0, 0), rank(1, 20)], COSTS)
    # Rank 1 is 20 behind: kernel 1 ends at 137 there, bucket 0 runs from 137 to 287.
    assert times(timeline, 2) == [(117, 137, 287), (137, 137, 287)]
    # Kernel 3 runs from 118 on rank 0: buckets do not hold it up.
    assert times(timeline, 3)[0][0] == 118
    # Bucket 1 follows bucket 0 on its stream; the step waits for it, kernel 5 does not.
    assert times(timeline, 4) == [(288, 288, 438), (288, 288, 438)]
    assert times(timeline, 5)[0] == (219, 219, 319)
    assert [start for start, _, _ in times(timeline, 6)] == [438, 438]


def test_host_waits_for_a_collective() -> None:
    ranks = [graph(reduce_op(1, 50), op(Wait((1,))), rank=n, start=100 * n) for n in range(2)]
    timeline = simulate(ranks, COSTS)
    # End at 167, then T4 4 and T3 3.
    assert [round(rank.host_end / US, 3) for rank in timeline.ranks] == [174, 174]


def test_collective_of_the_host() -> None:
    step = launch(1, 50, HOST, collective=all_reduce(0))
    timeline = simulate([graph(op(step), rank=n, start=100 * n) for n in range(2)], COSTS)
    assert times(timeline, 1) == [(10, 110, 160), (110, 110, 160)]


def test_own_overheads_of_each_rank() -> None:
    ranks = [graph(op(), rank=0), graph(op(), rank=1)]
    timeline = simulate(ranks, [RoundCosts(), RoundCosts(gap=100)])
    assert [round(rank.seconds / US) for rank in timeline.ranks] == [17, 107]


def test_subgroups_meet_on_their_own() -> None:
    def pairs(number: int, start: float):
        first = number // 2 * 2
        part = Collective("all_reduce", f"pair {first}", 0, (first, first + 1))
        return graph(op(launch(1, 50, COMM, collective=part)), rank=number, start=start)

    timeline = simulate([pairs(0, 0), pairs(1, 10), pairs(2, 1000), pairs(3, 0)], COSTS)
    assert [end for _, _, end in times(timeline, 1)] == [77, 77, 1067, 1067]


def test_group_of_which_one_rank_was_traced() -> None:
    part = all_reduce(0, ranks=(0, 1))
    timeline = simulate([graph(op(launch(1, 50, COMM, collective=part)))], COSTS)
    assert times(timeline, 1) == [(17, 17, 67)]


def test_send_meets_recv() -> None:
    ranks = [
        graph(op(launch(1, 50, COMM, collective=Collective(kind, "pair", 0))), rank=number)
        for number, kind in enumerate(["send", "recv"])
    ]
    assert times(simulate(ranks, COSTS), 1)[0] == (17, 17, 67)


def test_names_the_rank_that_lacks_a_collective() -> None:
    ranks = [graph(reduce_op(1, 50)), graph(reduce_op(1, 50), rank=1), graph(op(), rank=2)]
    expected = "rank 2 lacks all_reduce number 0 of group 'world', which rank 0 calls in all_reduce"
    with pytest.raises(PredictionError, match=expected):
        simulate(ranks, COSTS)


def test_names_ranks_that_differ() -> None:
    other = Collective("broadcast", "world", 0)
    ranks = [graph(reduce_op(1, 50)), graph(op(launch(1, 50, COMM, collective=other)), rank=1)]
    with pytest.raises(PredictionError, match="rank 1 calls broadcast .* where rank 0 calls all_r"):
        simulate(ranks, COSTS)


def test_names_a_deadlock() -> None:
    first = graph(reduce_op(1, 50, 0), op(Wait((1,))), reduce_op(2, 50, 1), op(Wait((2,))))
    second = graph(reduce_op(2, 50, 1), op(Wait((2,))), reduce_op(1, 50, 0), op(Wait((1,))), rank=1)
    with pytest.raises(PredictionError, match="rank 1 never starts all_reduce number 0 .*order"):
        simulate([first, second], COSTS)


def test_refuses_twins_and_nothing() -> None:
    with pytest.raises(PredictionError, match="a rank comes twice"):
        simulate([graph(op()), graph(op())], COSTS)
    with pytest.raises(PredictionError, match="rank 0: all_reduce number 0 .* comes twice"):
        simulate([graph(reduce_op(1, 5), reduce_op(2, 5)), graph(rank=1)], COSTS)
    with pytest.raises(PredictionError, match="no ranks"):
        simulate([], COSTS)


WORK = st.lists(st.integers(0, 200), min_size=3, max_size=3)


def _ranks(work, starts):
    return [
        graph(
            *itertools.chain.from_iterable(
                (
                    op(launch(2 * n, time)),
                    reduce_op(2 * n + 1, 40, n, after=(2 * n,)),
                )
                for n, time in enumerate(times_)
            ),
            op(Wait()),
            rank=number,
            start=start,
        )
        for number, (times_, start) in enumerate(zip(work, starts, strict=True))
    ]


@given(st.lists(WORK, min_size=3, max_size=3), WORK, st.permutations(range(3)))
def test_order_of_ranks_does_not_matter(work, starts, order) -> None:
    ranks = _ranks(work, starts)
    ends = {rank.graph.rank: rank.end for rank in simulate(ranks, COSTS).ranks}
    shuffled = simulate([ranks[number] for number in order], COSTS)
    assert {rank.graph.rank: rank.end for rank in shuffled.ranks} == ends


@given(st.lists(WORK, min_size=2, max_size=2), st.integers(0, 1), st.integers(0, 2))
def test_more_work_of_a_rank_is_never_faster(work, rank, place) -> None:
    before = simulate(_ranks(work, [0, 0]), COSTS).seconds
    work[rank][place] += 30
    assert simulate(_ranks(work, [0, 0]), COSTS).seconds >= before - 1e-12
