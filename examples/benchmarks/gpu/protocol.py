# SPDX-License-Identifier: Apache-2.0
"""Timing of a kernel, independent of the device: rotation, turns, medians, bandwidth.

Kernels below :data:`SHORT` seconds run from CUDA graphs over alternating input sets, so that
neither launch gaps nor a warm cache are measured, and again without a graph, with launch gaps;
longer ones run one by one. The cache is flushed before every sample, which keeps the device busy
while the host queues the work.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

SHORT = 100e-6
COLD_FACTOR = 4
"""Bytes accessed between two uses of an input, in multiples of the last-level cache."""
LAUNCHES = (20, 50)
"""The fewest and the most launches of one graph."""


@dataclass(frozen=True)
class Plan:
    """Length of a measurement.

    Parameters
    ----------
    samples : int
        Timings of each engine.
    warmup_seconds : float
        Least seconds that each engine runs before.
    repeats : int
        Runs whose results must be bitwise equal.
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
        Number of allocated sets.
    launches : int
        Launches of one graph; a multiple of ``sets``.
    flush : bool
        Whether the sets do not evict each other from the cache by themselves.
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
    """Result of one engine on one case.

    Parameters
    ----------
    engine : str
        Its title.
    problem : str
        Reason why there is no time: absent, not supported, wrong. Empty if there is none.
    how : str
        ``graph``, ``events`` or ``ready``: method of the device time.
    device : Summary | None
        Device time of a launch.
    stream : Summary | None
        Device time of a launch among many that follow each other on a stream without a graph; short
        cases only.
    host : Summary | None
        Time from the call to the result, one launch on an idle device; short cases only.
    error, bound : float
        ``error`` is the largest deviation from float64 in units of the tolerance there; ``bound``
        is the largest absolute tolerance.
    repeatable : bool | None
        Whether all runs gave the same bits; None where that was not promised.
    details : dict
        Further facts about the engine.
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
    """Run engines in turns; each round begins with another one.

    An engine that raises is left out from then on.

    Returns
    -------
    tuple[dict[str, list[float]], dict[str, str]]
        Samples of each engine without an error, and the errors of the others.
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
            except Exception as error:  # engines are foreign code: any failure is a result
                failed[name] = reason(error)
    return {name: times for name, times in taken.items() if name not in failed}, failed


def reason(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def same_bits(results: Sequence[bytes]) -> bool:
    """Return whether all results are bitwise equal."""
    return all(result == results[0] for result in results)
