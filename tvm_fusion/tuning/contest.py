# SPDX-License-Identifier: Apache-2.0
"""Races of candidates against the default, in a process that is replaced when one kills it.

Nothing here builds anything: TVM's compiler is not imported, so that candidates that were compiled
elsewhere can race where there is none.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import select
import statistics
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import TuningError
from ..machine.host import how_it_ended
from .database import measuring
from .worker import BEACON, REFERENCE

BATCH_ROUNDS, BATCH_SECONDS = (8, 60), 0.4
FINAL_ROUNDS, FINAL_SECONDS = (16, 400), 2.0
LEAST_GAIN = 0.01
"""Gain in the second race below which the default stays, and expected gain that ends a search."""
MOST_LOSS = 0.01
"""Loss in one state of the caches above which a setting does not win."""
FINALISTS = 8
"""Settings that meet again: the first race orders those that differ by less than 2 % by chance."""
PATIENCE = 10.0
"""Seconds without a new call after which a candidate counts as hanging."""
REFERENCE_PATIENCE = 300.0
ROOT = Path(__file__).resolve().parents[2]
# TVM's runtime imports PyTorch where it finds it, which would be most of a measuring process.
_BOOT = (
    "import runpy, sys; sys.modules['torch'] = None; "
    "sys.path[:1] = [sys.argv.pop(1)]; runpy.run_module({!r}, run_name={!r})"
)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a setting's measurement."""

    ratio: float | None
    """Its time over that of the default, the geometric mean of ``states``; None for a failure."""
    failure: str = ""  # ``compile``, ``hang``, ``crash`` or ``wrong``; empty otherwise.
    reason: str = ""  # Why it failed.
    states: tuple[float, ...] = ()  # The ratio in each state of the caches, median over its rounds.

    @classmethod
    def of_rounds(cls, rounds: Sequence[Sequence[Any]], position: int, states: int) -> Outcome:
        """Compare the candidate at ``position`` with the one at 0, round by round."""
        ratios = [turn[position] / turn[0] for turn in rounds]
        found = tuple(statistics.median(ratios[state::states]) for state in range(states))
        return cls(statistics.geometric_mean(found), states=found)


class LostWorker(Exception):
    """A measuring process that hangs or died while a candidate ran."""

    def __init__(self, candidate: int, failure: str, reason: str) -> None:
        super().__init__(reason)
        self.candidate, self.failure, self.reason = candidate, failure, reason


class Worker(Protocol):
    """A measuring process, here or elsewhere."""

    def call(self, patience: float, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer; the machine measures nothing else."""

    def close(self) -> None:
        """End the process."""


class MeasuringWorker:
    """A measuring process on this machine.

    Parameters
    ----------
    threads : int
        Threads of a kernel.
    folder : Path
        Folder for its files.
    device : str
        Kind of the GPU on which kernels run; empty for the CPU.
    """

    def __init__(self, threads: int, folder: Path, device: str = "") -> None:
        self._log = tempfile.TemporaryFile()
        self._beacon_file = tempfile.NamedTemporaryFile(dir=folder)
        self._beacon_file.truncate(BEACON.size)
        self._beacon = mmap.mmap(self._beacon_file.fileno(), BEACON.size)
        self._answers, theirs = os.pipe()
        module = "gpu_worker" if device else "worker"
        boot = _BOOT.format(f"{__package__}.{module}", "__main__")
        command = [sys.executable, "-c", boot, str(ROOT), str(theirs)]
        self._process = subprocess.Popen(
            [*command, self._beacon_file.name, device or str(threads)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TVM_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs],
            start_new_session=True,  # Ctrl-C is for the parent
        )
        os.close(theirs)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def call(self, patience: float, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer, while no other job measures on this machine.

        Raises
        ------
        LostWorker
            If the process dies, or begins no new call for ``patience`` seconds.
        """
        with measuring():
            return self._call(patience, request)

    def _call(self, patience: float, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        text, seen = b"", self._position()
        while not text.endswith(b"\n"):
            if select.select([self._answers], [], [], patience)[0]:
                piece = os.read(self._answers, 1 << 16)
                if not piece:
                    reason = ": ".join(filter(None, how_it_ended(self._process, self._log)))
                    raise LostWorker(self._position()[0], "crash", reason)
                text += piece
                continue
            if self._position() == seen:
                raise LostWorker(seen[0], "hang", f"no answer for {patience:g} s")
            seen = self._position()
        return json.loads(text)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._answers)
        self._beacon.close()
        self._beacon_file.close()
        self._log.close()

    def _position(self) -> tuple[int, int]:
        return BEACON.unpack(self._beacon[: BEACON.size])


class Contest(ABC):
    """Races of candidates by their numbers; the default is number 0.

    Parameters
    ----------
    name : str
        Name in messages.
    seed : int
        Seed of the order of turns.
    patience : float
        Seconds after which a candidate counts as hanging.
    """

    def __init__(self, name: str, seed: int, patience: float = PATIENCE) -> None:
        self.name, self.seed, self.patience = name, seed, patience
        self._worker: Worker | None = None
        self._races = 0

    @abstractmethod
    def start(self) -> Worker:
        """Start a process with the task's tensors and reference."""

    @abstractmethod
    def about(self, number: int) -> dict[str, Any]:
        """Describe a candidate to the process."""

    def end_worker(self) -> None:
        """End the process; the next race begins in a fresh one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def race_built(
        self,
        numbers: Sequence[int],
        failed: Mapping[int, Outcome],
        rounds: tuple[int, int],
        seconds: float,
    ) -> tuple[dict[int, Outcome], float]:
        """Race candidates but those that have ``failed`` before.

        Returns
        -------
        tuple[dict[int, Outcome], float]
            Outcome of each of ``numbers``, and the default's seconds: of its medians in the states
            of the caches the geometric mean.

        Raises
        ------
        TuningError
            If the default itself, or the reference, fails.
        """
        outcomes = dict(failed)
        while True:
            racers = [0, *(number for number in numbers if number not in outcomes and number)]
            racers = [number for number in racers if number not in outcomes]
            self._check_default(outcomes)
            try:
                raced = self._race_once(racers, rounds, seconds)
            except LostWorker as lost:
                self.end_worker()
                if lost.candidate == REFERENCE:
                    raise TuningError(
                        f"the reference of {self.name} failed: {lost.reason}"
                    ) from lost
                outcomes[racers[lost.candidate]] = Outcome(None, lost.failure, lost.reason)
                self._check_default(outcomes)
                continue
            break
        for position, error in raced["wrong"].items():
            outcomes[racers[int(position)]] = Outcome(None, "wrong", error)
        self._check_default(outcomes)
        times = raced["times"]
        states = min(raced["states"], len(times))
        for position, number in enumerate(racers):
            if number not in outcomes:
                outcomes[number] = Outcome.of_rounds(times, position, states)
        own = [statistics.median(turn[0] for turn in times[s::states]) for s in range(states)]
        return outcomes, statistics.geometric_mean(own)

    def _check_default(self, outcomes: dict[int, Outcome]) -> None:
        if 0 in outcomes and outcomes[0].failure:
            found = outcomes[0]
            raise TuningError(
                f"the default of {self.name} failed ({found.failure}): {found.reason}"
            )

    def _race_once(
        self, racers: Sequence[int], rounds: tuple[int, int], seconds: float
    ) -> dict[str, Any]:
        if self._worker is None:
            self._worker = self.start()
        self._races += 1
        return self._worker.call(
            self.patience,
            action="race",
            candidates=[self.about(number) for number in racers],
            rounds=rounds,
            seconds=seconds,
            seed=self.seed + self._races,
        )


def prepared(
    worker: Worker, name: str, arrays: Callable[[bool], list[str]], **about: Any
) -> Worker:
    """Give a process the tensors of a task; their magnitudes if the outputs are not finite.

    Parameters
    ----------
    worker : Worker
        The process, which is ended if there is an error.
    name : str
        Name in messages.
    arrays : Callable
        Function that makes the files of the tensors; its argument says whether they are magnitudes.
    **about
        Further parts of the request.

    Raises
    ------
    TuningError
        If the reference is not finite.
    """
    try:
        for is_positive in (False, True):  # Roots and logarithms take positive numbers only.
            ready = worker.call(
                REFERENCE_PATIENCE, action="prepare", arrays=arrays(is_positive), **about
            )
            if ready["finite"]:
                return worker
        raise TuningError(f"the reference of {name} is not finite")
    except BaseException:
        worker.close()
        raise


def finalists(measured: Mapping[int, float]) -> list[int]:
    """The fastest candidates that beat the default, by the logarithms of their ratios to it."""
    ranked = sorted(measured, key=measured.__getitem__)
    return [number for number in ranked if number and measured[number] < 0][:FINALISTS]


def winner(outcomes: Mapping[int, Outcome]) -> tuple[int, float]:
    """The best setting with its ratio if it gains enough and loses nowhere, else the default."""
    able = {
        number: one.ratio
        for number, one in outcomes.items()
        if one.ratio is not None and max(one.states, default=1.0) <= 1 + MOST_LOSS
    }
    best = min(able, key=able.__getitem__, default=0)
    wins = best and able[best] <= 1 / (1 + LEAST_GAIN)
    return (best, able[best]) if wins else (0, 1.0)


def logs_of(outcomes: Mapping[int, Outcome]) -> dict[int, float]:
    """Logarithms of the ratios of those that did not fail."""
    return {number: math.log(one.ratio) for number, one in outcomes.items() if one.ratio}
