# SPDX-License-Identifier: Apache-2.0
"""Measured times of a function's rows on the CPU and on devices, of which a split is chosen."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import s_tir, tirx

from schedules.distribute.device.split import MeasuredRows, MeasuredSplit
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
    """Measure the CPU and each device of this machine by themselves, on half of the rows and all.

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
        For ``compile(..., split=...)``, also with ranks, whose parts are shorter. That one slows
        down the other where both run is not in it.

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

    def measured(*rows: int) -> list[float]:
        return _measure(compile(source, 1, devices=devices, split=rows, **options).alone())

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
    cpu, *others = (MeasuredRows.through(few[0], few[-1]) for few in map(sorted, points))
    return MeasuredSplit(cpu, tuple(others))


def _measure(local: LocalProgram) -> list[float]:
    """Seconds of the CPU's pieces, if it has any, then of each device that has rows."""
    for buffer in local.plan.nest.inputs:
        held = local.input(buffer.name).window.array
        held[...] = np.random.default_rng(0).integers(0, 2, held.shape)
    found = [_median(local.run_pieces)] if local.has_pieces else []

    def run(device: Beside, first: bool = False) -> None:
        device.start(local.buffers, first, last=False)
        device.finish()

    for device in local.devices:
        run(device, first=True)
    return [*found, *(_median(functools.partial(run, device)) for device in local.devices)]


def _median(call: Callable[[], object]) -> float:
    """Median of some runs, after one that prepares."""
    call()
    times: list[float] = []
    while len(times) < _LEAST_RUNS or sum(times) < _LEAST_SECONDS:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
