# SPDX-License-Identifier: Apache-2.0
"""Damaged models, files and arguments: each ends in a result or in one of our exceptions.

Nothing may be printed on the way, and no result may be wrong where it is known.

    python tests/fuzz/run.py [--cases 10000] [--seed 0] [--first 0] [--limit 120] [--jobs 1]
                             [--log FILE]

Half of the cases are models, ONNX's own test cases and small networks (``models.py``); the others
are files that the package reads (``files.py``), arguments of a model's call (``arguments.py``), and
those of functions and commands (``options.py``). Case number N of a seed is always the same.

Worker processes take cases one after the other; if one dies, or takes longer than the limit for a
case, that case has failed, and another worker goes on. With ``--log`` each outcome is a line of
JSON in a file, and cases that it holds are not run again: the same command continues a run that was
stopped. Exit status: 0 if no case failed, 1 else.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs"), str(ROOT / "tests" / "tvm_fusion")]

from rich.progress import track  # noqa: E402

from tests.fuzz import arguments, files, models, options  # noqa: E402
from tests.fuzz.outcomes import RIGHT, Found  # noqa: E402

KINDS = {models: 5, files: 2, arguments: 2, options: 1}
"""Modules of cases, and their shares."""


def kind_of(number: int) -> ModuleType:
    """The kind of a case."""
    [kind] = random.Random(f"kind {number}").choices(list(KINDS), list(KINDS.values()))
    return kind


def attempt(number: int) -> Found:
    """Run one case; return the outcome and, of a failure, where it was."""
    return kind_of(number).attempt(number)


def work(connection: Connection) -> None:
    """Answer each number that comes with the outcome of its case."""
    for prepare in (models.corpus, files.every_artifact, arguments.subjects):
        prepare()
    connection.send(("ready", ""))
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        while True:
            outcome = attempt(connection.recv())
            printed.seek(0)
            text = printed.read().decode(errors="replace")
            printed.seek(0)
            printed.truncate()
            connection.send(("printed", text) if text and outcome[0] in RIGHT else outcome)


class Worker:
    """A process that takes cases; started again after each that it does not survive."""

    def __init__(
        self, limit: float, target: Callable[[Connection], None] = work, method: str = "spawn"
    ) -> None:
        self._limit = limit
        self._target = target
        self._context: Any = multiprocessing.get_context(method)
        self._start()

    def _start(self) -> None:
        self._end, other = self._context.Pipe()
        self._process = self._context.Process(target=self._target, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self._end.recv()

    def run(self, number: int) -> Found:
        """Return the outcome of a case, ``hung`` and ``crashed`` among them."""
        self._end.send(number)
        outcome = ("hung", f"no end in {self._limit:.0f} s")
        try:
            if self._end.poll(self._limit):
                return self._end.recv()
        except EOFError:
            self._process.join()
            outcome = ("crashed", f"exit code {self._process.exitcode}")
        self._process.kill()
        self._start()
        return outcome


class Outcome(NamedTuple):
    """Result of a case, where it failed, and how many seconds it took."""

    case: int
    outcome: str
    where: str
    seconds: float


def run_cases(numbers: Iterable[int], workers: Iterable[Worker]) -> Iterator[Outcome]:
    """Run cases on workers at once, and yield the outcomes in the order of the numbers."""
    idle: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(number: int) -> Outcome:
        worker, start = idle.get(), time.monotonic()
        try:
            outcome, where = worker.run(number)
        finally:
            idle.put(worker)
        return Outcome(number, outcome, where, round(time.monotonic() - start, 3))

    pool = ThreadPoolExecutor(idle.qsize())
    try:
        yield from pool.map(run, numbers)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def read_log(path: Path) -> list[Outcome]:
    """Outcomes in a log; a last line that was cut off is left out, and removed."""
    if not path.exists():
        return []
    whole, _, rest = path.read_bytes().rpartition(b"\n")
    if rest:
        path.write_bytes(whole + b"\n" if whole else b"")
    return [Outcome(**json.loads(line)) for line in whole.splitlines()]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    parser.add_argument("--first", type=int, default=0, help="case of the seed to begin with")
    parser.add_argument("--limit", type=float, default=120, help="seconds a case")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--log", type=Path, help="file of outcomes, which a second run continues")
    parser.add_argument("--only", type=int, help="show the outcome of this case, in this process")
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(*attempt(arguments.only), sep="\n")
        return 0
    seed = arguments.seed * 1_000_000
    numbers = range(seed + arguments.first, seed + arguments.cases)
    logged = read_log(arguments.log) if arguments.log else []
    done = [found for found in logged if found.case in numbers]
    left = sorted(set(numbers) - {found.case for found in done})
    for found in done:
        tell(found)
    workers = [Worker(arguments.limit) for _ in range(min(arguments.jobs, len(left)))]
    with open(arguments.log or os.devnull, "a", encoding="utf-8") as log:
        running = track(run_cases(left, workers), "cases", total=len(left))
        for found in running if left else ():
            done.append(found)
            print(json.dumps(found._asdict()), file=log, flush=True)
            tell(found)
    return report(done)


def tell(found: Outcome) -> None:
    """Print a failure."""
    if found.outcome not in RIGHT:
        last = found.where.strip().splitlines()[-1:] or [""]
        print(f"case {found.case} {found.outcome}: {last[0]}", flush=True)


def report(done: list[Outcome]) -> int:
    """Print the numbers of outcomes, and the time of a case; return the exit status."""
    counts = Counter(found.outcome for found in done)
    for kind in KINDS:
        own = Counter(found.outcome for found in done if kind_of(found.case) == kind)
        told = ", ".join(f"{count} {name}" for name, count in sorted(own.items()))
        print(f"{kind.__name__.split('.')[-1]}: {own.total()} cases; {told or 'none'}")
    slowest = max(done, key=lambda found: found.seconds, default=None)
    if slowest is not None:
        mean = sum(found.seconds for found in done) / len(done)
        print(f"{mean:.2f} s a case, {slowest.seconds:.0f} s case {slowest.case}")
    return 0 if set(counts) <= set(RIGHT) else 1


if __name__ == "__main__":
    sys.exit(main())
