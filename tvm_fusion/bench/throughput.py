# SPDX-License-Identifier: Apache-2.0
"""Calls a second of several copies of a model that run at the same time."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError
from ..runtime.compiled_model import CompiledModel, load


@dataclass(frozen=True)
class Throughput:
    """Result of :func:`throughput`."""

    calls_per_second: float  # Calls of all streams together.
    calls: int  # Timed calls.
    seconds: float  # Time from the start of the first to the end of the last.
    streams: int  # Copies of the model.
    threads: int  # Threads of each copy.


def throughput(
    model: CompiledModel, streams: int, inputs: Mapping[str, Any], seconds: float = 2.0
) -> Throughput:
    """Run a model and copies of it at the same time, each in a thread of its own.

    Parameters
    ----------
    model : CompiledModel
        The model; its number of threads is that of each stream.
    streams : int
        Number of calls at the same time. All but the first share the weights of a saved copy.
    inputs : mapping
        Inputs by name.
    seconds : float
        Time after which no call begins.

    Raises
    ------
    InvalidInputError
        If a number is not positive, or the inputs do not fit the model.
    """
    if streams < 1 or not seconds > 0:
        raise InvalidInputError(f"streams is {streams}, seconds {seconds}; expected positive ones")
    models = [model]
    if streams > 1:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.so"
            model.save(path)
            models += [load(path, model.threads) for _ in range(streams - 1)]
    start = threading.Barrier(streams)

    def stream(copy: CompiledModel) -> tuple[float, float, int]:
        start.wait()
        begin = end = time.perf_counter()
        calls = 0
        while end - begin < seconds:
            copy(inputs)
            end = time.perf_counter()
            calls += 1
        return begin, end, calls

    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(lambda copy: copy(inputs), models))  # nothing fails at the barrier after it
        begins, ends, counts = zip(*pool.map(stream, models), strict=True)
    whole, calls = max(ends) - min(begins), sum(counts)
    return Throughput(calls / whole, calls, whole, streams, model.threads)
