# SPDX-License-Identifier: Apache-2.0
"""Stencils over ranks, and the program of every rank that compares them with one rank's bits.

What a rank does not own is poisoned before each exchange.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from loop_nests import CASES, SEVERAL, random_arrays

from schedules.distribute.exchange import Exchange, LocalBuffer, Region
from tvm_fusion import distributed
from tvm_fusion.distributed import Program, run_ranks
from tvm_fusion.distributed.local_program import LocalProgram, Ranks
from tvm_fusion.distributed.program import Overlap
from tvm_fusion.distributed.world.local_world import LocalWorld


class Case(NamedTuple):
    """Function, loops, inputs that take outputs in the next step, overlap, steps an exchange."""

    name: str
    loops: tuple[int, ...]
    repeat: str | Mapping[str, str] | None
    overlap: Overlap
    every: int = 1


_FIELDS = {"A": "next", "V": "speed"}
_STEPS = Case("heat2d", (0,), "A", "always", every=3)
_OF_TWO_FIELDS = Case("wave2d", (0,), _FIELDS, "always")
CASES_OF_RANKS = {
    1: (_OF_TWO_FIELDS,),
    2: (_STEPS, _OF_TWO_FIELDS),
    3: (Case("blur", (0,), None, "always"), _STEPS, Case("wave2d", (0,), _FIELDS, "never", 2)),
    4: (Case("heat2d", (0, 1), "A", "always"), Case("chain", (0,), None, "never"), _OF_TWO_FIELDS),
    7: (Case("blur", (0,), None, "always"), _OF_TWO_FIELDS, _STEPS),
}
"""Cases by the number of ranks."""


def spoil(array: np.ndarray) -> None:
    """Fill an array with NaN, or with a number that stands out."""
    array[...] = np.nan if array.dtype.kind == "f" else 77


def poison(local: LocalProgram, world: Ranks) -> None:
    """Make everything NaN before each exchange that the rank has not been given or computed."""
    start, plan = world.start, local.plan
    kept = {name: [owned] for name, owned in plan.parts[world.rank].owned.items()}
    for transfer in plan.before:
        if transfer.dest == world.rank:
            kept[transfer.buffer].append(transfer.rows)

    def poisoned(exchange: Exchange, buffers: Mapping[str, LocalBuffer]) -> None:
        if exchange.id == plan.exchange.id:
            for buffer in plan.nest.inputs:
                window = buffers[buffer.name]
                held = [window.view(region).copy() for region in kept[buffer.name]]
                spoil(window.array)
                for region, values in zip(kept[buffer.name], held, strict=True):
                    window.view(region)[...] = values
            for buffer in plan.nest.outputs:
                spoil(buffers[buffer.name].array)
        start(exchange, buffers)

    world.start = poisoned  # type: ignore[method-assign]


def slices(region: Region) -> tuple[slice, ...]:
    """Index of a region."""
    return tuple(slice(*ends) for ends in region)


def part_of(
    program: distributed.Program, world: Ranks, steps: int
) -> dict[str, tuple[Region, np.ndarray]]:
    """This rank's part of each output, and its place."""
    local = program.on(world)
    arrays = random_arrays(program.distribution.nest.func)
    for name in (buffer.name for buffer in program.distribution.nest.inputs):
        held = local.input(name)
        held.owned[...] = arrays[name][slices(held.region)]
    start = world.start
    poison(local, world)
    results = local(steps)
    world.start = start  # type: ignore[method-assign]
    results = results if isinstance(results, tuple) else (results,)
    pairs = zip(local.outputs.items(), results, strict=True)
    return {name: (output.region, result) for (name, output), result in pairs}


def compile_case(case: Case, ranks: int) -> distributed.Program:
    """Compile a case."""
    several = ranks > 1
    return distributed.compile(
        (CASES | SEVERAL)[case.name](),
        ranks,
        loop=case.loops,
        repeat=case.repeat,
        overlap=case.overlap if several else "never",
        exchange_every=case.every if several else 1,
    )


def one_rank(case: Case) -> dict[str, np.ndarray]:
    """The results of one rank."""
    program = compile_case(case, 1)
    (found,) = run_ranks(1, lambda world: part_of(program, world, 4 if case.repeat else 1))
    return {f"{case.name}.{name}": result for name, (_, result) in found.items()}


def check(world: distributed.World, case: Case, expected: Mapping[str, np.ndarray]) -> None:
    """Compare this rank's part with the same part of one rank's result."""
    found = part_of(compile_case(case, world.size), world, 4 if case.repeat else 1)
    for name, (region, rows) in found.items():
        mine = expected[f"{case.name}.{name}"][slices(region)]
        np.testing.assert_array_equal(rows, mine, str(case))


if __name__ == "__main__":
    with distributed.session() as world, np.load(sys.argv[1]) as results:
        for case in CASES_OF_RANKS[world.size]:
            check(world, case, results)
        print(f"rank {world.rank}: all the same bits", flush=True)


def run(program: Program, arrays: dict[str, np.ndarray], steps: int = 1) -> np.ndarray:
    """The output of a program on all ranks."""
    [result] = run_all(program, arrays, steps).values()
    return result


def run_all(
    program: Program, arrays: dict[str, np.ndarray], steps: int = 1
) -> dict[str, np.ndarray]:
    """Run a program on all ranks; before each exchange, what a rank does not own is poisoned."""
    nest = program.distribution.nest
    results = {output.name: np.empty_like(arrays[output.name]) for output in nest.outputs}
    for result in results.values():
        spoil(result)

    def work(world: LocalWorld) -> int:
        world.threads = program.threads
        local = program.on(world)
        for buffer in nest.inputs:
            held = local.input(buffer.name)
            held.owned[...] = arrays[buffer.name][slices(held.region)]
        poison(local, world)
        found = local(steps)
        parts = found if isinstance(found, tuple) else (found,)
        for (name, output), part in zip(local.outputs.items(), parts, strict=True):
            results[name][slices(output.region)] = part
        return sum(size for _, size in world.sent)

    sent = run_ranks(program.ranks, work)
    deep = program.distribution.deep
    assert sum(sent) == program.distribution.bytes * -(-steps // deep)
    return results
