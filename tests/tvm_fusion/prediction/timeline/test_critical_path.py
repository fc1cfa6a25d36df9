# SPDX-License-Identifier: Apache-2.0
"""Timelines of one rank against ones that were worked out by hand; times in microseconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_graphs import US, RoundCosts, graph, launch, op

from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.timeline.execution_graph import HOST, ExecutionGraph, Wait
from tvm_fusion.prediction.timeline.timelines import simulate

COSTS = RoundCosts()


def run(*ops, **more):
    return simulate([graph(*ops, **more)], COSTS).ranks[0]


def starts(timeline) -> list[float]:
    return [round(one.start / US, 3) for one in timeline.kernels.values()]


def micros(seconds: float) -> float:
    return round(seconds / US, 3)


def test_host_bound() -> None:
    # Op: T1 10, T2 5, the kernel starts T4/2 = 2 later, T4 4, T3 3: 22 each.
    timeline = run(op(launch(1, 1)), op(launch(2, 1)))
    assert starts(timeline) == [17, 39]
    assert micros(timeline.host_end) == 44 == micros(timeline.seconds)


def test_device_bound() -> None:
    # The second kernel is known at 39, and starts one microsecond after the first.
    timeline = run(op(launch(1, 100)), op(launch(2, 50)))
    assert starts(timeline) == [17, 118]
    assert timeline.kernels[2].bound == "stream"
    assert micros(timeline.host_end) == 44
    assert micros(timeline.seconds) == 168


def test_several_launches_and_none() -> None:
    # T1 10, T2 5, T4 4, T5 2, T4 4, T3 3 = 28; then T1 10 and 7 of the op alone.
    timeline = run(op(launch(1, 1), launch(2, 1)), op())
    assert starts(timeline) == [17, 23]
    assert micros(timeline.host_end) == 28 + 17


def test_blocking_copy() -> None:
    # The host goes on 4 after the end of the copy, which starts after the kernel: 17 + 100 + 1.
    timeline = run(op(launch(1, 100)), op(launch(2, 50, blocking=True)), op(launch(3, 1)))
    assert starts(timeline) == [17, 118, 168 + 4 + 3 + 10 + 5 + 2]
    assert micros(timeline.host_end) == 168 + 4 + 3 + 22


def test_synchronisation_waits_for_what_it_names() -> None:
    kernels = op(launch(1, 100), launch(2, 500, stream=1))
    timeline = run(kernels, op(Wait((1,))))
    # 17 + 100, then T4 4 and T3 3.
    assert micros(timeline.host_end) == 117 + 7
    assert micros(run(kernels, op(Wait())).host_end) == 23 + 500 + 7


def test_synchronisation_of_an_idle_device() -> None:
    assert micros(run(op(Wait())).host_end) == 10 + 5 + 4 + 3


def test_kernel_of_the_host_runs_inside_its_op() -> None:
    timeline = run(op(launch(1, 100, HOST)), op(launch(2, 1)))
    assert micros(timeline.host_end) == 110 + 22
    # The kernel comes in place of T2, and before T3.
    mixed = run(op(launch(1, 100, HOST), launch(2, 1)))
    assert micros(mixed.host_end) == 10 + 100 + 4 + 3


def test_streams_run_side_by_side() -> None:
    timeline = run(op(launch(1, 100)), op(launch(2, 50, stream=1)))
    assert starts(timeline) == [17, 39]
    waits = run(op(launch(1, 100)), op(launch(2, 50, stream=1, after=(1,))))
    assert starts(waits) == [17, 117]
    assert waits.kernels[2].bound == "other stream"


def test_graph_launch() -> None:
    # One call for three kernels, which follow each other at one microsecond.
    timeline = run(op(launch(1, 10), launch(2, 10), launch(3, 10), graph=True))
    assert starts(timeline) == [17, 28, 39]
    assert micros(timeline.host_end) == 22


def test_threads() -> None:
    second = op(thread=1)
    assert micros(run(op(), second).host_end) == 34
    aside = op(thread=1, follows=False)
    assert micros(run(op(), aside).host_end) == 17


def test_gap_in_place_of_t1() -> None:
    assert micros(run(op(gap=2000 * US)).host_end) == 2007


def test_queued_kernels_come_first() -> None:
    queued = (launch(9, 50).kernel,)
    assert starts(run(op(launch(1, 1)), queued=queued)) == [0, 51]


def test_start_is_that_of_the_rank() -> None:
    timeline = run(op(launch(1, 1)), start=1000)
    assert starts(timeline) == [1017]
    assert micros(timeline.seconds) == 22


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_refuses_times(seconds: float) -> None:
    with pytest.raises(PredictionError, match="rank 3: time of k1 is .*finite"):
        graph(op(launch(1, seconds)), rank=3)
    with pytest.raises(PredictionError, match="gap before op"):
        graph(op(gap=seconds))


def test_refuses_cycles_and_twins() -> None:
    with pytest.raises(PredictionError, match="b waits for kernel 2, .*cycle"):
        graph(op(launch(1, 1, after=(2,)), name="b"), op(launch(2, 1)))
    with pytest.raises(PredictionError, match="rank 0: two kernels 1"):
        graph(op(launch(1, 1)), op(launch(1, 1)))


LENGTHS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 2), st.booleans()), min_size=1, max_size=12
)


def _graph(lengths) -> ExecutionGraph:
    return graph(
        *(op(launch(id_, *one), launch(-id_ - 1, 5, 1)) for id_, one in enumerate(lengths))
    )


@given(LENGTHS, st.data())
def test_more_work_is_never_faster(lengths, data) -> None:
    longer = [(time + data.draw(st.integers(0, 50)), *rest) for time, *rest in lengths]
    before, after = (simulate([_graph(one)], COSTS).seconds for one in (lengths, longer))
    assert after >= before - 1e-12
    slower = RoundCosts(gap=11, call=6)
    assert simulate([_graph(lengths)], slower).seconds >= before


@given(LENGTHS)
def test_no_faster_than_its_streams(lengths) -> None:
    timeline = simulate([_graph(lengths)], COSTS).ranks[0]
    for stream in range(3):
        work = [run for run in timeline.kernels.values() if run.kernel.stream == stream]
        assert timeline.seconds >= sum(run.kernel.seconds for run in work) - 1e-12
        ends = [run.end for run in work]
        assert all(later.start >= end for later, end in zip(work[1:], ends, strict=False))
