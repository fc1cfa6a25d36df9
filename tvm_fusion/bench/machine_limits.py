# SPDX-License-Identifier: Apache-2.0
"""Limits of this machine: multiply-adds a second, and bytes a second from each cache.

Both are measured with dedicated small kernels: a loop of independent multiply-adds in registers,
and sums over arrays which fit the level in question (L2 of all threads, the last-level cache,
memory). Reading alone is faster than copying, so the limits are on the strict side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo

from ..runtime.thread_pool import Crew

_SECONDS = 0.02
_REPEATS = 30
_ROUNDS = 20_000
_VECTORS_IN_FLIGHT = 12  # covers two multiply-adds a cycle of up to six cycles each
_LEAST_MEMORY_BYTES = 128 << 20


@dataclass(frozen=True)
class CacheLevel:
    """Cache level, or memory, where data can be.

    Parameters
    ----------
    name : str
        ``L2``, ``L3`` or ``memory``.
    capacity : float
        Bytes that fit, for all threads together; infinite for memory.
    bandwidth : float
        Bytes a second that all threads together can read.
    """

    name: str
    capacity: float
    bandwidth: float


@dataclass(frozen=True)
class MachineLimits:
    """The roofs of a roofline model.

    Parameters
    ----------
    threads : int
        Number of threads of the figures.
    peak_flops : float
        Floating-point operations a second in float32, two for each multiply-add.
    levels : tuple[CacheLevel, ...]
        From the nearest to memory.
    """

    threads: int
    peak_flops: float
    levels: tuple[CacheLevel, ...]

    def level_of(self, size: float) -> CacheLevel:
        """The nearest level that holds ``size`` bytes."""
        return next(level for level in self.levels if size <= level.capacity)

    def mean(self, other: MachineLimits) -> MachineLimits:
        """The mean of two measurements of the same machine."""
        return self._combine(other, lambda mine, theirs: (mine + theirs) / 2)

    def best(self, other: MachineLimits) -> MachineLimits:
        """The larger figures of two measurements: other work of the machine only lowers them."""
        return self._combine(other, max)

    def _combine(
        self, other: MachineLimits, combine: Callable[[float, float], float]
    ) -> MachineLimits:
        levels = tuple(
            replace(mine, bandwidth=combine(mine.bandwidth, theirs.bandwidth))
            for mine, theirs in zip(self.levels, other.levels, strict=True)
        )
        return replace(self, peak_flops=combine(self.peak_flops, other.peak_flops), levels=levels)


def measure_limits(target: Target, threads: int) -> MachineLimits:
    """Measure this machine; takes about two seconds.

    Parameters
    ----------
    target : Target
        Target of the kernels: a CPU whose code runs here.
    threads : int
        Number of threads that share the work.
    """
    cpu = CPUInfo.from_target(target)
    crew = Crew(threads)
    caches = {"L2": cpu.l2_bytes * threads, "L3": max(cpu.l3_bytes, cpu.l2_bytes * threads)}
    levels = [
        CacheLevel(name, size, crew.run(_bandwidth, cpu, target, threads, size // 2))
        for name, size in caches.items()
    ]
    beyond = max(_LEAST_MEMORY_BYTES, 4 * cpu.l3_bytes)
    rate = crew.run(_bandwidth, cpu, target, threads, beyond)
    levels.append(CacheLevel("memory", float("inf"), rate))
    return MachineLimits(threads, crew.run(_peak, cpu, target, threads), tuple(levels))


def _peak(cpu: CPUInfo, target: Target, threads: int) -> float:
    return PeakProbe(cpu, target, threads).flops(_SECONDS, _REPEATS)


class PeakProbe:
    """Compiled loop of multiply-adds, which tells the present speed of all threads.

    Parameters
    ----------
    cpu, target : CPUInfo, Target
        This CPU.
    threads : int
        Threads that share the work.
    """

    def __init__(self, cpu: CPUInfo, target: Target, threads: int) -> None:
        lanes = cpu.lanes("float32")
        vectors = min(2 * _VECTORS_IN_FLIGHT, cpu.num_vector_registers - 4)
        self._data = tvm.runtime.tensor(np.full(lanes, 0.5, "float32"))
        self._sums = tvm.runtime.tensor(np.zeros(threads * vectors * lanes, "float32"))
        self._kernel = tvm.compile(_multiply_add(lanes, vectors, threads), target)["main"]
        self._operations = threads * vectors * lanes * 2 * _ROUNDS

    def flops(self, warm_up: float, repeats: int) -> float:
        """Floating-point operations a second of the fastest of some calls."""
        seconds = _fastest(lambda: self._kernel(self._data, self._sums), warm_up, repeats)
        return self._operations / seconds


def _bandwidth(cpu: CPUInfo, target: Target, threads: int, size: int) -> float:
    """Bytes a second of repeatedly reading ``size`` bytes, each thread its own part."""
    lanes = cpu.lanes("float32")
    step = lanes * _VECTORS_IN_FLIGHT
    steps = max(1, size // (4 * threads * step))
    passes = max(1, (8 << 20) // size)
    data = tvm.runtime.tensor(np.zeros(threads * steps * step, "float32"))
    sums = tvm.runtime.tensor(np.zeros(threads * step, "float32"))
    kernel = tvm.compile(_read(lanes, threads, steps, passes), target)["main"]
    return passes * threads * steps * step * 4 / _fastest(lambda: kernel(data, sums))


def _fastest(
    call: Callable[[], object], warm_up: float = _SECONDS, repeats: int = _REPEATS
) -> float:
    """Seconds of the fastest of several calls, after warm-up calls."""
    until = time.perf_counter() + warm_up
    while time.perf_counter() < until:
        call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def _multiply_add(lanes: int, vectors: int, threads: int) -> tirx.PrimFunc:
    """``sums = sums * data + data``, ``_ROUNDS`` times in registers."""

    def step(data: tirx.Buffer, part: tirx.Buffer, vector: tirx.Var, _: object) -> tvm.ir.Expr:
        factor = data[tirx.Ramp(0, 1, lanes)]
        return part[tirx.Ramp(vector * lanes, 1, lanes)] * factor + factor

    return _probe(lanes, lanes, vectors, threads, _ROUNDS, step)


def _read(lanes: int, threads: int, steps: int, passes: int) -> tirx.PrimFunc:
    """``sums += data``, each thread over its own part of the data, ``passes`` times."""
    step_size = lanes * _VECTORS_IN_FLIGHT

    def step(
        data: tirx.Buffer, part: tirx.Buffer, vector: tirx.Var, place: tuple[tirx.Var, tirx.Var]
    ) -> tvm.ir.Expr:
        thread, round_ = place
        start = (thread * steps + tirx.floormod(round_, steps)) * step_size + vector * lanes
        return part[tirx.Ramp(vector * lanes, 1, lanes)] + data[tirx.Ramp(start, 1, lanes)]

    size = threads * steps * step_size
    return _probe(size, lanes, _VECTORS_IN_FLIGHT, threads, steps * passes, step)


def _probe(
    size: int,
    lanes: int,
    vectors: int,
    threads: int,
    rounds: int,
    step: Callable[..., tvm.ir.Expr],
) -> tirx.PrimFunc:
    """A function that repeats ``step`` on sums in registers, the same on every thread."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            data = T.arg("data", T.buffer((size,), "float32"))
            sums = T.arg("sums", T.buffer((threads * vectors * lanes,), "float32"))
            T.func_attr({"tirx.noalias": True})
            with T.sblock("root"):
                T.reads()
                T.writes()
                with T.parallel(0, threads) as thread:
                    with T.sblock("part"):
                        T.reads()
                        T.writes()
                        part = T.sblock_alloc_buffer((vectors * lanes,), "float32")
                        _copy(part, 0, sums, thread * (vectors * lanes), vectors, lanes)
                        with T.serial(0, rounds) as round_:
                            with T.unroll(0, vectors) as vector:
                                value = step(data, part, vector, (thread, round_))
                                T.buffer_store(part, value, [tirx.Ramp(vector * lanes, 1, lanes)])
                        _copy(sums, thread * (vectors * lanes), part, 0, vectors, lanes)
    return builder.get()


def _copy(
    to: tirx.Buffer, to_start: object, source: tirx.Buffer, start: object, vectors: int, lanes: int
) -> None:
    with T.unroll(0, vectors) as vector:
        value = source[tirx.Ramp(start + vector * lanes, 1, lanes)]
        T.buffer_store(to, value, [tirx.Ramp(to_start + vector * lanes, 1, lanes)])
