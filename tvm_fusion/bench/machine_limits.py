# SPDX-License-Identifier: Apache-2.0
"""Limits of this machine: multiply-adds a second, and bytes a second from each cache.

Both are measured with dedicated small kernels: a loop of independent multiply-adds in registers,
of float32 and, where the CPU multiplies them in words or in tile registers, of bytes and bfloat16,
and sums over arrays which fit the level in question (L2 of all threads, the last-level cache,
memory). Reading alone is faster than copying, so the limits are on the strict side.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ib
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.micro_kernel import (
    add_block_products,
    add_half_products,
    add_word_products,
    word_functions,
)
from schedules.cpu.core.tile_unit import TILE_ELEMENTS, TILE_ROWS, TILE_WORDS, TileShape, tile_unit
from schedules.workload.conv2d import WORD_BYTES, WORDS

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


NUMBERS = {"uint8": "bytes", "bfloat16": "bfloat16"}
"""Types that a CPU may multiply otherwise than float32, and their names in a table."""


@dataclass(frozen=True)
class CacheLevel:
    """Cache level, or memory, where data can be."""

    name: str  # ``L2``, ``L3`` or ``memory``.
    capacity: float  # Bytes that fit, for all threads together; infinite for memory.
    bandwidth: float  # Bytes a second that all threads together can read.


@dataclass(frozen=True)
class MachineLimits:
    """The roofs of a roofline model."""

    threads: int  # Number of threads of the figures.
    peak_flops: float  # Floating-point operations a second in float32, two for each multiply-add.
    levels: tuple[CacheLevel, ...]  # Caches from the nearest to memory.
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Operations a second on other numbers, by :data:`NUMBERS`, two for each product that is added
    to a sum; only those that the CPU multiplies otherwise than float32."""

    def peak(self, numbers: str) -> float:
        """Operations a second on numbers of a type."""
        return self.peaks.get(numbers, self.peak_flops)

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
            peaks={
                numbers: combine(self.peak(numbers), other.peak(numbers))
                for numbers in {**self.peaks, **other.peaks}
            },
        )


def measure_limits(target: Target, threads: int) -> MachineLimits:
    """Measure this machine; takes about two seconds.

    ``target``: target of the kernels: a CPU whose code runs here. ``threads``: number of threads
    that share the work.
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
    peak, *others = (
        crew.run(_peak, cpu, target, threads, numbers) for numbers in ("float32", *_numbers(cpu))
    )
    peaks = dict(zip(_numbers(cpu), others, strict=True))
    return MachineLimits(threads, peak, tuple(levels), peaks)


def _numbers(cpu: CPUInfo) -> list[str]:
    """Types that a CPU multiplies otherwise than float32."""
    has = cpu.word_channels > 0, cpu.halves_pay
    return [numbers for numbers, is_there in zip(NUMBERS, has, strict=True) if is_there]


def _peak(cpu: CPUInfo, target: Target, threads: int, numbers: str) -> float:
    return PeakProbe(cpu, target, threads, numbers).flops(_SECONDS, _REPEATS)


class PeakProbe:
    """Compiled loop of multiply-adds, which tells the present speed of all threads.

    ``cpu`` and ``target``: this CPU. ``threads``: threads that share the work. ``numbers``: what is
    multiplied: ``float32``, or one of :data:`NUMBERS` that the CPU has words or tile registers for.
    """

    def __init__(
        self, cpu: CPUInfo, target: Target, threads: int, numbers: str = "float32"
    ) -> None:
        ones = 0x3F803F80 if numbers == "bfloat16" else 0x01010101
        if numbers in cpu.tiles:
            may_use_tiles()
            size = threads * _TILES * TILE_ELEMENTS
            self._data = tvm.runtime.tensor(np.full(size, ones, "int32"))
            self._sums = tvm.runtime.tensor(np.zeros(size, "int32"))
            self._kernel = tvm.compile(_tile_products(cpu, threads, numbers), target)["main"]
            products = threads * _TILES * _TILE_ROUNDS * TILE_ELEMENTS * TILE_WORDS
            self._operations = products * _word(numbers, cpu) * 2
            return
        is_float = numbers == "float32"
        lanes = cpu.lanes("float32")
        vectors = min(2 * _VECTORS_IN_FLIGHT, cpu.num_vector_registers - 4)
        sums = "float32" if is_float or numbers == "bfloat16" else "int32"
        size = _data_size(lanes, vectors, is_float)
        data = np.full(size, 0.5, "float32") if is_float else np.full(size, ones, "int32")
        self._data = tvm.runtime.tensor(data)
        self._sums = tvm.runtime.tensor(np.zeros(threads * vectors * lanes, sums))
        word = 1 if is_float else _word(numbers, cpu)
        kernel = _multiply_add(lanes, vectors, threads, numbers, word, cpu.shifts_bytes)
        self._kernel = tvm.compile(kernel, target)["main"]
        self._operations = threads * vectors * lanes * 2 * word * _ROUNDS

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


def _word(numbers: str, cpu: CPUInfo) -> int:
    """Numbers in a word that is multiplied at once."""
    if numbers == "bfloat16":
        return WORDS["bfloat16"]
    return WORD_BYTES if numbers in cpu.tiles else cpu.word_channels * (1 + (numbers in cpu.mmla))


def _tile_products(cpu: CPUInfo, threads: int, numbers: str) -> tirx.PrimFunc:
    """Products of tiles of words, ``_TILES`` sums at a time, the same on every thread."""
    shape = TileShape(TILE_ROWS, TILE_WORDS)
    size = threads * _TILES * TILE_ELEMENTS
    with IRBuilder() as builder:
        with ib.prim_func(s_tir=True):
            ib.func_name("main")
            data, sums = (ib.arg(name, ib.buffer((size,), "int32")) for name in ("data", "sums"))
            with ib.sblock("root"):
                ib.reads()
                ib.writes()
                with ib.parallel(0, threads) as thread, ib.sblock("part"):
                    ib.reads()
                    ib.writes()
                    with tile_unit([shape] * (_TILES + 2), numbers, cpu) as unit:
                        for tile in range(_TILES + 2):
                            unit.load(tile, data, 0, TILE_WORDS)
                        with ib.serial(0, _TILE_ROUNDS):
                            for tile in range(_TILES):
                                unit.multiply(tile, _TILES, _TILES + 1)
                        for tile in range(_TILES):
                            unit.store(tile, sums, (thread * _TILES + tile) * TILE_ELEMENTS)
    return builder.get()


def _data_size(lanes: int, vectors: int, is_float: bool) -> int:
    return lanes * (1 if is_float else _WORD_STEPS * (vectors // 2 + 2))


def _multiply_add(
    lanes: int, vectors: int, threads: int, numbers: str, word: int, signed: bool = False
) -> tirx.PrimFunc:
    """``sums = sums * data + data``, ``_ROUNDS`` times in registers; or of words of numbers."""
    is_float = numbers == "float32"
    size, pixels = _data_size(lanes, vectors, is_float), vectors // 2

    def step(
        data: tirx.Buffer, part: tirx.Buffer, vector: tirx.Var, place: tuple[tirx.Var, tirx.Var]
    ) -> tvm.ir.Expr:
        factor, total = data[tirx.Ramp(0, 1, lanes)], part[tirx.Ramp(vector * lanes, 1, lanes)]
        if is_float:
            return total * factor + factor
        # A tile of two vectors of weights; they change, else they would be multiplied once.
        first = tirx.floormod(place[1], _WORD_STEPS) * (pixels + 2)
        places = first + tirx.floordiv(vector, 2), first + pixels + tirx.floormod(vector, 2)
        left, right = (data[tirx.Ramp(number * lanes, 1, lanes)] for number in places)
        if numbers == "bfloat16":
            return add_half_products(total, left, right)
        if word > WORD_BYTES:
            return add_block_products(total, left, right)
        return add_word_products(total, left, right, lanes, word, signed=signed)

    return _probe(size, lanes, vectors, threads, _ROUNDS, step, numbers)


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
    numbers: str = "float32",
) -> tirx.PrimFunc:
    """A function that repeats ``step`` on sums in registers, the same on every thread."""
    is_float, halves = numbers == "float32", numbers == "bfloat16"
    dtype = "float32" if is_float or halves else "int32"
    functions = word_functions(not is_float and not halves, lanes * halves)
    with IRBuilder() as builder:
        with ib.prim_func(s_tir=True):
            ib.func_name("main")
            data = ib.arg("data", ib.buffer((size,), "float32" if is_float else "int32"))
            sums = ib.arg("sums", ib.buffer((threads * vectors * lanes,), dtype))
            ib.func_attr({"tirx.noalias": True})
            with ib.sblock("root"):
                ib.reads()
                ib.writes()
                with functions, ib.parallel(0, threads) as thread:
                    with ib.sblock("part"):
                        ib.reads()
                        ib.writes()
                        part = ib.sblock_alloc_buffer((vectors * lanes,), dtype)
                        _copy(part, 0, sums, thread * (vectors * lanes), vectors, lanes)
                        with ib.serial(0, rounds) as round_:
                            with ib.unroll(0, vectors) as vector:
                                value = step(data, part, vector, (thread, round_))
                                ib.buffer_store(part, value, [tirx.Ramp(vector * lanes, 1, lanes)])
                        _copy(sums, thread * (vectors * lanes), part, 0, vectors, lanes)
    return builder.get()


def _copy(
    to: tirx.Buffer, to_start: object, source: tirx.Buffer, start: object, vectors: int, lanes: int
) -> None:
    with ib.unroll(0, vectors) as vector:
        value = source[tirx.Ramp(start + vector * lanes, 1, lanes)]
        ib.buffer_store(to, value, [tirx.Ramp(to_start + vector * lanes, 1, lanes)])


_ROWS, _WIDTH = 512, 256  # Matrices of each thread.
_EXCHANGES = 8
_LEAST = 2e-12  # seconds of a byte that count as none


class ExchangeProbe:
    """Time of what another core has just written.

    All threads write their shares of an array that fits the caches, then copy either their own
    shares or those of others. In a virtual machine the difference varies up to 15-fold with the
    place of the cores, which may change every few seconds.
    """

    def __init__(self, target: Target, threads: int) -> None:
        self._crew = Crew(threads)
        shape = (threads, _ROWS, _WIDTH)
        self._bytes = 4 * threads * _ROWS * _WIDTH
        self._source, self._copy = (tvm.runtime.tensor(np.zeros(shape, "float32")) for _ in "sc")
        functions = {
            "write": _write(threads),
            "own": _copy_block(threads, 0),
            "other": _copy_block(threads, 1),
        }
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

    ``write``: writes an array with all threads. ``copies``: copies the array; by the first each
    thread reads what it has written, by the second what another one has. ``size``: bytes of the
    array.
    """
    times: tuple[list[float], ...] = ([], [])
    for _ in range(_EXCHANGES + 1):
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


def _copy_block(threads: int, distance: int) -> tirx.PrimFunc:
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
