# SPDX-License-Identifier: Apache-2.0
"""Measurements: what fails is blamed, and nothing stops the others."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import s_tir, tirx
from tvm.script import tirx as T
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.tuning.records import Key
from schedules.tuning.template import Template
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import TuningError
from tvm_fusion.tuning.contest import Outcome
from tvm_fusion.tuning.measure import Session, library, writer
from tvm_fusion.tuning.tasks import Task
from tvm_fusion.tuning.worker import BEACON, Bench, Races

TARGET = resolve("native", cores=2)
MACHINE = CPUInfo.from_target(TARGET)
FAST, SLOW, WRONG, HANG, CRASH, REFUSED, LATE = range(7)
ROUNDS, SECONDS = (5, 9), 0.1


def scaled(factor: float, repeats: int) -> tirx.PrimFunc:
    """``out = data + factor * weight``, computed ``repeats`` times."""

    @T.prim_func(private=True)
    def func(
        data: T.Buffer((64, 64), "float32"),
        weight: T.Buffer((64, 64), "float32"),
        out: T.Buffer((64, 64), "float32"),
    ):
        for _ in range(repeats):
            for row in range(64):
                for column in range(64):
                    out[row, column] = data[row, column] + T.float32(factor) * weight[row, column]

    return func


def endless() -> tirx.PrimFunc:
    @T.prim_func(private=True)
    def func(
        data: T.Buffer((64, 64), "float32"),
        weight: T.Buffer((64, 64), "float32"),
        out: T.Buffer((64, 64), "float32"),
    ):
        for step in range(T.int64(1) << T.int64(50)):
            out[step % T.int64(64), 0] = (
                out[(step + T.int64(7)) % T.int64(64), 1] * T.float32(0.5)
                + data[0, 0] * weight[0, 0]
            )

    return func


def dying() -> tirx.PrimFunc:
    @T.prim_func(private=True)
    def func(
        data: T.Buffer((64, 64), "float32"),
        weight: T.Buffer((64, 64), "float32"),
        out: T.Buffer((64, 64), "float32"),
    ):
        T.evaluate(T.call_extern("int32", "abort"))
        out[0, 0] = data[0, 0] + weight[0, 0]

    return func


@dataclass(frozen=True)
class Mode:
    mode: int


class Fake(Template[str, Mode, CPUInfo]):
    """Every way to fail."""

    name, version, knobs = "fake", 1, Mode
    first = SLOW

    def read_workload(self, text: str) -> str:
        return text

    def describe(self, workload: str) -> str:
        return workload

    def default(self, workload: str, machine: CPUInfo) -> Mode:
        return Mode(self.first)

    def settings(self, workload: str, machine: CPUInfo) -> Iterable[Mode]:
        return [Mode(mode) for mode in range(7)]

    def cycles(self, workload: str, knobs: Mode, machine: CPUInfo) -> float:
        return 1.0

    def write(
        self, func: tirx.PrimFunc, workload: str, knobs: Mode, target: Target
    ) -> s_tir.Schedule:
        if knobs.mode == REFUSED:
            raise ValueError("this setting cannot be written")
        written = {
            FAST: lambda: scaled(2.0, 1),
            SLOW: lambda: scaled(2.0, 60),
            WRONG: lambda: scaled(2.01, 1),
            HANG: endless,
            CRASH: dying,
            LATE: lambda: scaled(2.0, 20),
        }[knobs.mode]()
        return s_tir.Schedule(tvm.IRModule({"main": written.with_attr("global_symbol", "main")}))


class Broken(Fake):
    first = WRONG


def task(template: Fake) -> Task:
    func = scaled(2.0, 1).with_attr("global_symbol", "main")
    key = Key("{}", MACHINE.family, MACHINE.vector_bits, 2)
    return Task("fake", "a task", key, func, (1,), "work", [template], MACHINE)


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(task(Fake()), TARGET, seed=0, patience=1.5) as found:
        yield found


def modes(session: Session, outcomes: dict) -> dict[int, object]:
    return {session.task.settings[number][1].mode: found for number, found in outcomes.items()}


@pytest.mark.slow
def test_hang_crash_wrong_numbers_and_refusals_stop_nothing(session: Session) -> None:
    outcomes, seconds = session.race(range(len(session.task.settings)), ROUNDS, SECONDS)
    found = modes(session, outcomes)
    failures = {mode: outcome.failure for mode, outcome in found.items()}
    assert failures == {
        FAST: "",
        SLOW: "",
        LATE: "",
        WRONG: "wrong",
        HANG: "hang",
        CRASH: "crash",
        REFUSED: "compile",
    }
    assert found[SLOW].ratio == 1.0
    assert found[FAST].ratio < found[LATE].ratio < 1.0
    assert seconds > 0
    assert "this setting cannot be written" in found[REFUSED].reason
    assert "SIGABRT" in found[CRASH].reason
    assert "relative error" in found[WRONG].reason
    assert "1.5 s" in found[HANG].reason


@pytest.mark.slow
def test_the_next_race_goes_on_after_failures(session: Session) -> None:
    numbers = {knobs.mode: number for number, (_, knobs) in enumerate(session.task.settings)}
    session.race([numbers[CRASH]], ROUNDS, SECONDS)
    outcomes, _ = session.race([numbers[FAST]], ROUNDS, SECONDS)
    assert outcomes[numbers[FAST]].ratio < 1


@pytest.mark.slow
def test_the_process_is_another_after_the_first_ended(session: Session) -> None:
    session.race([], ROUNDS, SECONDS)
    first = session._worker.pid
    session.end_worker()
    session.race([], ROUNDS, SECONDS)
    assert session._worker.pid != first


class Spoiled(Races[int]):
    """Candidates of which the second one computes wrong numbers from its third run on."""

    def load(self, about: Mapping[str, int], racers: int) -> int:
        return about["number"]

    def error_of(self, candidate: int) -> float:
        self.runs[candidate] += 1
        return float(candidate == 1 and self.runs[candidate] > 2)

    def seconds_of(self, candidate: int, state: int) -> float:
        self.runs[candidate] += 1
        return 1.0 + state


def test_numbers_are_compared_again_after_the_timing() -> None:
    races = Spoiled(mmap.mmap(-1, BEACON.size))
    races.runs = [0, 0]
    found = races.race([{"number": 0}, {"number": 1}], (3, 3), 0.0, seed=0)
    assert found["wrong"] == {"1": "relative error 1"}
    assert len(found["times"]) == 3


def test_rounds_meet_the_states_in_turn_and_are_compared_apart() -> None:
    races = Spoiled(mmap.mmap(-1, BEACON.size))
    races.runs, races.states = [0, 0], 2
    found = races.race([{"number": 0}], (4, 4), 0.0, seed=0)
    assert (found["times"], found["states"]) == ([[1.0], [2.0], [1.0], [2.0]], 2)
    outcome = Outcome.of_rounds([[1.0, 0.5], [4.0, 8.0], [2.0, 1.0], [1.0, 2.0]], 1, 2)
    assert outcome.states == (0.5, 2.0) and outcome.ratio == pytest.approx(1.0)


class Noting:
    """A candidate that notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[list[np.ndarray]] = []

    def steps(self, common):
        return [(lambda *given: self.calls.append([np.from_dlpack(one) for one in given]), common)]


def test_an_input_is_written_before_a_run_or_comes_from_memory(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.npy") for number in range(3)]
    for number, path in enumerate(paths):
        np.save(path, np.full((4, 8), number, "float32"))
    writes = str(library(writer([1, 4, 8], "float32", 2), TARGET, tmp_path / "writer.so"))
    reference = {"library": writes, "calls": [], "constants": [], "buffers": []}
    bench, noting = Bench(2, mmap.mmap(-1, BEACON.size)), Noting()
    bench.prepare(paths, [1], reference, writes, [1, 4, 8])
    written: list[int] = []
    bench._write = lambda planes: written.append(len(noting.calls))
    for state in (0, 1, 1, 0):
        bench.seconds_of(noting, state)
    assert written == [0, 3]
    data, weights, outputs = ([call[n].ctypes.data for call in noting.calls] for n in range(3))
    assert data[0] == data[3] == bench._arrays[0].ctypes.data
    assert len(set(data)) == 3 and len(set(weights)) == 4 and len(set(outputs)) == 1
    assert all((call[0] == 0).all() and (call[1] == 1).all() for call in noting.calls)


@pytest.mark.slow
def test_a_default_that_fails_is_an_error() -> None:
    with Session(task(Broken()), TARGET, seed=0) as session:
        with pytest.raises(TuningError, match=r"the default of fake failed \(wrong\): relative"):
            session.race([1], ROUNDS, SECONDS)
