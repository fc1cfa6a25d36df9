# SPDX-License-Identifier: Apache-2.0
"""Measurement of what a rank computes and moves by itself, and beside the others of its node."""

from __future__ import annotations

import functools
import operator
import statistics
from collections.abc import Sequence

from tvm import te, tirx

from schedules.cpu.core.machine import CPUInfo
from schedules.distribute.cost import Work, work_of

from ..compiler.targets import resolve
from .program import Program, compile
from .world.communicator import World
from .world.timing import renewed_seconds

_ROWS, _COLUMNS = 512, 1024  # Image that the last-level cache holds with its result.
_TAPS = (0.25, 0.5, 0.25)
_CACHES = 4  # times the last-level cache, which so many bytes pass
_SECONDS = 0.5  # Seconds of a measurement, about.


def rank_rates(world: World) -> dict[str, float]:
    """Measure filters in the caches, and what passes the memory; called by all ranks together.

    Each rank computes with as many threads as the session gave it.

    Returns figures for :func:`.processor_of`: ``rank.rate`` (arithmetic operations/s of filters of
    3x3 pixels, geometric mean of one stage and of two), ``rank.bandwidth`` (bytes/s read and
    written by a rank while the others rest), ``node.bandwidth`` (by all ranks of a node at once)
    and ``node.ranks``.
    """
    rates = []
    for function in (_window(), _separable()):
        program = _compile(world, function)
        operations = _work(program).operations
        rates.append(operations / _seconds(world, program, alone=True))
    copy = _compile(world, _scaled(CPUInfo.from_target(resolve("native", 1)).l3_bytes * _CACHES))
    moved = _work(copy).bytes
    return {
        "rank.rate": statistics.geometric_mean(rates),
        "rank.bandwidth": moved / _seconds(world, copy, alone=True),
        "node.bandwidth": world.node_size * moved / _seconds(world, copy, alone=False),
        "node.ranks": world.node_size,
    }


def _compile(world: World, function: tirx.PrimFunc) -> Program:
    return compile(function, 1, threads=world.threads)


def _work(program: Program) -> Work:
    plan = program.distribution
    return work_of(plan.nest, plan.parts[0].rows, plan.itemsizes)


def _seconds(world: World, program: Program, alone: bool) -> float:
    """Median time of the kernels, of the first rank alone or of the slowest of all."""
    local = program.alone()
    for buffer in local.buffers.values():
        buffer.array.fill(1)  # all pages that nobody has written are one
    run = local.run_pieces if world.rank == 0 or not alone else _rest
    return renewed_seconds(world, world.barrier, _rest, run, _SECONDS)


def _rest() -> None:
    """Let others compute."""


def _window() -> tirx.PrimFunc:
    """A filter of 3x3 pixels in one stage."""
    image = te.placeholder((_ROWS + 2, _COLUMNS + 2), name="image")
    taps = [(y, x, _TAPS[y] * _TAPS[x]) for y in range(3) for x in range(3)]
    out = te.compute(
        (_ROWS, _COLUMNS), lambda i, j: _total([image[i + y, j + x] * w for y, x, w in taps]), "out"
    )
    return te.create_prim_func([image, out])


def _separable() -> tirx.PrimFunc:
    """The same in two stages."""
    image = te.placeholder((_ROWS + 2, _COLUMNS + 2), name="image")
    along = te.compute(
        (_ROWS + 2, _COLUMNS),
        lambda i, j: _total([image[i, j + x] * w for x, w in enumerate(_TAPS)]),
        "along",
    )
    out = te.compute(
        (_ROWS, _COLUMNS),
        lambda i, j: _total([along[i + y, j] * w for y, w in enumerate(_TAPS)]),
        "out",
    )
    return te.create_prim_func([image, out])


def _scaled(nbytes: int) -> tirx.PrimFunc:
    """An element-wise function that moves so many bytes."""
    rows = -(-nbytes // (2 * 4 * _COLUMNS))
    image = te.placeholder((rows, _COLUMNS), name="image")
    out = te.compute((rows, _COLUMNS), lambda i, j: image[i, j] * 0.5 + 1.0, "out")
    return te.create_prim_func([image, out], index_dtype_override="int64")


def _total(terms: Sequence[tirx.Expr]) -> tirx.Expr:
    """The sum, from left to right."""
    return functools.reduce(operator.add, terms)
