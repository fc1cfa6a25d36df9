# SPDX-License-Identifier: Apache-2.0
"""Measuring process of a tuning job: takes requests, and answers them, as lines of JSON.

It holds TVM's runtime alone. A task's tensors and reference output stay while its candidates come
as shared libraries. Before each call of a candidate its number and a count are written to shared
memory, so that the parent knows whom to blame if the process hangs or dies. A candidate is a list
of kernels that are called one after another; most have one.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, Generic, TypeVar

import numpy as np
import tvm_ffi

from tvm_fusion.machine.host import may_use_tiles
from tvm_fusion.runtime.host_arrays import aligned_empty
from tvm_fusion.runtime.thread_pool import WorkerPool, use_pools
from tvm_fusion.runtime.tvm_runtime import get_function

BEACON = struct.Struct("<qq")
"""Number of the candidate that runs, and of all calls so far."""
REFERENCE = -1

WEIGHT_BYTES = 48 << 20
"""Bytes of all copies of a kernel's weights: more than most last-level caches hold."""
MOST_COPIES = 200
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "uint8": 1.5 / 255}
"""Largest error of an output, relative to the largest magnitude of the reference.

Of bytes one: sums of floats may be rounded up or down.
"""


class Candidate:
    """Kernels of one library, and the tensors that are theirs alone.

    Parameters
    ----------
    about : mapping
        ``library``; ``calls``: names of functions with the numbers of their arguments;
        ``constants`` and ``buffers``: files of arrays, and shapes and types. Numbers count the
        task's tensors, then the constants, then the buffers.
    racers : int
        Candidates that take turns with this one.
    """

    def __init__(self, about: Mapping[str, Any], racers: int = MOST_COPIES) -> None:
        library = _library(about["library"])
        self._calls = [(library[name], numbers) for name, numbers in about["calls"]]
        constants = [_copy(np.load(path, allow_pickle=False)) for path in about["constants"]]
        self._buffers = [
            tvm_ffi.from_dlpack(aligned_empty(shape, dtype)) for shape, dtype in about["buffers"]
        ]
        self._constants = copies_in_turn(constants, racers)

    def steps(self, common: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
        """Functions with their arguments, for the task's tensors and the next copy of constants."""
        every = [*common, *next(self._constants), *self._buffers]
        return [(call, [every[number] for number in numbers]) for call, numbers in self._calls]

    def run(self, common: Sequence[Any]) -> None:
        """Call all kernels."""
        for function, arguments in self.steps(common):
            function(*arguments)


Racer = TypeVar("Racer")


class Races(ABC, Generic[Racer]):
    """Races between the candidates of one task.

    Parameters
    ----------
    beacon : memory map
        Memory of the size of :data:`BEACON`.
    """

    tolerance = 0.0
    """Largest relative error of a correct candidate."""
    states = 1
    """States of the caches that rounds meet in turn."""
    prepare: Callable[..., dict[str, Any]]
    """Read the tensors and compute the reference; tell whether it is ``finite``."""

    def __init__(self, beacon: mmap.mmap) -> None:
        self._beacon = beacon
        self._calls = 0

    @abstractmethod
    def load(self, about: Mapping[str, Any], racers: int) -> Racer:
        """Load a candidate that takes turns with others, ``racers`` in all."""

    @abstractmethod
    def error_of(self, candidate: Racer) -> float:
        """Run a candidate on poisoned outputs; return the largest relative error."""

    @abstractmethod
    def seconds_of(self, candidate: Racer, state: int) -> float:
        """Time one run of a candidate that meets one of the :attr:`states`."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request: ``prepare`` or ``race``."""
        actions: dict[str, Callable[..., dict[str, Any]]]
        actions = {"prepare": self.prepare, "race": self.race}
        return actions[request.pop("action")](**request)

    def race(
        self,
        candidates: Sequence[Mapping[str, Any]],
        rounds: Sequence[int],
        seconds: float,
        seed: int,
    ) -> dict[str, Any]:
        """Check candidates and let them take turns; ``rounds`` are the fewest and the most.

        Returns
        -------
        dict
            ``times``: for each round the seconds of each candidate, None for those that are
            ``wrong``: from their number to their error, as texts. Round ``i`` meets state ``i``
            modulo ``states``.
        """
        loaded = []
        for number, about in enumerate(candidates):
            self.begin(number)
            loaded.append(self.load(about, len(candidates)))
        wrong: dict[str, str] = {}
        self._check(loaded, range(len(loaded)), wrong)
        racers = [number for number in range(len(loaded)) if str(number) not in wrong]
        times = self._turns(loaded, racers, rounds, seconds, random.Random(seed))
        self._check(loaded, racers, wrong)
        return {"times": times, "wrong": wrong, "states": self.states}

    def _check(
        self, loaded: Sequence[Racer], numbers: Sequence[int], wrong: dict[str, str]
    ) -> None:
        for number in numbers:
            self.begin(number)
            error = self.error_of(loaded[number])
            if not error <= self.tolerance:  # NaN is wrong, too
                wrong[str(number)] = f"relative error {error:.2g}"

    def _turns(
        self,
        loaded: Sequence[Racer],
        racers: list[int],
        rounds: Sequence[int],
        seconds: float,
        order: random.Random,
    ) -> list[list[float | None]]:
        turns: list[list[float | None]] = []
        end = time.perf_counter() + seconds
        while racers and len(turns) < rounds[1]:
            if len(turns) >= rounds[0] and time.perf_counter() >= end:
                break
            taken: list[float | None] = [None] * len(loaded)
            order.shuffle(racers)
            for number in racers:
                self.begin(number)
                taken[number] = self.seconds_of(loaded[number], len(turns) % self.states)
            turns.append(taken)
        return turns

    def begin(self, number: int) -> None:
        """Tell the parent which candidate runs from now on."""
        self._calls += 1
        self._beacon[: BEACON.size] = BEACON.pack(number, self._calls)


class Bench(Races[Candidate]):
    """Races on a CPU.

    In a network the layer before has just written a kernel's input, all threads a share; the input
    of the model comes from memory, and so does what other work has driven out of the caches. A
    setting that does not prefetch may win by 2 % in one state and lose 50 % in the other, so rounds
    take both in turn.

    Parameters
    ----------
    threads : int
        Threads of a kernel.
    beacon : memory map
        Memory of the size of :data:`BEACON`.
    """

    states = 2

    def __init__(self, threads: int, beacon: mmap.mmap) -> None:
        super().__init__(beacon)
        get_function("runtime.config_threadpool")  # loads the runtime
        self._pool = WorkerPool(threads)
        self._threads = threads

    def prepare(
        self,
        arrays: Sequence[str],
        weights: Sequence[int],
        reference: Mapping[str, Any],
        writer: str,
        planes: Sequence[int],
    ) -> dict[str, Any]:
        """Read the tensors and compute the reference; the last tensor is the output.

        ``planes`` is the shape by which the library ``writer`` sees the first tensor.
        """
        self._arrays = [_copy(np.load(path, allow_pickle=False)) for path in arrays]
        self._output = self._arrays[-1]
        self.tolerance = TOLERANCES[self._output.dtype.name]
        self._arguments = [tvm_ffi.from_dlpack(array) for array in self._arrays]
        self._weights = self._copies(weights)
        self._inputs = self._copies(sorted({*range(len(arrays) - 1)} - {*weights}))
        self._write = _library(writer)["main"]
        self._pool.bind(self._threads)
        self._planes = tvm_ffi.from_dlpack(self._arrays[0].reshape(planes))
        self._output[...] = np.nan if self._output.dtype.kind == "f" else 0
        self.begin(REFERENCE)
        Candidate(reference).run(self._arguments)
        self._wanted = self._output.copy()
        is_bytes = self._output.dtype == np.uint8
        self._poison = self._wanted + np.uint8(128) if is_bytes else np.nan
        self._scale = 255.0 if is_bytes else float(np.abs(self._wanted).max()) or 1.0
        return {"finite": bool(np.isfinite(self._wanted).all())}

    def _copies(self, numbers: Sequence[int]) -> Iterator[dict[int, Any]]:
        """Copies of some of the task's tensors in turn, by their numbers."""
        copies = copies_in_turn([self._arrays[number] for number in numbers], 1)
        return (dict(zip(numbers, tensors, strict=True)) for tensors in copies)

    def load(self, about: Mapping[str, Any], racers: int) -> Candidate:
        """Load a candidate, with copies of its constants."""
        return Candidate(about, racers)

    def error_of(self, candidate: Candidate) -> float:
        """Run a candidate on a poisoned output; return the largest relative error."""
        self._output[...] = self._poison
        candidate.run(self._arguments)
        found = self._output.astype(np.promote_types(self._output.dtype, np.float32))
        return float(np.abs(found - self._wanted).max()) / self._scale

    def seconds_of(self, candidate: Candidate, state: int) -> float:
        """Time one run with cold weights.

        In state 0 all threads have written the input, in state 1 all inputs come from memory.
        """
        replaced = next(self._weights) | (next(self._inputs) if state else {})
        steps = candidate.steps(
            [replaced.get(number, tensor) for number, tensor in enumerate(self._arguments)]
        )
        if not state:
            self._write(self._planes)
        begin = time.perf_counter()
        for function, given in steps:
            function(*given)
        return time.perf_counter() - begin


def copies_in_turn(arrays: Sequence[np.ndarray], racers: int) -> Iterator[list[Any]]:
    """Tensors of equal copies of arrays in turn; those of ``racers`` candidates fill the caches.

    So those of a run are not in the caches; in a network they are not.
    """
    size = racers * sum(array.nbytes for array in arrays)
    most = max(1, MOST_COPIES // racers)
    count = min(most, max(2, WEIGHT_BYTES // size)) if size else 1
    return cycle([[tvm_ffi.from_dlpack(_copy(array)) for array in arrays] for _ in range(count)])


def _library(path: str) -> tvm_ffi.Module:
    may_use_tiles()
    library = tvm_ffi.load_module(path)
    use_pools(library)
    return library


def _copy(array: np.ndarray) -> np.ndarray:
    other = aligned_empty(array.shape, array.dtype)
    other[...] = array
    return other


def main() -> None:
    """Serve until standard input ends: ``worker.py CHANNEL BEACON THREADS``."""
    serve(lambda threads, beacon: Bench(int(threads), beacon))


def serve(bench_of: Callable[[str, mmap.mmap], Races[Any]]) -> None:
    """Answer requests; ``bench_of`` takes the last argument of the process, and the beacon."""
    channel, beacon, about = sys.argv[1:]
    with open(beacon, "r+b") as file, os.fdopen(int(channel), "wb") as answers:
        bench = bench_of(about, mmap.mmap(file.fileno(), BEACON.size))
        for line in sys.stdin.buffer:
            answers.write(json.dumps(bench.answer(json.loads(line))).encode() + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
