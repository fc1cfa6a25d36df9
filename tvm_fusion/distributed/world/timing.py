# SPDX-License-Identifier: Apache-2.0
"""Times of what the ranks of a job do together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

_SECONDS = 0.1  # Seconds of one measurement, about.
_FEWEST, _MOST = 9, 2000  # exchanges of which a median is taken
_ROW_SECONDS = 5e-4  # Seconds between barriers, which ranks do not leave at the same time.


class MeasuredRanks(Protocol):
    """Ranks of a job as a measurement needs them, whoever connects them."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """The arrays of all ranks, stacked in order of the ranks."""


def slowest(ranks: MeasuredRanks, value: float) -> float:
    """Return the largest value of all ranks."""
    return float(ranks.all_gather(np.array([value])).max())


def timed(ranks: MeasuredRanks, call: Callable[[], object], seconds: float = _SECONDS) -> float:
    """Median seconds of a call that all ranks make together, several times in a row.

    All together take about ``seconds``, but five calls at least.
    """
    call()
    begin = time.perf_counter()
    call()
    once = slowest(ranks, time.perf_counter() - begin)
    in_a_row = max(1, int(_ROW_SECONDS / once))
    times = []
    for _ in range(int(min(max(seconds / (once * in_a_row), 5), 200))):
        ranks.barrier()
        begin = time.perf_counter()
        for _ in range(in_a_row):
            call()
        times.append((time.perf_counter() - begin) / in_a_row)
    return statistics.median(times)


def renewed_seconds(
    ranks: MeasuredRanks,  # Ranks that take part in the exchange.
    # Lets those begin at the same time that exchange something; a barrier of many does not.
    meet: Callable[[], object],
    renew: Callable[[], object],  # Writes what this rank sends.
    run: Callable[[], object],
    seconds: float,  # Length of the measurement, about.
) -> float:
    """Median seconds of an exchange on the slower rank, before each of which it is written anew.

    Else the other core would have in its cache what is sent. All together take about ``seconds``.
    """

    def once() -> float:
        renew()
        meet()
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    begin = time.perf_counter()
    for _ in range(_FEWEST):
        once()
    count = int(seconds * _FEWEST / slowest(ranks, time.perf_counter() - begin))
    times = np.array([once() for _ in range(min(max(count, _FEWEST), _MOST))])
    return float(np.median(ranks.all_gather(times).max(axis=0)))
