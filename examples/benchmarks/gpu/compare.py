# SPDX-License-Identifier: Apache-2.0
"""Race of all engines on one case: prepare, check, warm up, time in turns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.benchmarks.reduction_cases import Case
from tvm_fusion.errors import EngineError

from .clock import Clock
from .engine import Engine, Launcher, Sets, module
from .protocol import (
    SHORT,
    Plan,
    Rotation,
    Summary,
    Verdict,
    interleave,
    reason,
    rotation,
    same_bits,
    warm_up,
)
from .reference import as_torch, deviation, make_inputs


@dataclass(frozen=True)
class Trial:
    """Common task of all engines, on the same inputs.

    Parameters
    ----------
    case : Any
        The case that they prepare.
    sets : Sets
        The inputs.
    judge : Callable
        Function from an engine's outputs on the first set to their error in units of what is
        allowed, and the largest error allowed.
    turns : Rotation
        Turns of the sets.
    graphs : bool | None
        Whether graphs are captured; by default if a launch is short.
    """

    case: Any
    sets: Sets
    judge: Callable[[Sequence[Any]], tuple[float, float]]
    turns: Rotation
    graphs: bool | None = None


@dataclass
class Contender:
    """Engine with correct results on a case."""

    engine: Engine
    launcher: Launcher
    verdict: Verdict
    seconds: float
    """Rough seconds of one launch, including the launch itself."""


def compare(
    case: Case, engines: Sequence[Engine], clock: Clock, plan: Plan, seed: int = 0
) -> list[Verdict]:
    """Measure a case; one verdict for each engine, in their order.

    An engine whose result is wrong is not timed.

    Raises
    ------
    ValueError
        If the inputs do not fit on the device.
    """
    clear(engines, clock)
    turns = rotation(case.input_bytes, clock.cache_bytes, clock.memory_bytes)
    sets = [make_inputs(case, seed + number, clock.device) for number in range(turns.sets)]
    trial = Trial(case, sets, lambda outputs: deviation(case, sets[0], outputs), turns)
    return race(trial, engines, clock, plan)


def clear(engines: Sequence[Engine], clock: Clock) -> None:
    """Release memory of earlier cases."""
    for engine in engines:
        if not presence(engine):
            engine.release()
    clock.release()


def race(trial: Trial, engines: Sequence[Engine], clock: Clock, plan: Plan) -> list[Verdict]:
    """Prepare, check, warm up and time; one verdict for each engine, in their order."""
    verdicts = [Verdict(engine.title) for engine in engines]
    contenders = []
    for engine, verdict in zip(engines, verdicts, strict=True):
        try:
            with clock.scope(engine):
                contender = _prepare(trial, engine, clock, plan, verdict)
            contenders.append(contender)
        except Exception as error:  # engines are foreign code: any failure is a result
            verdict.problem = reason(error)
    short = bool(contenders) and min(item.seconds for item in contenders) < SHORT
    graphs = short if trial.graphs is None else trial.graphs
    _time_device(contenders, clock, plan, trial.turns, graphs)
    if graphs:
        _time_stream(contenders, clock, plan, trial.turns)
        _time_host(contenders, clock, plan)
    return verdicts


def presence(engine: Engine) -> str:
    """Reason why an engine cannot run here; an empty text if it can."""
    try:
        engine.check()
    except EngineError as error:
        return str(error)
    return ""


def _prepare(trial: Trial, engine: Engine, clock: Clock, plan: Plan, verdict: Verdict) -> Contender:
    """Compile, check the numbers, check repeatability, warm up."""
    engine.check()
    launcher = engine.prepare(trial.case, trial.sets)
    verdict.details = launcher.details
    outputs = launcher.launch(0)
    clock.wait()
    verdict.error, verdict.bound = trial.judge(outputs)
    clock.release()  # float64 references are large
    if not verdict.error <= 1:
        raise EngineError(f"wrong: off by {verdict.error:.3g} times what is allowed")
    if launcher.repeatable:
        prints = []
        for _ in range(plan.repeats):
            outputs = launcher.launch(0)
            clock.wait()
            prints.append(fingerprint(outputs))
        verdict.repeatable = same_bits(prints)

    def run() -> None:
        launcher.launch(0)
        clock.wait()

    return Contender(engine, launcher, verdict, warm_up(run, clock.now, plan.warmup_seconds))


def fingerprint(outputs: Sequence[Any]) -> bytes:
    """A digest of the outputs' bits."""
    digest = hashlib.sha256()
    for output in outputs:
        bits = as_torch(output).contiguous().flatten().view(module("torch").uint8)
        digest.update(bits.cpu().numpy())
    return digest.digest()


def _time_device(
    contenders: Sequence[Contender], clock: Clock, plan: Plan, turns: Rotation, short: bool
) -> None:
    """Device time; short cases from graphs where the engine can be captured."""
    samplers: dict[str, Callable[[], float]] = {}
    for contender in contenders:
        title, launcher = contender.engine.title, contender.launcher
        try:
            with clock.scope(contender.engine):
                sampler, how = _captured_sampler(launcher, clock, turns, short)
            contender.verdict.how = how
            samplers[title] = _scoped(sampler, contender.engine, clock)
        except Exception as error:  # An engine may raise anything.
            contender.verdict.problem = reason(error)
    _take(contenders, samplers, plan, "device")


def _captured_sampler(
    launcher: Launcher, clock: Clock, turns: Rotation, short: bool
) -> tuple[Callable[[], float], str]:
    """Sampler from a graph, tried once; without a graph if none can be captured."""
    if short and launcher.capturable and launcher.all_sets is None:
        try:
            sampler, how = _sampler(launcher, clock, turns, short)
            sampler()  # the first replay uploads the graph
            return sampler, how
        except Exception as error:  # A wait for the device in the middle is an error, for instance.
            launcher.capturable = False
            launcher.details["no graph"] = reason(error)
    sampler, how = _sampler(launcher, clock, turns, short)
    sampler()
    return sampler, how


def _sampler(
    launcher: Launcher, clock: Clock, turns: Rotation, short: bool
) -> tuple[Callable[[], float], str]:
    """Sampler of the seconds of a launch, and its method."""
    if launcher.all_sets is not None:
        return _ready_sampler(launcher.all_sets, clock, turns), "ready"
    count = turns.launches if short else 1
    order = [number % turns.sets for number in range(count)]
    position = 0

    def launch_all() -> list[Any]:
        return [launcher.launch(number) for number in order]

    def launch_next() -> object:
        nonlocal position
        position = (position + 1) % turns.sets
        return launcher.launch(position)

    captured = short and launcher.capturable
    work = clock.capture(launch_all) if captured else launch_all if short else launch_next

    def sample() -> float:
        # The device is busy until the host has queued the work: no launch gap is timed.
        clock.flush()
        return clock.seconds(work) / count

    return sample, "graph" if captured else "events"


def _ready_sampler(
    all_sets: Callable[[], object], clock: Clock, turns: Rotation
) -> Callable[[], float]:
    def sample() -> float:
        if turns.flush:
            clock.flush()
        clock.wait()
        start = clock.now()
        all_sets()
        return (clock.now() - start) / turns.sets

    return sample


def _time_stream(
    contenders: Sequence[Contender], clock: Clock, plan: Plan, turns: Rotation
) -> None:
    """Device time without graphs, of the engines that had one."""

    def sampler(launcher: Launcher) -> Callable[[], float]:
        def launch_all() -> list[Any]:
            return [launcher.launch(number % turns.sets) for number in range(turns.launches)]

        def sample() -> float:
            clock.flush()
            return clock.seconds(launch_all) / turns.launches

        return sample

    samplers = {
        item.engine.title: _scoped(sampler(item.launcher), item.engine, clock)
        for item in contenders
        if item.verdict.how == "graph" and not item.verdict.problem
    }
    _take(contenders, samplers, plan, "stream")


def _time_host(contenders: Sequence[Contender], clock: Clock, plan: Plan) -> None:
    """Seconds that a caller waits for one result on an idle device."""

    def waiter(launcher: Launcher) -> Callable[[], float]:
        def sample() -> float:
            clock.wait()
            start = clock.now()
            launcher.launch(0)
            clock.wait()
            return clock.now() - start

        return sample

    samplers = {
        item.engine.title: _scoped(waiter(item.launcher), item.engine, clock)
        for item in contenders
        if not item.verdict.problem
    }
    _take(contenders, samplers, plan, "host")


def _take(
    contenders: Sequence[Contender],
    samplers: Mapping[str, Callable[[], float]],
    plan: Plan,
    field: str,
) -> None:
    """Sample in turns, and store the summaries in a field of the verdicts."""
    taken, failed = interleave(samplers, plan.samples)
    for contender in contenders:
        title = contender.engine.title
        if title in taken:
            setattr(contender.verdict, field, Summary.of(taken[title]))
        elif title in failed:
            contender.verdict.problem = failed[title]


def _scoped(sample: Callable[[], float], engine: Engine, clock: Clock) -> Callable[[], float]:
    def scoped() -> float:
        with clock.scope(engine):
            return sample()

    return scoped
