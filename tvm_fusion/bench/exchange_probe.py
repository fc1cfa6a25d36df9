# SPDX-License-Identifier: Apache-2.0
"""Time of what another core has just written.

All threads write their shares of an array that fits the caches, then copy either their own shares
or those of others. In a virtual machine the difference varies up to 15-fold with the place of the
cores, which may change every few seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from ..runtime.thread_pool import Crew

_ROWS, _WIDTH = 512, 256  # of each thread
_ROUNDS = 8
_LEAST = 2e-12  # seconds of a byte that count as none


class ExchangeProbe:
    """Compiled copies, which tell what passing data from core to core costs at this moment.

    Parameters
    ----------
    target : Target
        This CPU.
    threads : int
        Threads that share the work; at least two.
    """

    def __init__(self, target: Target, threads: int) -> None:
        self._crew = Crew(threads)
        shape = (threads, _ROWS, _WIDTH)
        self._bytes = 4 * threads * _ROWS * _WIDTH
        self._source, self._copy = (tvm.runtime.tensor(np.zeros(shape, "float32")) for _ in "sc")
        functions = {"write": _write(threads), "own": _copy(threads, 0), "other": _copy(threads, 1)}
        module = {
            name: function.with_attr("global_symbol", name) for name, function in functions.items()
        }
        self._library = tvm.compile(tvm.IRModule(module), target)

    def seconds(self) -> float:
        """Seconds that a byte takes longer if another core has written it than if the same has."""
        return self._crew.run(self._measure)

    def _measure(self) -> float:
        write, *copies = (self._library[name] for name in ("write", "own", "other"))
        runs = [partial(copy, self._source, self._copy) for copy in copies]
        return exchange_seconds(partial(write, self._source), runs, self._bytes)


def exchange_seconds(
    write: Callable[[], object], copies: Sequence[Callable[[], object]], size: int
) -> float:
    """Seconds of a byte that another core has just written, over those of one that the same has.

    Parameters
    ----------
    write : callable
        Writes an array with all threads.
    copies : sequence of callable
        Copies the array; by the first each thread reads what it has written, by the second what
        another one has.
    size : int
        Bytes of the array.
    """
    times: tuple[list[float], ...] = ([], [])
    for _ in range(_ROUNDS + 1):
        for found, copy in zip(times, copies, strict=True):
            write()
            begin = time.perf_counter()
            copy()
            found.append(time.perf_counter() - begin)
    own, other = (statistics.median(found[1:]) for found in times)
    return max((other - own) / size, _LEAST)


def _write(threads: int) -> tirx.PrimFunc:
    @T.prim_func
    def write(data: T.Buffer((threads, _ROWS, _WIDTH), "float32")):  # type: ignore[valid-type]
        for share in T.parallel(threads):
            for row in range(_ROWS):
                for column in T.vectorized(_WIDTH):
                    data[share, row, column] = T.float32(1)

    return write


def _copy(threads: int, distance: int) -> tirx.PrimFunc:
    """Each thread copies the share of the thread so many after it."""

    @T.prim_func
    def copy(
        data: T.Buffer((threads, _ROWS, _WIDTH), "float32"),  # type: ignore[valid-type]
        out: T.Buffer((threads, _ROWS, _WIDTH), "float32"),  # type: ignore[valid-type]
    ):
        for share in T.parallel(threads):
            for row in range(_ROWS):
                for column in T.vectorized(_WIDTH):
                    out[share, row, column] = data[(share + distance) % threads, row, column]

    return copy
