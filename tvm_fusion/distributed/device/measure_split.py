# SPDX-License-Identifier: Apache-2.0
"""Measured times of a function's rows on the CPU and on devices, of which a split is chosen."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import s_tir, tirx

from schedules.distribute.device.split import MeasuredRows, MeasuredSplit, split_rows
from schedules.distribute.distribute import distribute

from ...errors import InvalidInputError
from .device import Device

if TYPE_CHECKING:
    from ..local_program import Beside, LocalProgram

_LEAST_SECONDS = 0.2  # of one measurement, about
_LEAST_RUNS = 3


def measure_split(
    source: tirx.PrimFunc | s_tir.Schedule, devices: Sequence[str | Device], **options: Any
) -> MeasuredSplit:
    """Measure the CPU and each device of this machine by themselves, then together.

    By themselves on half of the rows and all. Where together they take longer than the faster one
    alone, such as an OpenCL device that is this CPU, the split gives it all rows.

    Parameters
    ----------
    source : tirx.PrimFunc or s_tir.Schedule
        The function.
    devices : Sequence[str or Device]
        As of :func:`tvm_fusion.distributed.compile`.
    **options
        Others of that function, such as ``target``, ``loop``, ``schedule`` and ``threads``.

    Returns
    -------
    MeasuredSplit
        For ``compile(..., split=...)``, also with ranks, whose parts are shorter. By how much one
        slows down the other where both run is not in it.

    Raises
    ------
    InvalidInputError
        If the function has too few rows to measure.
    TargetError
        If a device is not there.
    """
    from ..program import compile

    extent = distribute(source, options.get("loop", 0), 1).nest.extents[0]
    if extent < 2:
        raise InvalidInputError(f"a loop of {extent} rows cannot be measured; expected at least 2")

    def measured(*rows: int, together: bool = False) -> list[float]:
        local = compile(source, 1, devices=devices, split=rows, **options).alone()
        return _measure(local, together)

    half = extent // 2
    points: list[list[tuple[int, float]]] = [[] for _ in range(len(devices) + 1)]
    for number in range(len(devices)):
        for left in (half, 0):
            rows = [left, *(0 for _ in devices)]
            rows[number + 1] = extent - left
            times = iter(measured(*rows))
            for place in (place for place, count in enumerate(rows) if count):
                points[place].append((rows[place], next(times)))
    points[0].append((extent, measured(extent, *(0 for _ in devices))[0]))
    lines = [MeasuredRows.through(few[0], few[-1]) for few in map(sorted, points)]
    chosen = split_rows(extent, lines)
    best = min(lines, key=lambda line: line(extent))
    if sum(map(bool, chosen)) > 1 and measured(*chosen, together=True)[0] >= best(extent):
        lines = [line if line is best else MeasuredRows(math.inf, line.a_row) for line in lines]
    return MeasuredSplit(lines[0], tuple(lines[1:]))


def _measure(local: LocalProgram, together: bool) -> list[float]:
    """Seconds of the CPU's pieces, if it has any, then of each device that has rows; or of all."""
    for buffer in local.plan.nest.inputs:
        held = local.input(buffer.name).window.array
        held[...] = np.random.default_rng(0).integers(0, 2, held.shape)

    def run(devices: Sequence[Beside], first: bool = False, cpu: bool = False) -> None:
        for device in devices:
            device.start(local.buffers, first, last=False)
        if cpu:
            local.run_pieces()
        for device in devices:
            device.finish()

    run(local.devices, first=True)
    if together:
        return [_median(lambda: run(local.devices, cpu=True))]
    found = [_median(local.run_pieces)] if local.has_pieces else []
    return [*found, *(_median(functools.partial(run, [device])) for device in local.devices)]


def _median(call: Callable[[], object]) -> float:
    """Median of some runs, after one that prepares."""
    call()
    times: list[float] = []
    while len(times) < _LEAST_RUNS or sum(times) < _LEAST_SECONDS:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
