# SPDX-License-Identifier: Apache-2.0
"""Races of candidates that were compiled elsewhere, on a machine without TVM's compiler.

    python -m tvm_fusion.tuning.candidates FOLDER FILE [SECONDS]

FOLDER is one of ``tvm-fusion tune --export``. FILE gets the trials of each task and the record of
its winner, lines of JSON for ``tvm-fusion tune --import``.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schedules.tuning.records import Key, Record, canonical

from ..errors import TargetError, TuningError
from ..runtime.tvm_runtime import DeviceInfo, find_device, version
from .contest import (
    BATCH_ROUNDS,
    BATCH_SECONDS,
    FINAL_ROUNDS,
    FINAL_SECONDS,
    Contest,
    MeasuringWorker,
    Outcome,
    Worker,
    finalists,
    logs_of,
    prepared,
    winner,
)
from .database import append_line, task_id

TASKS = "tasks.json"
BATCH = 8


class Exported(Contest):
    """Candidates of one task.

    Parameters
    ----------
    task : mapping
        Its entry in the file of tasks.
    folder : Path
        Folder of the libraries.
    kind : str
        ``cuda`` or ``opencl``; ``cpu`` for the host, as if it were a device.
    scratch : Path
        Folder for the tensors.
    """

    def __init__(self, task: Mapping[str, Any], folder: Path, kind: str, scratch: Path) -> None:
        super().__init__(task["name"], task["seed"])
        self.task, self.folder, self.kind, self.scratch = task, folder, kind, scratch

    def start(self) -> Worker:
        """Start a process with random tensors of the task."""
        worker = MeasuringWorker(1, self.scratch, self.kind)
        return prepared(
            worker,
            self.name,
            self._arrays,
            reference=self._placed(self.task["reference"]),
            outputs=self.task["outputs"],
        )

    def about(self, number: int) -> dict[str, Any]:
        """Describe a candidate as :meth:`Contest.about` states."""
        return self._placed(self.task["candidates"][number]["program"])

    def _placed(self, program: Mapping[str, Any]) -> dict[str, Any]:
        constants = [str(self.folder / name) for name in program["constants"]]
        return {**program, "library": str(self.folder / program["library"]), "constants": constants}

    def _arrays(self, is_positive: bool) -> list[str]:
        """Files of the tensors: floats of the spread that was exported, any integers."""
        generator = np.random.default_rng(self.seed)
        files = []
        for number, (shape, dtype, spread) in enumerate(self.task["tensors"]):
            if np.dtype(dtype).kind == "f":
                array = (generator.standard_normal(shape) * spread).astype(dtype)
            else:
                limits = np.iinfo(dtype)
                array = generator.integers(limits.min, limits.max, shape, dtype, endpoint=True)
            files.append(self.scratch / f"tensor-{number}.npy")
            np.save(files[-1], np.abs(array) if is_positive else array, allow_pickle=False)
        return [str(file) for file in files]

    def race_all(self) -> tuple[dict[int, Outcome], dict[int, Outcome], float]:
        """Outcomes of all candidates, of the best ones in a fresh process, and the default's time.

        Raises
        ------
        TuningError
            If the default or the reference fails.
        """
        failed = {
            number: Outcome(None, "compile", one["reason"])
            for number, one in enumerate(self.task["candidates"])
            if one["program"] is None
        }
        outcomes: dict[int, Outcome] = {}
        for start in range(1, len(self.task["candidates"]), BATCH):
            batch = range(start, min(start + BATCH, len(self.task["candidates"])))
            outcomes |= self.race_built(batch, failed, BATCH_ROUNDS, BATCH_SECONDS)[0]
        self.end_worker()
        best = finalists(logs_of(outcomes))
        again, seconds = self.race_built(best, {}, FINAL_ROUNDS, FINAL_SECONDS)
        return outcomes, {number: again[number] for number in best}, seconds


def lines_of(contest: Exported, device: DeviceInfo) -> list[str]:
    """Race the candidates of a task; its trials and its record as lines.

    Raises
    ------
    TuningError
        If the default or the reference fails.
    """
    task = contest.task
    try:
        found, again, seconds = contest.race_all()
    finally:
        contest.end_worker()
    key = Key(*task["key"])
    lines = []
    for number, outcome in sorted(found.items()):
        if number:
            told: dict[str, Any] = {"failure": outcome.failure, "reason": outcome.reason}
            told = told if outcome.ratio is None else {"ratio": outcome.ratio}
            lines.append(canonical({"task": task_id(key), **_setting(task, number), **told}))
    best, ratio = winner(again)
    now = datetime.datetime.now(datetime.timezone.utc)
    record = Record(
        **_setting(task, best),
        workload=json.loads(key.workload),
        cpu=key.cpu,
        vector_bits=key.vector_bits,
        threads=key.threads,
        default_seconds=seconds,
        best_seconds=seconds * ratio,
        trials=len(task["candidates"]) - 1,
        machine=device.name,
        tvm=version(),
        date=now.isoformat(timespec="seconds"),
    )
    return [*lines, record.to_line()]


def _setting(task: Mapping[str, Any], number: int) -> dict[str, Any]:
    one = task["candidates"][number]
    return {name: one[name] for name in ("template", "version", "knobs")}


def check_device(device: DeviceInfo, key: Key) -> None:
    """Refuse a device on which the records of a key would not count.

    Raises
    ------
    TargetError
        If it is another one.
    """
    needed, there = key.cpu, f"opencl:{device.name}"
    if device.kind == "cuda":
        needed = f"{key.cpu} with {key.threads} multiprocessors"
        there = f"{device.arch} with {device.multiprocessors} multiprocessors"
    if there != needed:
        raise TargetError(
            f"the candidates are for {needed}, and this machine's GPU is {there}: records count "
            "for the GPU on which they are made; export candidates for it"
        )


def measure(folder: Path, file: Path, seconds: float = math.inf) -> int:
    """Race all tasks of a folder and append to a file; return how many were done.

    Raises
    ------
    TargetError
        If the folder's GPU is not here.
    """
    end = time.monotonic() + seconds
    read = json.loads((folder / TASKS).read_text())
    device, done = find_device(read["kind"]), 0
    for task in read["tasks"]:
        check_device(device, Key(*task["key"]))
    for task in read["tasks"]:
        if time.monotonic() > end:
            print(f"{task['name']}: no time is left", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="tvm-fusion-tune-") as scratch:
            try:
                lines = lines_of(Exported(task, folder, read["kind"], Path(scratch)), device)
            except TuningError as error:
                print(f"{task['name']}: {error}", flush=True)
                continue
        for line in lines:
            append_line(file, line)
        done += 1
        print(f"{task['name']}: {len(lines) - 1} candidates raced", flush=True)
    return done


def main(arguments: Sequence[str]) -> int:
    """Measure; 1 if nothing was, 2 if the GPU is another one."""
    folder, file, *limit = arguments
    try:
        return 0 if measure(Path(folder), Path(file), *map(float, limit)) else 1
    except TargetError as error:
        print(error, flush=True)
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
