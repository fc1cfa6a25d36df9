# SPDX-License-Identifier: Apache-2.0
"""How a kernel is timed, apart from any device: rotation, turns, medians, bandwidth.

Kernels below :data:`SHORT` seconds run from CUDA graphs over input sets that take turns, so that
neither launch gaps nor a warm cache are measured, and once more without a graph, with the gaps that
a caller pays there; longer ones run one by one. A flush of the cache
comes before every sample, and keeps the device busy while the host queues the work.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

SHORT = 100e-6
COLD_FACTOR = 4
"""Bytes that pass between two uses of an input, in sizes of the last-level cache."""
LAUNCHES = (20, 50)
"""The fewest and the most launches of one graph."""


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Parameters
    ----------
    samples : int
        Timings of each engine.
    warmup_seconds : float
        How long each engine runs before, at least.
    repeats : int
        Runs whose results must be the same bit by bit.
    """

    samples: int = 50
    warmup_seconds: float = 0.025
    repeats: int = 100

    def quick(self) -> Plan:
        """A shorter plan."""
        return replace(self, samples=15, repeats=10)


@dataclass(frozen=True)
class Rotation:
    """Input sets of a case.

    Parameters
    ----------
    sets : int
        How many are allocated.
    launches : int
        Of one graph; a multiple of ``sets``.
    flush : bool
        Whether the sets alone do not push each other out of the cache.
    """

    sets: int
    launches: int
    flush: bool


def rotation(input_bytes: int, cache_bytes: int, memory_bytes: int) -> Rotation:
    """Choose the input sets of a case.

    Raises
    ------
    ValueError
        If one set does not fit in ``memory_bytes``.
    """
    if input_bytes > memory_bytes:
        raise ValueError(
            f"inputs of {input_bytes / 1e9:.1f} GB do not fit in {memory_bytes / 1e9:.1f} GB"
        )
    fewest, most = LAUNCHES
    wanted = math.ceil(COLD_FACTOR * cache_bytes / max(1, input_bytes))
    sets = max(1, min(wanted, most, memory_bytes // max(1, input_bytes)))
    return Rotation(sets, sets * math.ceil(fewest / sets), sets < wanted)


@dataclass(frozen=True)
class Summary:
    """Seconds of one launch: the median and the quantiles around it."""

    median: float
    p20: float
    p80: float
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Summary:
        """Summarise samples, at least one."""
        return cls(
            statistics.median(seconds),
            quantile(seconds, 0.2),
            quantile(seconds, 0.8),
            len(seconds),
        )


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which ``fraction`` of the values are, interpolated."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass
class Verdict:
    """What became of one engine on one case.

    Parameters
    ----------
    engine : str
        Its title.
    problem : str
        Why there is no time: absent, not supported, wrong. Empty if all went well.
    how : str
        ``graph``, ``events`` or ``ready``: what the device time was taken with.
    device : Summary | None
        Device time of a launch.
    stream : Summary | None
        Device time of a launch among many that follow each other on a stream without a graph; short
        cases only.
    host : Summary | None
        From the call to the result, one launch on an idle device; short cases only.
    error, bound : float
        The largest deviation from float64 in units of what is allowed there is ``error``, so that 1
        is just allowed; ``bound`` is the largest absolute deviation allowed.
    repeatable : bool | None
        Whether all runs gave the same bits; None where that was not promised.
    details : dict
        What else the engine tells of itself.
    """

    engine: str
    problem: str = ""
    how: str = ""
    device: Summary | None = None
    stream: Summary | None = None
    host: Summary | None = None
    error: float = math.nan
    bound: float = math.nan
    repeatable: bool | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def bandwidth(self, moved: int) -> float:
        """Compulsory bytes a second; nan without a time."""
        return moved / self.device.median if self.device else math.nan


def warm_up(run: Callable[[], object], now: Callable[[], float], seconds: float) -> float:
    """Run for at least ``seconds``; returns the seconds of one run, the first ones left out.

    ``run`` must return only when the device has finished.
    """
    run()
    start = now()
    count = 0
    while now() - start < seconds or count == 0:
        run()
        count += 1
    return (now() - start) / count


def interleave(
    turns: Mapping[str, Callable[[], float]], samples: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Let engines take turns; the first of a round is another one each time.

    An engine that raises is left out from then on.

    Returns
    -------
    tuple[dict[str, list[float]], dict[str, str]]
        Samples of each engine that went through, and what the others raised.
    """
    taken: dict[str, list[float]] = {name: [] for name in turns}
    failed: dict[str, str] = {}
    names = list(turns)
    for number in range(samples):
        start = number % max(1, len(names))
        for name in names[start:] + names[:start]:
            if name in failed:
                continue
            try:
                taken[name].append(turns[name]())
            except Exception as error:  # engines are others' code: any failure is a finding
                failed[name] = reason(error)
    return {name: times for name, times in taken.items() if name not in failed}, failed


def reason(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def same_bits(results: Sequence[bytes]) -> bool:
    """Whether all results are the same, bit by bit."""
    return all(result == results[0] for result in results)
