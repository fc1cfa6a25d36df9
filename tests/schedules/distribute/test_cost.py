# SPDX-License-Identifier: Apache-2.0
"""Predicted times."""

from __future__ import annotations

import re

import pytest
from loop_nests import blur, matmul

from schedules.distribute.cost import (
    CALL_SECONDS,
    Network,
    Processor,
    Work,
    overlap_gain,
    overlap_gain_of,
    sharing_seconds,
    work_of,
)
from schedules.distribute.distribute import distribute
from schedules.errors import OpError


def test_exchange() -> None:
    network = Network(latency=1e-6, bandwidth=1e9)
    plan = distribute(blur(12, 250), "i", 3)
    sizes = plan.itemsizes
    assert network.seconds(plan.exchange, 0, sizes) == pytest.approx(1e-6 + 252 * 4e-9)
    assert network.seconds(plan.exchange, 1, sizes) == pytest.approx(2e-6 + 504 * 4e-9)


@pytest.mark.parametrize(
    ("kind", "figures", "told"),
    [
        (Network, {"latency": -1e-6}, "latency of a Network is -1e-06; expected a number of at"),
        (Network, {"bandwidth": 0.0}, "bandwidth of a Network is 0.0; expected a number above 0"),
        (Network, {"bandwidth": "12GB/s"}, "bandwidth of a Network is '12GB/s'"),
        (Network, {"progress": 2}, "progress of a Network is 2; expected a number from 0 to 1"),
        (Network, {"progress": float("nan")}, "progress of a Network is nan"),
        (Processor, {"rate": 0, "bandwidth": 1e9}, "rate of a Processor is 0; expected a number"),
        (Processor, {"rate": 1e9, "bandwidth": None}, "bandwidth of a Processor is None"),
        (Processor, {"rate": 1, "bandwidth": 1, "node_bandwidth": -1}, "node_bandwidth of a"),
    ],
)
def test_bad_figures(kind: type[Network | Processor], figures: dict[str, float], told: str) -> None:
    with pytest.raises(OpError, match=re.escape(told)):
        kind(**figures)


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


def test_ranks_share_the_memory_of_their_node() -> None:
    alone = Processor(rate=1e9, bandwidth=1e10, node_bandwidth=1.2e10, node_ranks=4)
    long, short = Work(1000, 120_000), Work(10**6, 1)
    assert alone.beside(1).seconds(long) == alone.seconds(long) == pytest.approx(1.2e-5)
    both = alone.beside(2)
    assert both.seconds(long) == pytest.approx(sharing_seconds(1.2e-5, 2e-5))
    assert 2e-5 < both.seconds(long) < 3.2e-5
    assert both.seconds(short) == pytest.approx(1e-3)  # which hardly needs memory
    assert alone.beside(100) == alone.beside(4)  # Others are on other nodes.
    slow = both.slower(2)
    assert slow.seconds(short) == pytest.approx(2e-3) and slow.node_bandwidth == 1.2e10
    assert Processor(1e9, 1e10).beside(2).seconds(long) == pytest.approx(1.2e-5)


def test_overlap_gains_where_messages_travel_alone() -> None:
    calls = 2 * CALL_SECONDS
    assert overlap_gain(Network(progress=1.0), 1e-3, 1e-2) == pytest.approx(1e-3 - calls)
    assert overlap_gain(Network(progress=0.5), 1e-3, 1e-4) == pytest.approx(5e-5 - calls)
    assert overlap_gain(Network(progress=0.0), 1e-3, 1e-2) == pytest.approx(-calls)
    assert overlap_gain(Network(progress=1.0), 1e-3, 1e-2, more=1e-3) == pytest.approx(-calls)


def test_overlap_gain_of_a_rank() -> None:
    """An overlapped blur computes two rows of its first stage twice, at each cut."""
    network = Network(latency=1e-3, bandwidth=1e9, progress=1.0)
    processor = Processor(rate=1e5, bandwidth=1e12)
    plan = distribute(blur(30, 10), "i", 3)
    exchange = network.seconds(plan.exchange, 1, plan.itemsizes)
    gain = overlap_gain_of(plan, 1, network, processor)
    again = 2 * 2 * 10 * 3 / processor.rate
    assert gain == pytest.approx(exchange - again - 2 * CALL_SECONDS)
    assert overlap_gain_of(distribute(blur(30, 10), "i", 1), 0, network, processor) is None
