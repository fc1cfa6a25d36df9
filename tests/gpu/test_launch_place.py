# SPDX-License-Identifier: Apache-2.0
"""Calls that share the scratch of one module: their blocks mixed at will, and in several queues."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cuda_text import cuda_source, ptxas
from group_cases import Group
from opencl import BLOCK_BY_BLOCK, Session, compile_opencl, new_queue
from reduce_cases import CUDA, OPENCL, Case, check, random_data, reference
from tvm import relax

from schedules.gpu.launch_place import HEADER_WORDS, PLACES
from schedules.gpu.reduce_config import ticket_words

op = relax.op

# Several tiles and splits, but few blocks; one tile; columns.
SHAPES: dict[str, tuple[tuple[int, ...], list[int]]] = {
    "x": ((3, 2060), [1]),
    "all": ((5003,), [0]),
    "y": ((200, 70), [0]),
}


class Calls:
    """Calls of one kernel, each with inputs and outputs of its own, and one scratch for all."""

    def __init__(self, case: Case, count: int, rng: np.random.Generator, shape: tuple[int, ...]):
        self.case = case
        kernels = compile_opencl(case.func, OPENCL, BLOCK_BY_BLOCK)
        self.inputs = [random_data(rng, "sum", "float32", shape) for _ in range(count)]
        kept = reference("sum", self.inputs[0], case.workload.axes).shape
        self.sessions: list[Session] = []
        for data in self.inputs:
            first = self.sessions[0] if self.sessions else None
            self.sessions.append(
                kernels.session(*case.arguments(data, kept), other=first, shared=[1])
            )
        self.grid = kernels.launches(*case.arguments(self.inputs[0], kept))[0].grid

    def check(self) -> None:
        """All results, and that every place is free and every ticket at zero."""
        for session, data in zip(self.sessions, self.inputs, strict=True):
            wanted = reference("sum", data, self.case.workload.axes)
            check("sum", np.array(session.read()[-1]), data, wanted)
        scratch = np.array(self.sessions[0].read()[1])
        assert not scratch[: ticket_words(self.case.config, self.case.loops)].any()


@pytest.mark.parametrize("count", [2, PLACES])
@pytest.mark.parametrize("form", SHAPES)
def test_blocks_of_several_launches_in_any_order(
    form: str, count: int, rng: np.random.Generator
) -> None:
    shape, axes = SHAPES[form]
    case = Case("sum", "float32", shape, axes, "last_block")
    calls = Calls(case, count, rng, shape)
    assert case.config.splits > 1 and calls.grid[0] * calls.grid[1] > 2
    for _ in range(5):
        blocks = [
            (session, x, y)
            for session in calls.sessions
            for x in range(calls.grid[0])
            for y in range(calls.grid[1])
        ]
        for number in rng.permutation(len(blocks)):
            session, x, y = blocks[number]
            session.launch_block(x, y, 0)
        calls.check()
