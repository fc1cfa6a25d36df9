# SPDX-License-Identifier: Apache-2.0
"""Measured times of a function's rows on the CPU and on devices, of which a split is chosen."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from schedules.distribute.split import MeasuredRows, MeasuredSplit, split_rows

if TYPE_CHECKING:
    from ..local_program import Beside, LocalProgram

_LEAST_SECONDS = 0.3  # Seconds of one measurement, about.
_LEAST_TURNS = 5
_RUNS = 3  # Runs of a turn.
_SLOWER = (0.75, 0.87, 1.0, 1.15)
"""Times of devices beside the CPU, compared to it, as multiples of those by themselves."""


def measured_split(
    extent: int,  # Rows of the function, at least 2.
    devices: int,
    # Makes the program that gives so many rows to the CPU and to each device.
    program: Callable[[Sequence[int]], LocalProgram],
) -> MeasuredSplit:
    """Measure the CPU and the devices by themselves, then together: see :func:`.measure_split`."""
    lines = _lines_alone(extent, devices, program)
    best = min(range(len(lines)), key=lambda number: lines[number](extent))
    alone = [extent if number == best else 0 for number in range(len(lines))]
    candidates = [_slowed(lines, factor) for factor in _SLOWER]
    candidates = [each for each in candidates if sum(map(bool, split_rows(extent, each))) > 1]
    if candidates:
        cuts = [*(split_rows(extent, each) for each in candidates), alone]
        *together, by_itself = _seconds_together([program(rows) for rows in cuts])
        lines = candidates[together.index(min(together))]
        if by_itself <= min(together):
            lines = [
                line if number == best else MeasuredRows(math.inf, line.a_row)
                for number, line in enumerate(lines)
            ]
    return MeasuredSplit(lines[0], tuple(lines[1:]))


def _lines_alone(
    extent: int, devices: int, program: Callable[[Sequence[int]], LocalProgram]
) -> list[MeasuredRows]:
    """Times of the CPU and of each device while the others rest."""
    cuts = [[extent, *(0 for _ in range(devices))]]
    for number in range(devices):
        for left in (extent // 2, 0):
            cuts.append([left, *(0 for _ in range(devices))])
            cuts[-1][number + 1] = extent - left
    points: list[list[tuple[int, float]]] = [[] for _ in range(devices + 1)]
    sides = [(place, rows[place]) for rows in cuts for place in range(len(rows)) if rows[place]]
    measured = _seconds_of_sides([program(rows) for rows in cuts])
    for (place, count), seconds in zip(sides, measured, strict=True):
        points[place].append((count, seconds))
    return [MeasuredRows.through(few[0], few[-1]) for few in map(sorted, points)]


def _slowed(lines: Sequence[MeasuredRows], factor: float) -> list[MeasuredRows]:
    """The lines with devices that take ``factor`` times as long."""
    cpu, *devices = lines
    return [cpu, *(MeasuredRows(factor * each.fixed, factor * each.a_row) for each in devices)]


def _seconds_of_sides(programs: Sequence[LocalProgram]) -> list[float]:
    """Seconds of each program's CPU, if it has rows, then of each of its devices that has some."""
    calls: list[Callable[[], object]] = []
    for local in programs:
        _prepare(local)
        calls += [local.run_steps] if local.has_pieces else []
        calls += [functools.partial(_run, local, [device]) for device in local.devices]
    return _in_turns(*calls)


def _seconds_together(programs: Sequence[LocalProgram]) -> list[float]:
    """Seconds of whole programs."""
    calls: list[Callable[[], object]] = []
    for local in programs:
        _prepare(local)
        calls.append(functools.partial(_run, local, local.devices, local.run_steps))
    return _in_turns(*calls)


def _prepare(local: LocalProgram) -> None:
    """Fill the inputs, here and on the devices."""
    for buffer in local.plan.nest.inputs:
        held = local.input(buffer.name).window.array
        held[...] = np.random.default_rng(0).integers(0, 2, held.shape)
    _run(local, local.devices, first=True)


def _run(
    local: LocalProgram,
    devices: Sequence[Beside],
    meanwhile: Callable[[], None] | None = None,
    first: bool = False,
) -> None:
    for device in devices:
        device.start(local.buffers, first, False, local.plan.deep)
    if meanwhile is not None:
        meanwhile()
    for device in devices:
        device.pass_on(local.buffers, last=False)
        device.finish()


def _in_turns(*calls: Callable[[], object]) -> list[float]:
    """Seconds of each call: its median ratio to the mean of a turn, times a fast turn's mean.

    What other work leaves of a machine changes from turn to turn, and within one for all calls.
    """
    times: list[list[float]] = [[] for _ in calls]
    least = _LEAST_SECONDS * len(calls) / _RUNS
    while len(times[0]) < _LEAST_TURNS or sum(map(sum, times)) < least:
        for call, found in zip(calls, times, strict=True):
            call()  # others had the caches, and the device slept
            begin = time.perf_counter()
            for _ in range(_RUNS):
                call()
            found.append((time.perf_counter() - begin) / _RUNS)
    seconds = np.array(times)
    means = np.exp(np.log(seconds).mean(axis=0))
    return list(np.quantile(means, 0.25) * np.median(seconds / means, axis=1))
