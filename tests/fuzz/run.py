# SPDX-License-Identifier: Apache-2.0
"""Compiles and calls damaged models: each ends in a result or in one of our exceptions.

Nothing may be printed on the way.

    python tests/fuzz/run.py [--cases 10000] [--seed 0] [--limit 120]

The models are ONNX's own test cases and a small network, damaged by ``mutations.py``; case number
N of a seed is always the same. A worker process takes them one after the other; if it dies, or
takes longer than the limit for one, that case has failed, and another worker goes on. Exit status:
0 if no case failed, 1 else.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    parser.add_argument("--limit", type=float, default=120, help="seconds a case")
    parser.add_argument("--only", type=int, help="show the outcome of this case, in this process")
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(*attempt(arguments.only), sep="\n")
        return 0
    worker = Worker(arguments.limit)
    counts: Counter[str] = Counter()
    first = arguments.seed * 1_000_000
    for number in track(range(first, first + arguments.cases), "damaged models"):
        outcome, where = worker.run(number)
        counts[outcome] += 1
        if outcome not in RIGHT:
            print(f"case {number} {outcome}: {where.strip().splitlines()[-1]}", flush=True)
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return 0 if set(counts) <= set(RIGHT) else 1


if __name__ == "__main__":
    sys.exit(main())
