# SPDX-License-Identifier: Apache-2.0
"""Compiles and calls damaged models: each ends in a result or in one of our exceptions.

Nothing may be printed on the way.

    python tests/fuzz/run.py [--cases 10000] [--seed 0] [--first 0] [--limit 120] [--jobs 1]
                             [--log FILE]

The models are ONNX's own test cases and a small network, damaged by ``mutations.py``; case number
N of a seed is always the same. Worker processes take them one after the other; if one dies, or
takes longer than the limit for a case, that case has failed, and another worker goes on. With
``--log`` each outcome is a line of JSON in a file, and cases that it holds are not run again: the
same command continues a run that was stopped. Exit status: 0 if no case failed, 1 else.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs"), str(ROOT / "tests" / "tvm_fusion")]

import onnx  # noqa: E402
from rich.progress import track  # noqa: E402

MOST_ELEMENTS = 1 << 20
RIGHT = ("result", "compiled", "refused", "refused call")


def attempt(number: int) -> tuple[str, str]:
    """Compile and call one case; return the outcome and, of a failure, where it was."""
    import tvm_fusion
    from tests.fuzz.mutations import damaged
    from tvm_fusion.errors import TVMFusionError
    from tvm_fusion.runtime.host_arrays import random_inputs

    models = corpus()
    data = damaged(random.Random(f"model {number}").choice(models), number)
    try:
        model = tvm_fusion.compile(data, threads=1)
        if any(isinstance(size, str) for spec in model.inputs for size in spec.shape):
            return "compiled", ""
        if any(math.prod(map(int, spec.shape)) > MOST_ELEMENTS for spec in model.inputs):
            return "compiled", ""
        inputs = random_inputs(model.inputs, number, normal=True)
    except TVMFusionError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception:
        return "failed", traceback.format_exc()
    try:
        model(inputs)
        return "result", ""
    except TVMFusionError as error:
        return "refused call", str(error)
    except Exception:
        return "failed", traceback.format_exc()


def corpus() -> list[onnx.ModelProto]:
    """Models to damage; built once a process."""
    if not _CORPUS:
        from small_onnx import dense_model, small_model

        from operator_cases import cases

        _CORPUS.extend(case.model for case in cases(every=True))
        _CORPUS.extend([small_model(), dense_model()] * 50)
    return _CORPUS


_CORPUS: list[onnx.ModelProto] = []


def work(connection: Connection) -> None:
    """Answer each number that comes with the outcome of its case."""
    corpus()
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

    def run(self, number: int) -> tuple[str, str]:
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
    """What became of a case, where it failed, and how many seconds it took."""

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
        running = track(run_cases(left, workers), "damaged models", total=len(left))
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
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    slowest = max(done, key=lambda found: found.seconds, default=None)
    if slowest is not None:
        mean = sum(found.seconds for found in done) / len(done)
        print(f"{mean:.2f} s a case, {slowest.seconds:.0f} s case {slowest.case}")
    return 0 if set(counts) <= set(RIGHT) else 1


if __name__ == "__main__":
    sys.exit(main())
