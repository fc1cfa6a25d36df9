# SPDX-License-Identifier: Apache-2.0
"""Explicit transfers: what they need."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from loop_nests import blur

from schedules.distribute.distribute import Distribution, distribute
from schedules.distribute.exchange import Message
from schedules.distribute.transfer import Mode, Transfer, send_recv
from schedules.distribute.waits import with_waits
from schedules.errors import OpError

LATER = Mode(blocking=False)


def plan_of(*transfers: Transfer) -> Distribution:
    return distribute(blur(12), "i", 3, transfers=transfers)


def test_relay() -> None:
    plan = plan_of(
        send_recv("A", (0, 5), 0, 2),
        send_recv("A", ((0, 3), (1, 4)), 2, 1, Mode(synchronous=True)),
    )
    messages = [exchange.messages[0] for exchange in plan.exchanges[:2]]
    assert messages == [
        Message(0, 2, "A", ((0, 5), (0, 7))),
        Message(2, 1, "A", ((0, 3), (1, 4))),
    ]
    assert [exchange.synchronous for exchange in plan.exchanges] == [False, True, False]
    assert [exchange.id for exchange in plan.exchanges] == [0, 1, 2]


def test_relay_of_what_may_not_have_come() -> None:
    with pytest.raises(OpError, match=r"rank 1 does not hold region .* by a blocking transfer"):
        plan_of(
            send_recv("A", (2, 5), 0, 1, Mode(blocking=False)),
            send_recv("A", (2, 4), 1, 2),
        )


def test_outputs() -> None:
    plan = plan_of(send_recv("by", (4, 6), 1, 0), send_recv("A", (0, 2), 0, 2))
    assert [transfer.id for transfer in plan.after] == [0]
    assert [transfer.id for transfer in plan.before] == [1]
    assert plan.parts[0].windows["by"] == ((0, 6), (0, 5))
    assert plan.parts[2].windows["by"] == ((8, 12), (0, 5))


@pytest.mark.parametrize(
    ("transfer", "reason"),
    [
        (send_recv("by", (3, 6), 1, 0), r"rank 1 does not hold region \(\(3, 4\), \(0, 5\)\)"),
        (send_recv("by", (4, 6), 1, 0, Mode(blocking=False)), "no block of rank 0 reads it"),
        (send_recv("B", (0, 2), 0, 1), r"transfer of 'B'\[0:2\] from rank 0 to 1: no such input"),
        (send_recv("A", (0, 2), 0, 3), "rank 3 is not between 0 and 2"),
        (send_recv("A", (0, 2), -1, 1), "rank -1 is not between 0 and 2"),
        (send_recv("A", (0, 2), 1, 1), "needs no transfer to itself"),
        (send_recv("A", (0, 15), 0, 1), r"it has no such rows; its shape is \(14, 7\)"),
        (send_recv("A", (2, 2), 0, 1), "it has no such rows"),
        (send_recv("A", ((0, 1), (0, 1), (0, 1)), 0, 1), "it has no such rows"),
        (send_recv("A", (4, 8), 0, 1), r"rank 0 does not hold region \(\(5, 8\), \(0, 7\)\)"),
        (
            send_recv("A", (0, 2), 0, 2, Mode(blocking=False)),
            "no block of rank 2 reads it, so that none waits for it; make it blocking",
        ),
        (send_recv("A", (0, 2), 0, 1, before="bx"), "before block 'bx', and blocks; make it Mode"),
        (send_recv("A", (0, 2), 0, 1, LATER, before="b"), "there is none; the blocks are bx, by"),
        (send_recv("A", (0, 2), 0, 1, LATER, before="by"), "after block 'bx', which reads it; na"),
        (send_recv("by", (0, 2), 0, 1, LATER, before="by"), "outputs are sent at the end of a run"),
    ],
)
def test_refused(transfer: Transfer, reason: str) -> None:
    with pytest.raises(OpError, match=reason):
        plan_of(transfer)


@pytest.mark.parametrize("rows", [5, (), (1, 2, 3), ((0, 1), 2), (0.5, 2)])
def test_rows_that_are_no_ranges(rows: Any) -> None:
    with pytest.raises(OpError, match=r"rows of a transfer of 'A' are .*; expected \(begin, end\)"):
        send_recv("A", rows, 0, 1)


def test_a_mode_that_is_none() -> None:
    mode: Any = "async"
    with pytest.raises(OpError, match="mode of a transfer of 'A' is 'async'; expected a Mode"):
        send_recv("A", (0, 1), 0, 1, mode)


def test_rows_of_numpy() -> None:
    rows = np.array([0, 2])
    assert send_recv("A", (rows[0], rows[1]), 0, 1) == send_recv("A", (0, 2), 0, 1)


def test_refused_wait_before_what_the_schedule_has_left_out() -> None:
    late = send_recv("by", (0, 2), 0, 1, LATER, before="bx_inlined")
    with pytest.raises(OpError, match="before block 'bx_inlined', of which the schedule has left"):
        with_waits(blur(12), [late])
