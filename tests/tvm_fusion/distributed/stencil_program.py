# SPDX-License-Identifier: Apache-2.0
"""Program of every rank in ``test_processes.py``: stencils, compared with one rank's bits."""

from __future__ import annotations

import numpy as np
from loop_nests import CASES, random_arrays

from tvm_fusion import distributed
from tvm_fusion.distributed.local_program import LocalProgram, Ranks
from tvm_fusion.distributed.local_world import run_ranks
from tvm_fusion.distributed.program import Overlap

CASES_OF_RANKS: tuple[tuple[str, tuple[int, ...], str | None, Overlap], ...] = (
    ("blur", (0,), None, "always"),
    ("chain", (0,), None, "never"),
    ("heat2d", (0, 1), "A", "always"),
    ("heat2d", (0,), "A", "never"),
)
"""Function, distributed loops, input that takes the output in the next step, overlap."""


def part_of(program: distributed.Program, world: Ranks) -> tuple[LocalProgram, np.ndarray]:
    """This rank's result, with poison in what it does not own."""
    local = program.on(world)
    arrays = random_arrays(program.distribution.nest.func)
    for buffer in program.distribution.nest.inputs:
        held = local.input(buffer.name)
        held.window.array[...] = np.nan
        held.owned[...] = arrays[buffer.name][tuple(slice(*ends) for ends in held.region)]
    steps = 4 if program.repeat else 1
    return local, local(steps)


def check(
    world: distributed.World,
    name: str,
    loops: tuple[int, ...],
    repeat: str | None,
    overlap: Overlap,
) -> None:
    """Compare this rank's part with the same part of one rank's result."""
    whole = distributed.compile(CASES[name](), 1, repeat=repeat)
    ((_, expected),) = run_ranks(1, lambda one: part_of(whole, one))
    program = distributed.compile(
        CASES[name](),
        world.size,
        loop=loops,
        repeat=repeat,
        overlap=overlap,
        exchange_every=3 if repeat and overlap == "never" else 1,
    )
    local, rows = part_of(program, world)
    mine = expected[tuple(slice(*ends) for ends in local.output.region)]
    np.testing.assert_array_equal(rows, mine, f"{name} {loops} {overlap}")


if __name__ == "__main__":
    with distributed.session() as world:
        for case in CASES_OF_RANKS:
            check(world, *case)
        print(f"rank {world.rank}: all the same bits", flush=True)
