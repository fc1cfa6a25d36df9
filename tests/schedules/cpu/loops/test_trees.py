# SPDX-License-Identifier: Apache-2.0
"""Machine code of descents in trees, for CPUs that are not at hand."""

from __future__ import annotations

import pytest
from cpu.machine_cases import CPUS, loops_of
from tvm import tirx

from schedules.cpu.loops.trees import LANES, WORTH_A_FORK, Forest, trees


@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
def test_places_of_descents_stay_in_registers(cpu: str) -> None:
    """A step of all lanes is one loop, which does not branch otherwise or touch the stack."""
    forest = Forest(1000, 10, 1, 60, "uint8", "uint16", "float32", "SUM")
    kernels = {f"rows_{rows}": trees(rows, 20, forest) for rows in (LANES, 100 * LANES)}
    for name, loops in loops_of(kernels, cpu).items():
        texts = [[str(each.text) for each in loop.instructions] for loop in loops]
        compares = ("ucomiss", "vcomiss", "fcmp", "vcmp", "fcmge")
        steps = [
            text
            for loop, text in zip(loops, texts, strict=True)
            if loop.innermost and sum(any(word in line for word in compares) for line in text) > 1
        ]
        assert len(steps) == 1, f"{name} for {cpu}: {len(steps)} loops of descents"
        assert len(steps[0]) <= 12 * LANES, f"{name} for {cpu}: {len(steps[0])} instructions"
        assert not [line for line in steps[0] if "rsp" in line or "sp]" in line or "[sp" in line]


def test_few_steps_are_not_shared_among_threads() -> None:
    forest = Forest(1000, 10, 1, WORTH_A_FORK // 100, "uint8", "uint16", "float32", "SUM")
    shared = {
        rows: "T.parallel" in trees(rows, 20, forest).script()
        for rows in (1, 99, 100, 10_000, tirx.Var("rows", "int64"))
    }
    assert list(shared.values()) == [False, False, True, True, True]
