# SPDX-License-Identifier: Apache-2.0
"""Calibration of a CPU: what was measured stays in the machine's file, and is not measured again.

Beside the figures the file holds ``samples``, a list of the kernels that were timed; the figures
are computed from all of them whenever one is added.
"""

from __future__ import annotations

import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from schedules.cost.cpu_kernels import (
    COPY,
    LEVELS,
    PREFIX,
    TERMS,
    bare_seconds,
    family,
    level_of,
    terms,
)
from schedules.cost.kernel_call import KernelCall
from schedules.cost.machine import Figure, Machine, machine_from_json, read_json
from schedules.cpu.core.machine import CPUInfo

from ...bench.machine_limits import MachineLimits, measure_limits
from ...errors import PredictionError
from ...machine.host import cpu_name
from ...paths import written_aside
from ..machines import cpu_target, native_name
from .cases import Case, cases
from .library_cases import LibraryCase, library_cases
from .timing import KernelTimer, Timed

NARROWEST = 1.15
"""Least ratio of an interval's end to the prediction: in a network kernels vary more than alone."""
ENDS = (10, 90)
FEWEST = 4
"""Measured sizes below which nothing is left out."""
UNKNOWN = (0.5, 2.0)
"""Interval of so few."""

Progress = Callable[[str, int, int], None]
AnyCase = Case | LibraryCase
EAGER = "overhead.eager"
"""Figure of what PyTorch's modules add to an operator."""
OURS = "cpu."
"""Prefix of our kernels' operators; others are PyTorch's."""
_KIND = "file of a calibration"
_MAX_FILE_BYTES = 4 << 20  # The limit of machines, as which it is read, too.
SETTLED_GAIN = 1.05
"""Gain of a figure below which a measurement of the limits counts as no better."""
SHORTEST = 1e-6
"""Seconds below which a kernel counts for no figure: its call takes as long."""
ROUNDS = 3
"""Attempts at a kernel."""
LIMIT_ROUNDS = 8
"""Most measurements of the limits; the best of each figure counts, of memory the median."""
SETTLED = 2
"""Measurements of the limits that improve no figure, after which they are known."""
UNDISTURBED = 0.93
"""Share of the peak that the machine must reach before and after a kernel is measured."""
PAUSE = 1.0
"""Seconds between two looks at a machine that other work slows."""


class Timer(Protocol):
    """Protocol of whatever measures: :class:`.KernelTimer`, or a test's."""

    def measure(self, case: AnyCase) -> list[Timed]:
        """Time all kernels of a case."""

    def eager(self) -> float:
        """Seconds that PyTorch's modules add to an operator."""

    def overheads(self) -> dict[str, float]:
        """Seconds of ``fork``, ``call`` and ``run``."""

    def peak(self) -> float:
        """Floating-point operations a second at this moment."""

    def exchange(self) -> float | None:
        """Seconds of a byte that another core has just written; None for a single thread."""


def calibrate(
    output: Path,
    threads: int,
    budget: float,
    progress: Progress | None = None,
    *,
    limits: Callable[[], Machine] | None = None,
    timer: Callable[[Machine], Timer] | None = None,
    todo: Sequence[AnyCase] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Machine:
    """Measure this CPU until all is known or the budget is spent; the file is written on the way.

    Parameters
    ----------
    output : Path
        The machine's file; one of this CPU and so many threads is completed.
    threads : int
        Threads of a kernel.
    budget : float
        Seconds after which no other kernel is begun, spent waiting while other work slows the
        machine.
    progress : callable, optional
        Called as ``progress(text, done, total)``.
    limits, timer, todo, clock, sleep : optional
        What measures, what is measured, the clock of the budget, and how to wait.

    Returns
    -------
    Machine

    Raises
    ------
    PredictionError
        If the file is of another machine, or cannot be read.
    """
    tell = progress or (lambda text, done, total: None)
    end = clock() + budget
    bare, samples = _read(output, threads)
    todo = all_cases() if todo is None else todo
    tell("limits of this machine", 0, len(todo))
    if bare is None:
        bare = (limits or (lambda: measured_limits(threads)))()
    used = (timer or _timer)(bare)
    if "overhead.call" not in bare.figures:
        bare = _with(bare, {f"overhead.{name}": one for name, one in used.overheads().items()})
        _write(output, bare, samples)
        used = (timer or _timer)(bare)
    if "bandwidth.exchange" not in bare.figures and (passed := used.exchange()) is not None:
        bare = _with(bare, {"bandwidth.exchange": 1 / passed})
        _write(output, bare, samples)
    asks_torch = any(isinstance(case, LibraryCase) for case in todo)
    if asks_torch and EAGER not in bare.figures and clock() < end:
        bare = _with(bare, {EAGER: used.eager()})
        _write(output, bare, samples)
    known = {sample["case"] for sample in samples}
    for number, case in enumerate(todo):
        if case.name in known:
            continue
        if clock() >= end:
            break
        while not (is_quiet := _at_peak(used, bare)) and clock() < end:
            tell("waiting for other work to end", number, len(todo))
            sleep(PAUSE)
        if not is_quiet:
            break
        tell(case.name, number, len(todo))
        timed = _undisturbed(used, case, bare)
        if timed is not None:
            samples += [_sample(case, call, seconds) for call, seconds in timed]
            _write(output, bare, samples)
    tell("done", len(todo), len(todo))
    return fitted(bare, samples)


def _at_peak(timer: Timer, machine: Machine) -> bool:
    """Whether nothing slows the machine at this moment."""
    return timer.peak() >= UNDISTURBED * machine["peak_flops.float32"]


def _undisturbed(timer: Timer, case: AnyCase, machine: Machine) -> list[Timed] | None:
    """Times of a case while nothing else slowed the machine; None if something always did."""
    for _ in range(ROUNDS):
        was_quiet = _at_peak(timer, machine)
        timed = timer.measure(case)
        if was_quiet and _at_peak(timer, machine):
            return timed
    return None


def all_cases() -> list[AnyCase]:
    """Our kernels and those of PyTorch if it is installed, of each kind one after the other."""
    kinds: tuple[Sequence[AnyCase], ...] = (cases(), *library_cases())
    return [case for group in zip_longest(*kinds) for case in group if case is not None]


def missing(output: Path) -> int:
    """Cases that a file does not have yet."""
    data = read_json(output, _MAX_FILE_BYTES, _KIND)
    known = {sample["case"] for sample in data.get("samples", ())}
    return sum(case.name not in known for case in all_cases())


def measured_limits(threads: int) -> Machine:
    """Measure the peak, bandwidths and clock of this CPU."""
    bare = Machine(native_name(), "cpu", cpu_name(), {"multiprocessors": Figure(threads, "given")})
    target = cpu_target(bare)
    rounds = [measure_limits(target, threads)]
    best, settled = rounds[0], 0
    while len(rounds) < LIMIT_ROUNDS and settled < SETTLED:
        rounds.append(measure_limits(target, threads))
        better = best.best(rounds[-1])
        settled = settled + 1 if _gain(best, better) < SETTLED_GAIN else 0
        best = better
    memory = statistics.median(one.levels[-1].bandwidth for one in rounds)  # others use it, too
    levels = (*best.levels[:-1], replace(best.levels[-1], bandwidth=memory))
    return _of_limits(bare, replace(best, levels=levels), CPUInfo.from_target(target))


def _gain(old: MachineLimits, new: MachineLimits) -> float:
    """Largest ratio of a figure to an older one, memory apart."""
    levels = zip(old.levels[:-1], new.levels[:-1], strict=True)
    ratios = [after.bandwidth / before.bandwidth for before, after in levels]
    return max(new.peak_flops / old.peak_flops, *ratios)


def _of_limits(bare: Machine, limits: MachineLimits, cpu: CPUInfo) -> Machine:
    per_cycle = 2 * limits.threads * cpu.lanes("float32") * cpu.fma_per_cycle
    figures = {
        "clock": limits.peak_flops / per_cycle,
        "peak_flops.float32": limits.peak_flops,
        "capacity.L1": cpu.l1d_bytes * limits.threads,
    }
    for level in limits.levels:
        figures[f"bandwidth.{level.name}"] = level.bandwidth
        if level.name != "memory":
            figures[f"capacity.{level.name}"] = level.capacity
    return _with(bare, figures)


def _timer(machine: Machine) -> KernelTimer:
    return KernelTimer(cpu_target(machine), machine)


def _with(machine: Machine, figures: Mapping[str, float], origin: str = "") -> Machine:
    origin = origin or f"measured: tvm-fusion calibrate, {datetime.date.today().isoformat()}"
    more = {name: Figure(float(value), origin) for name, value in figures.items()}
    return Machine(machine.name, machine.kind, machine.title, {**machine.figures, **more})


def fitted(bare: Machine, samples: Sequence[Mapping[str, Any]]) -> Machine:
    """The machine with the figures that its samples give: copies, and ratios of each operator."""
    calls = [(_call(sample), float(sample["seconds"])) for sample in samples]
    origin = f"fitted: tvm-fusion calibrate, {len(samples)} kernels"
    machine = _with(bare, _copies(bare, calls), origin)
    ratios: dict[str, list[float]] = {}
    for call, seconds in calls:
        if seconds < SHORTEST or not call.op.startswith(OURS):
            continue
        ratios.setdefault(call.op, []).append(seconds / bare_seconds(call, machine))
    figures: dict[str, float] = {}
    for op, found in ratios.items():
        factor = statistics.median(found)
        low, high = np.percentile(found, [10, 90]) / factor
        figures[f"{op}.factor"] = factor
        figures[f"{op}.low"] = min(float(low), 1 / NARROWEST)
        figures[f"{op}.high"] = max(float(high), NARROWEST)
    library = [(call, seconds) for call, seconds in calls if not call.op.startswith(OURS)]
    figures |= library_figures(machine, library)
    return _with(machine, figures, origin)


def _copies(machine: Machine, calls: Iterable[tuple[KernelCall, float]]) -> dict[str, float]:
    """Bandwidth of copies in each level, of additions of two tensors."""
    rates: dict[str, list[float]] = {}
    for call, seconds in calls:
        if call.op != "cpu.elementwise" or seconds < SHORTEST:
            continue
        if call.flops and not call.sizes["functions"]:
            fork = machine.get("overhead.fork", 0.0) if call.sizes["parallel"] else 0.0
            moving = max(seconds - fork, seconds / 2)
            level = level_of(call.moved_bytes, machine)
            rates.setdefault(level, []).append(call.moved_bytes / moving)
    medians = {level: statistics.median(rates[level]) for level in LEVELS if level in rates}
    nearest = next(iter(medians.values()), 0.0)
    for level in LEVELS:  # no farther level is faster
        if level in medians:
            nearest = medians[level] = min(nearest, medians[level])
        elif nearest:
            nearest = medians[level] = min(nearest, COPY * machine[f"bandwidth.{level}"])
    return {f"bandwidth.copy.{level}": rate for level, rate in medians.items()}


def _sample(case: AnyCase, call: KernelCall, seconds: float) -> dict[str, Any]:
    return {
        "case": case.name,
        "op": call.op,
        "sizes": dict(call.sizes),
        "dtype": call.dtype,
        "flops": call.flops,
        "read_bytes": call.read_bytes,
        "written_bytes": call.written_bytes,
        "seconds": seconds,
    }


def _call(sample: Mapping[str, Any]) -> KernelCall:
    names = ("op", "sizes", "dtype", "flops", "read_bytes", "written_bytes")
    return KernelCall(*(sample[name] for name in names))


def _read(output: Path, threads: int) -> tuple[Machine | None, list[dict[str, Any]]]:
    """Read a file: the machine as measured, without what is fitted, and the samples."""
    if not output.exists():
        return None, []
    try:
        data = read_json(output, _MAX_FILE_BYTES, _KIND)
        machine, samples = machine_from_json(data), list(data["samples"])
        for sample in samples:
            _check(sample)
    except (PredictionError, ValueError, KeyError, TypeError) as error:
        raise PredictionError(
            f"{output} is not a calibration file ({error}): name another one"
        ) from None
    if (machine.name, int(machine["multiprocessors"])) != (native_name(), threads):
        raise PredictionError(
            f"{output} is of {machine.name} with {machine['multiprocessors']:g} threads, and this "
            f"is {native_name()} with {threads}: name another file"
        )
    figures = {
        name: figure
        for name, figure in machine.figures.items()
        if not figure.origin.startswith("fitted")
    }
    return Machine(machine.name, machine.kind, machine.title, figures), samples


def _check(sample: Any) -> None:
    """Refuse samples that are no finite positive times of kernels."""
    call, seconds = _call(sample), float(sample["seconds"])
    counts = (call.flops, call.moved_bytes, *call.sizes.values())
    numbers = [seconds, *(count + 1 for count in counts)]
    if not str(sample["case"]) or not all(0 < number < float("inf") for number in numbers):
        raise ValueError(f"sample {sample.get('case')!r} has no finite positive numbers")


def _write(output: Path, bare: Machine, samples: Sequence[Mapping[str, Any]]) -> None:
    kept = {}
    if output.exists():  # curves of collectives
        data = read_json(output, _MAX_FILE_BYTES, _KIND)
        kept = {name: data[name] for name in ("format", "curves") if name in data}
    data = {**fitted(bare, samples).to_json(), "samples": list(samples), **kept}
    output.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(output, PredictionError) as aside:
        aside.write_text(json.dumps(data, indent=1))


def library_figures(
    machine: Machine, timed: Sequence[tuple[KernelCall, float]]
) -> dict[str, float]:
    """Fit each family of PyTorch's kernels: its three terms, their interval, and its most bytes."""
    families: dict[str, list[tuple[KernelCall, float]]] = {}
    for call, seconds in timed:
        families.setdefault(family(call), []).append((call, seconds))
    merged: dict[str, float] = {}
    for name, group in families.items():
        group.sort(key=lambda one: one[0].moved_bytes)
        rows = np.array([terms(call, machine) for call, _ in group])
        times = np.array([seconds for _, seconds in group])
        low, high = _interval(rows, times)
        figures = dict(zip(TERMS, _factors(rows, times).tolist(), strict=True))
        figures |= {"low": low, "high": high}
        figures["most"] = max(call.moved_bytes for call, _ in group)
        merged |= {f"{PREFIX}.{name}.{key}": one for key, one in figures.items() if one > 0}
    return merged


def _factors(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Factors of three terms, none negative, with the least squares of relative errors."""
    from scipy.optimize import nnls  # SciPy is in the extra torch, as PyTorch's kernels are.

    return nnls(rows / seconds[:, None], np.ones(len(seconds)))[0]


def _interval(rows: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Percentiles of measured over predicted times, each but the first and last by the others."""
    ratios = []
    for left_out in range(1, len(seconds) - 1) if len(seconds) >= FEWEST else ():
        others = np.arange(len(seconds)) != left_out
        predicted = rows[left_out] @ _factors(rows[others], seconds[others])
        ratios.append(seconds[left_out] / max(float(predicted), 1e-9))
    low, high = np.percentile(ratios, ENDS) if ratios else UNKNOWN
    return min(float(low), 1 / NARROWEST), max(float(high), NARROWEST)
