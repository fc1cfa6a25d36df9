# SPDX-License-Identifier: Apache-2.0
"""Limits of this machine: multiply-adds a second, and bytes a second from each cache.

Both are measured with dedicated small kernels: a loop of independent multiply-adds in registers,
of floats and, where the CPU multiplies them in words or in tile registers, of bytes,
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
from schedules.cpu.core.micro_kernel import add_word_products, word_functions
from schedules.cpu.core.tile_unit import (
    TILE_ELEMENTS,
    TILE_ROWS,
    TILE_WORDS,
    TileShape,
    tile_unit,
)
from schedules.workload.conv2d import WORD_BYTES

from ..machine.host import may_use_tiles
from ..runtime.thread_pool import Crew

_SECONDS = 0.02
_REPEATS = 30
_ROUNDS = 20_000
_WORD_STEPS = 8
_TILES = 4
_TILE_ROUNDS = 2_000
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
    peak_byte_ops : float
        Operations a second on bytes, two for each product that is added to a sum; 0 if the CPU
        does not multiply them in words.
    """

    threads: int
    peak_flops: float
    levels: tuple[CacheLevel, ...]
    peak_byte_ops: float = 0.0

    def peak(self, of_bytes: bool) -> float:
        """Operations a second on bytes or on floats."""
        return self.peak_byte_ops or self.peak_flops if of_bytes else self.peak_flops

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
        return replace(
            self,
            levels=levels,
            peak_flops=combine(self.peak_flops, other.peak_flops),
            peak_byte_ops=combine(self.peak_byte_ops, other.peak_byte_ops),
        )


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
    peaks = [crew.run(_peak, cpu, target, threads, of_bytes) for of_bytes in (False, True)]
    return MachineLimits(threads, peaks[0], tuple(levels), peaks[1])


def _peak(cpu: CPUInfo, target: Target, threads: int, of_bytes: bool) -> float:
    if of_bytes and not cpu.word_channels:
        return 0.0
    return PeakProbe(cpu, target, threads, of_bytes).flops(_SECONDS, _REPEATS)


class PeakProbe:
    """Compiled loop of multiply-adds, which tells the present speed of all threads.

    Parameters
    ----------
    cpu, target : CPUInfo, Target
        This CPU.
    threads : int
        Threads that share the work.
    of_bytes : bool
        Whether words of bytes are multiplied, rather than floats.
    """

    def __init__(self, cpu: CPUInfo, target: Target, threads: int, of_bytes: bool = False) -> None:
        if of_bytes and "uint8" in cpu.tiles:
            may_use_tiles()
            size = threads * _TILES * TILE_ELEMENTS
            self._data = tvm.runtime.tensor(np.full(size, 0x01010101, "int32"))
            self._sums = tvm.runtime.tensor(np.zeros(size, "int32"))
            self._kernel = tvm.compile(_tile_products(cpu, threads), target)["main"]
            products = threads * _TILES * _TILE_ROUNDS * TILE_ELEMENTS
            self._operations = products * TILE_WORDS * WORD_BYTES * 2
            return
        lanes, word = cpu.lanes("float32"), cpu.word_channels if of_bytes else 0
        vectors = min(2 * _VECTORS_IN_FLIGHT, cpu.num_vector_registers - 4)
        dtype, factor = ("int32", 0x01010101) if word else ("float32", 0.5)
        size = _data_size(lanes, vectors, word)
        self._data = tvm.runtime.tensor(np.full(size, factor, dtype))
        self._sums = tvm.runtime.tensor(np.zeros(threads * vectors * lanes, dtype))
        self._kernel = tvm.compile(_multiply_add(lanes, vectors, threads, word), target)["main"]
        self._operations = threads * vectors * lanes * 2 * max(1, word) * _ROUNDS

    def flops(self, warm_up: float, repeats: int) -> float:
        """Operations a second of the fastest of some calls."""
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


def _tile_products(cpu: CPUInfo, threads: int) -> tirx.PrimFunc:
    """Products of tiles of bytes, ``_TILES`` sums at a time, the same on every thread."""
    shape = TileShape(TILE_ROWS, TILE_WORDS)
    size = threads * _TILES * TILE_ELEMENTS
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            data, sums = (T.arg(name, T.buffer((size,), "int32")) for name in ("data", "sums"))
            with T.sblock("root"):
                T.reads()
                T.writes()
                with T.parallel(0, threads) as thread, T.sblock("part"):
                    T.reads()
                    T.writes()
                    with tile_unit([shape] * (_TILES + 2), "uint8", cpu) as unit:
                        for tile in range(_TILES + 2):
                            unit.load(tile, data, 0, TILE_WORDS)
                        with T.serial(0, _TILE_ROUNDS):
                            for tile in range(_TILES):
                                unit.multiply(tile, _TILES, _TILES + 1)
                        for tile in range(_TILES):
                            unit.store(tile, sums, (thread * _TILES + tile) * TILE_ELEMENTS)
    return builder.get()


def _data_size(lanes: int, vectors: int, word: int) -> int:
    return lanes * (_WORD_STEPS * (vectors // 2 + 2) if word else 1)


def _multiply_add(lanes: int, vectors: int, threads: int, word: int) -> tirx.PrimFunc:
    """``sums = sums * data + data``, ``_ROUNDS`` times in registers; or of words of bytes."""
    size, pixels = _data_size(lanes, vectors, word), vectors // 2

    def step(
        data: tirx.Buffer, part: tirx.Buffer, vector: tirx.Var, place: tuple[tirx.Var, tirx.Var]
    ) -> tvm.ir.Expr:
        factor, total = data[tirx.Ramp(0, 1, lanes)], part[tirx.Ramp(vector * lanes, 1, lanes)]
        if not word:
            return total * factor + factor
        # A tile of two vectors of weights; they change, else they would be multiplied once.
        first = tirx.floormod(place[1], _WORD_STEPS) * (pixels + 2)
        numbers = first + tirx.floordiv(vector, 2), first + pixels + tirx.floormod(vector, 2)
        left, right = (data[tirx.Ramp(number * lanes, 1, lanes)] for number in numbers)
        return add_word_products(total, left, right, lanes, word)

    return _probe(size, lanes, vectors, threads, _ROUNDS, step, "int32" if word else "float32")


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
    dtype: str = "float32",
) -> tirx.PrimFunc:
    """A function that repeats ``step`` on sums in registers, the same on every thread."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            data = T.arg("data", T.buffer((size,), dtype))
            sums = T.arg("sums", T.buffer((threads * vectors * lanes,), dtype))
            T.func_attr({"tirx.noalias": True})
            with T.sblock("root"):
                T.reads()
                T.writes()
                with word_functions(dtype == "int32"), T.parallel(0, threads) as thread:
                    with T.sblock("part"):
                        T.reads()
                        T.writes()
                        part = T.sblock_alloc_buffer((vectors * lanes,), dtype)
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
