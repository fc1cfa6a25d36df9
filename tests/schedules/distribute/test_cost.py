# SPDX-License-Identifier: Apache-2.0
"""Predicted times."""

from __future__ import annotations

import pytest
from loop_nests import blur, matmul

from schedules.distribute.cost import Network, Processor, Work, overlap_gains, work_of
from schedules.distribute.distribute import distribute


def test_exchange() -> None:
    network = Network(latency=1e-6, bandwidth=1e9)
    plan = distribute(blur(12, 250), "i", 3)
    sizes = plan.itemsizes
    assert network.seconds(plan.exchange, 0, sizes) == pytest.approx(1e-6 + 252 * 4e-9)
    assert network.seconds(plan.exchange, 1, sizes) == pytest.approx(2e-6 + 504 * 4e-9)


def test_work_counts_recomputed_halos() -> None:
    plan = distribute(blur(12, 10), "i", 2)
    work = work_of(plan.nest, ((0, 6),), plan.itemsizes)
    assert work == Work(operations=(8 + 6) * 10 * 3, bytes=(8 * 12 + 6 * 10) * 4)
    nest = distribute(matmul(7, 5, 4), "i", 1).nest
    assert work_of(nest, ((0, 7),), plan.itemsizes | {"B": 4, "C": 4}).operations == 7 * 5 * 4 * 2


def test_roofline() -> None:
    processor = Processor(rate=1e9, bandwidth=1e10)
    assert processor.seconds(Work(1000, 100)) == pytest.approx(1e-6)
    assert processor.seconds(Work(1000, 100_000)) == pytest.approx(1e-5)


def test_overlap_gains_where_messages_travel_alone() -> None:
    assert overlap_gains(Network(progress=1.0), exchange=1e-3, interior=1e-2)
    assert not overlap_gains(Network(progress=0.0), exchange=1e-3, interior=1e-2)
    assert not overlap_gains(Network(progress=1.0), exchange=2e-6, interior=1e-2)
    assert not overlap_gains(Network(progress=1.0), exchange=1e-3, interior=2e-6)
