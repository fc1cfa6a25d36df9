# SPDX-License-Identifier: Apache-2.0
"""Rows split between a CPU and devices: against all splits, and by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_nests import blur, matmul

from schedules.distribute.cost import Processor, work_of
from schedules.distribute.loop_nest import read_loop_nest
from schedules.distribute.operation_sequence import operation_sequence
from schedules.distribute.split import (
    Accelerator,
    MeasuredRows,
    SecondsOfRows,
    check_split,
    choose_chunks,
    cpu_seconds,
    device_seconds,
    predicted_seconds,
    split_rows,
)
from schedules.errors import OpError

FLOATS = {"A": 4, "by": 4, "B": 4, "C": 4}
GPU = Accelerator(rate=1e12, bandwidth=1e12, link=1e10, latency=1e-6)


def last(rows: Sequence[int], seconds: Sequence[SecondsOfRows]) -> float:
    return max(time(count) for time, count in zip(seconds, rows, strict=True))


@given(
    extent=st.integers(1, 25),
    lines=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=2, max_size=3),
)
def test_no_split_ends_earlier(extent: int, lines: list[tuple[int, int]]) -> None:
    seconds = [MeasuredRows(float(fixed), float(slope)) for fixed, slope in lines]
    chosen = split_rows(extent, seconds)
    assert sum(chosen) == extent and min(chosen) >= 0
    others = [(a, b, extent - a - b) for a in range(extent + 1) for b in range(extent + 1 - a)]
    splits = [
        rows[: len(lines) - 1] + rows[-1:] for rows in others if len(lines) > 2 or not rows[1]
    ]
    best = min(last(rows, seconds) for rows in splits)
    assert last(chosen, seconds) <= best * (1 + 1e-9)


def test_every_row_has_a_processor() -> None:
    """More rows allow more chunks; they never end earlier for it."""
    figures = Accelerator(rate=1e15, bandwidth=2e9, link=1e9, latency=0.0)
    device = device_seconds(read_loop_nest(blur(64, 64), ["i"]), ((0, 64),), FLOATS, figures)
    times = [device(count) for count in range(65)]
    assert times == sorted(times)
    for extent in range(1, 65):
        assert sum(split_rows(extent, [MeasuredRows(0.0, times[32]), device])) == extent


def test_equal_processors_share_equally() -> None:
    assert split_rows(10, [MeasuredRows(0.0, 1.0)] * 2) == (5, 5)
    assert split_rows(12, [MeasuredRows(0.0, 2.0), MeasuredRows(0.0, 1.0)]) == (4, 8)


def test_one_alone_where_the_other_only_delays() -> None:
    assert split_rows(10, [MeasuredRows(0.0, 1.0), MeasuredRows(99.0, 0.1)]) == (10, 0)
    assert split_rows(10, [MeasuredRows(99.0, 1.0), MeasuredRows(0.0, 0.1)]) == (0, 10)


def test_lines_through_measurements() -> None:
    line = MeasuredRows.through((10, 3.0), (20, 5.0))
    assert (line.fixed, line.a_row, line(30), line(0)) == (1.0, 0.2, 7.0, 0.0)
    noisy = MeasuredRows.through((10, 5.0), (20, 4.0))  # fewer rows took longer
    assert noisy.a_row > 0 and noisy(20) == pytest.approx(4.0, rel=1e-2)


def test_predictions_are_those_of_the_parts() -> None:
    nest = read_loop_nest(blur(400, 64), ["i"])
    rows = ((0, 400),)
    cpu = Processor(rate=1e9, bandwidth=1e12)
    work = work_of(nest, rows, FLOATS)
    assert cpu_seconds(nest, rows, FLOATS, cpu)(400) == pytest.approx(cpu.seconds(work))
    assert cpu_seconds(nest, rows, FLOATS, cpu)(0) == 0
    for chunks in (1, 4):
        sequence = operation_sequence(nest, rows, chunks)
        exact = predicted_seconds(nest, sequence, FLOATS, GPU)
        assert device_seconds(nest, rows, FLOATS, GPU, chunks)(400) == pytest.approx(exact)
    whole = sequence.bytes(FLOATS)
    assert exact > max(whole) / GPU.link  # the link is what takes longest


def test_copies_by_the_cores_that_compute() -> None:
    """Nothing runs beside anything, so that chunks gain nothing."""
    nest = read_loop_nest(blur(400, 64), ["i"])
    rows = ((0, 400),)
    figures = dataclasses.replace(GPU, overlaps=False)
    assert choose_chunks(nest, rows, FLOATS, figures) == 1 < choose_chunks(nest, rows, FLOATS, GPU)
    sequence = operation_sequence(nest, rows, 4)
    stages = [
        figures.stages(work_of(nest, each.rows, FLOATS), *sequence.chunk_bytes(number, FLOATS))
        for number, each in enumerate(sequence.chunks)
    ]
    exact = predicted_seconds(nest, sequence, FLOATS, figures)
    assert exact == pytest.approx(sum(map(sum, stages)))
    assert device_seconds(nest, rows, FLOATS, figures, 4)(400) == pytest.approx(exact)


def test_weights_are_in_the_prediction_once() -> None:
    nest = read_loop_nest(matmul(64, 8, 1000), ["i"])
    sequence = operation_sequence(nest, ((0, 64),), 4)
    exact = predicted_seconds(nest, sequence, FLOATS, GPU)
    assert device_seconds(nest, ((0, 64),), FLOATS, GPU, 4)(64) == pytest.approx(exact, rel=1e-2)


def test_chunks_by_the_model() -> None:
    nest = read_loop_nest(blur(4000, 64), ["i"])
    rows = ((0, 4000),)
    slow = Accelerator(rate=1e12, bandwidth=1e12, link=1e10, latency=1e-3)
    assert choose_chunks(nest, rows, FLOATS, slow) == 1 < choose_chunks(nest, rows, FLOATS, GPU)
    assert choose_chunks(nest, ((0, 2),), FLOATS, GPU) <= 2


def test_refused() -> None:
    names = ["the CPU", "opencl:0"]
    assert check_split([3, 7], 10, names) == (3, 7)
    with pytest.raises(OpError, match=r"\[10\] has 1 numbers of rows; expected 2: for the CPU, op"):
        check_split([10], 10, names)
    for rows in ([-1, 11], [3, 8]):
        with pytest.raises(OpError, match="is not a split of 10 rows between the CPU, opencl:0"):
            check_split(rows, 10, names)
