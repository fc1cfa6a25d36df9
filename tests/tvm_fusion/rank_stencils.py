# SPDX-License-Identifier: Apache-2.0
"""Stencils over ranks, and the program of every rank that compares them with one rank's bits."""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
from loop_nests import CASES, random_arrays

from tvm_fusion import distributed
from tvm_fusion.distributed import run_ranks
from tvm_fusion.distributed.local_program import LocalProgram, Ranks
from tvm_fusion.distributed.program import Overlap


class Case(NamedTuple):
    """Function, distributed loops, input that takes the output in the next step, overlap."""

    name: str
    loops: tuple[int, ...]
    repeat: str | None
    overlap: Overlap


CASES_OF_RANKS = {
    3: (Case("blur", (0,), None, "always"), Case("heat2d", (0,), "A", "never")),
    4: (Case("heat2d", (0, 1), "A", "always"), Case("chain", (0,), None, "never")),
}
"""Cases by the number of ranks; one exchanges every third step."""


def part_of(program: distributed.Program, world: Ranks) -> tuple[LocalProgram, np.ndarray]:
    """This rank's result, with poison in what it does not own."""
    local = program.on(world)
    arrays = random_arrays(program.distribution.nest.func)
    for buffer in program.distribution.nest.inputs:
        held = local.input(buffer.name)
        held.window.array[...] = np.nan
        held.owned[...] = arrays[buffer.name][tuple(slice(*ends) for ends in held.region)]
    steps = 4 if program.distribution.repeat else 1
    return local, local(steps)


def one_rank(case: Case) -> np.ndarray:
    """The result of one rank."""
    whole = distributed.compile(CASES[case.name](), 1, repeat=case.repeat)
    ((_, result),) = run_ranks(1, lambda world: part_of(whole, world))
    return result


def check(world: distributed.World, case: Case, expected: np.ndarray) -> None:
    """Compare this rank's part with the same part of one rank's result."""
    program = distributed.compile(
        CASES[case.name](),
        world.size,
        loop=case.loops,
        repeat=case.repeat,
        overlap=case.overlap,
        exchange_every=3 if case.repeat and case.overlap == "never" else 1,
    )
    local, rows = part_of(program, world)
    mine = expected[tuple(slice(*ends) for ends in local.output.region)]
    np.testing.assert_array_equal(rows, mine, str(case))


if __name__ == "__main__":
    with distributed.session() as world, np.load(sys.argv[1]) as results:
        for number, case in enumerate(CASES_OF_RANKS[world.size]):
            check(world, case, results[f"arr_{number}"])
        print(f"rank {world.rank}: all the same bits", flush=True)
