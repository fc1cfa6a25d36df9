# SPDX-License-Identifier: Apache-2.0
"""Uses of rows in a batch, by hand and for equally likely rows, and what caches lack."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.cost.embedding import (
    BINS,
    EXCHANGES,
    TableLookups,
    base_seconds,
    hit_rate_of,
    missing_bytes,
    predict_lookups,
)
from schedules.cost.machine import Figure, load_machine
from schedules.errors import PredictionError

# Row 5 is used seven times, row 0 three times, rows 2 and 9 once.
BATCH = TableLookups.of([5, 5, 0, 5, 2, 5, 5, 0, 5, 9, 0, 5], [0, 4, 4], rows=10, width=16)


def test_rows_are_counted_by_their_uses():
    assert (BATCH.bags, BATCH.count) == (3, 12)
    assert BATCH.used[:4] == (2, 1, 1, 0) and BATCH.uses[:4] == (2, 3, 7, 0)
    assert BATCH.reuse_factors[:3] == (0.5, 0.25, 0.25) and sum(BATCH.reuse_factors) == 1


def test_caches_keep_the_rows_used_most():
    # A row of 16 floats is one line: none, the hottest, the two hottest, one and a half of the two.
    assert [missing_bytes([BATCH], 64 * rows) / 64 for rows in (0, 1, 2, 3, 4)] == [12, 5, 2, 1, 0]
    assert missing_bytes([BATCH, BATCH], 128) / 64 == 10
    # The first use of a row misses, too: two misses of rows that stay, five of others.
    assert hit_rate_of(BATCH, 1) == pytest.approx(1 - 6 / 12)
    assert hit_rate_of(BATCH, 4) == pytest.approx(1 - 4 / 12)


def test_the_busiest_part_of_the_rows_by_hand():
    # Rows 0 to 4 have 4 of 12 lookups, rows 5 to 9 eight; seven of these are of row 5.
    assert BATCH.busiest(1) == 1 and BATCH.busiest(2) == pytest.approx(8 / 12)
    assert BATCH.busiest(10**6) == pytest.approx(7 / 12)
    assert TableLookups(3, 10, 16, 12).busiest(4) == 1 / 4


@given(rows=st.integers(1, 3000), count=st.integers(1, 20_000), seed=st.integers(0, 9))
def test_equally_likely_rows_have_the_bins_of_a_draw(rows, count, seed):
    drawn = np.random.default_rng(seed).integers(rows, size=count)
    measured = TableLookups.of(drawn, [0], rows, 8).histogram
    expected = TableLookups(1, rows, 8, count).histogram
    assert expected[1].sum() == pytest.approx(count)
    spread = 2 / rows**0.5  # four standard deviations of the share of rows on one side of a limit
    for one, other in zip(measured, expected, strict=True):
        assert one.shape == other.shape == (BINS,)
        assert np.abs(np.cumsum(one) - np.cumsum(other)).max() <= (0.1 + spread) * one.sum() + 8


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("name", ["znver4", "znver3", "v100"])
def test_batches_that_repeat_rows_are_faster(name, is_backward):
    machine = load_machine(name)
    random, shape = np.random.default_rng(0), (2_000_000, 64)
    spread = random.integers(shape[0], size=200_000)
    offsets = np.arange(0, 200_000, 20)
    few = TableLookups.of(spread % 500 * 4000, offsets, *shape)
    many = TableLookups.of(spread, offsets, *shape)
    fast, slow = (predict_lookups([one], machine, is_backward) for one in (few, many))
    # Without a model of the CPU, reading the indices is most of a backward pass.
    share = 0.95 if name == "znver3" and is_backward else 0.8
    assert fast.seconds < share * slow.seconds
    assert 0 < fast.low < fast.seconds < fast.high
    equal = TableLookups(len(offsets), *shape, 200_000)
    assert predict_lookups([equal], machine, is_backward).seconds == pytest.approx(
        slow.seconds, rel=0.1
    )


@pytest.mark.parametrize("name", ["znver4", "znver3"])
def test_one_thread_updates_more_if_the_used_rows_are_neighbours(name):
    machine, offsets = load_machine(name), np.arange(0, 200_000, 20)
    rows = np.random.default_rng(0).integers(1_000_000, size=200_000)
    spread, lower = (TableLookups.of(rows * step, offsets, 2_000_000, 64) for step in (2, 1))
    assert (spread.used, spread.uses) == (lower.used, lower.uses)
    times = [base_seconds(one, machine, True) for one in (spread, lower)]
    assert times[0] < times[1]
    forward = [base_seconds(one, machine, False) for one in (spread, lower)]
    assert forward[0] == forward[1]


def test_gradients_wait_for_the_other_core():
    machine = load_machine("znver4")
    fast = replace(
        machine, figures=machine.figures | {"bandwidth.exchange": Figure(1e12, "by hand")}
    )
    times = [base_seconds(BATCH, one, True) for one in (machine, fast)]
    moved = 12 * 64
    exchange = machine["bandwidth.exchange"]
    assert times[0] - times[1] == pytest.approx(EXCHANGES * moved * (1 / exchange - 1e-12))


def test_a_single_thread_reads_what_it_wrote_itself():
    machine = load_machine("znver4")
    figures = {**machine.figures, "multiprocessors": Figure(1, "by hand")}
    slow = {**figures, "bandwidth.exchange": Figure(1e6, "by hand")}
    times = [base_seconds(BATCH, replace(machine, figures=one), True) for one in (figures, slow)]
    assert times[0] == times[1] < base_seconds(BATCH, machine, True)


def test_a_calibrated_machine_exchanges_as_its_family():
    machine = load_machine("znver4")
    figures = {k: v for k, v in machine.figures.items() if k != "bandwidth.exchange"}
    calibrated = replace(machine, figures=figures)
    assert base_seconds(BATCH, calibrated, True) == base_seconds(BATCH, machine, True)
    unknown = replace(calibrated, name="other")
    assert base_seconds(BATCH, unknown, True) < base_seconds(BATCH, machine, True)


@pytest.mark.parametrize("name", ["znver4", "v100"])
def test_tables_of_different_sizes_are_one_launch(name):
    machine = load_machine(name)
    tables = [TableLookups(512, 10**n, 16 * n, 512 * n) for n in (3, 4, 5, 6)]
    together = predict_lookups(tables, machine, False).seconds
    apart = [predict_lookups([one], machine, False).seconds for one in tables]
    assert max(apart) < together < 1.5 * sum(apart)


def test_bad_batches_are_refused():
    for indices, offsets, message in (
        ([1, 10], [0], "indices from 1 to 10; expected rows 0 to 9"),
        ([-1], [0], "indices from -1"),
        ([1, 2], [1], "begin with 0"),
        ([1, 2], [0, 2, 1], "never descend"),
        ([1, 2], [0, 3], "offset 3 lies after all 2 indices"),
        ([1.5], [0], "vector of integers"),
        ([[1]], [0], "indices of shape"),
    ):
        with pytest.raises(PredictionError, match=message):
            TableLookups.of(indices, offsets, 10, 4)
    with pytest.raises(PredictionError, match="rows is 0"):
        TableLookups(1, 0, 4, 1)
    with pytest.raises(PredictionError, match="1 of 2 lookups are in the bins"):
        TableLookups(1, 9, 4, 2, (1.0, *[0.0] * 16), (1.0, *[0.0] * 16))
    with pytest.raises(PredictionError, match="1 of 2 lookups are in the ranges"):
        TableLookups(1, 9, 4, 2, ranges=(1.0, *[0.0] * 63))
    with pytest.raises(PredictionError, match="in no tables"):
        predict_lookups([], load_machine("v100"), False)
