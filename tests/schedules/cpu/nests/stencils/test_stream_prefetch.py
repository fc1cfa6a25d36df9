# SPDX-License-Identifier: Apache-2.0
"""Prefetches of what streaming nests read: one for each line that is new to the caches."""

from __future__ import annotations

import numpy as np
import pytest
from cpu.machine_cases import loops_of, target_of
from cpu.rule_cases import draw, function, run, schedule, tensor
from tvm import ir, te, tirx

from examples.stencils import STENCILS
from schedules.cpu.loops.fallback import Elementwise
from schedules.cpu.nests import streaming_stores
from schedules.cpu.nests.stencil_rows import ROWS
from schedules.cpu.nests.streaming_stores import PREFETCH
from schedules.cpu.nests.work_groups import work_groups
from schedules.tir.expression_walk import extern_name, nodes
from schedules.tir.index_math import simplified


@pytest.fixture
def streamed(monkeypatch):
    """Every output bypasses the caches, however small."""
    monkeypatch.setattr(streaming_stores, "_LEAST_CACHES", 0)


def prefetched(func: tirx.PrimFunc) -> list[list[str]]:
    """The prefetches of each innermost loop that has some."""
    found = loops_of({"f": schedule(Elementwise(), func, target_of("znver4"))}, "znver4")["f"]
    lines = [[i for i in loop.instructions if i.name == "prefetcht1"] for loop in found]
    return [each for each, loop in zip(lines, found, strict=True) if each and loop.innermost]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["blur", "heat2d"])
def test_the_last_row_that_is_read(streamed, name):
    assert ROWS in map(len, prefetched(STENCILS[name](64, 4096)))


@pytest.mark.parametrize(
    ("name", "cols", "distances"),
    [
        ("heat2d", 4096, {ROWS * 4096, 512}),  # steps of rows, and single rows at the border
        ("blur", 4096, {ROWS * 4098}),
        ("blur", 65536, {512}),  # too long for the cache
        ("blur", 64, {512}),  # too short to be on the way
        ("pipeline", 4096, {512}),
    ],
)
def test_distances(streamed, name, cols, distances):
    scheduled = schedule(Elementwise(), STENCILS[name](64, cols), target_of("znver4"))
    calls = [call for call in nodes(scheduled.body, ir.Call) if extern_name(call) == PREFETCH]
    last = [simplified(call.args[1].args[0].indices[-1]) for call in calls]
    found = {max((abs(int(n)) for n in nodes(index, tirx.IntImm)), default=0) for index in last}
    assert {n - n % 4 for n in found} == distances  # the last load of blur is two columns on


def test_each_tensor_of_adjacent_elements(streamed):
    x, y = tensor("x", 64, 1024), tensor("y", 64, 1024)
    out = te.compute((64, 512), lambda i, j: x[i, j] + x[i, j + 2] + y[i, j])
    scheduled = schedule(Elementwise(), function([x, y], out), target_of("znver4"))
    assert scheduled.script().count(f'"{PREFETCH}"') == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "index", [lambda i, j: (i, j * 2), lambda i, j: (i, 511 - j), lambda i, j: (i, j // 2)]
)
def test_no_other_places(streamed, index):
    x = tensor("x", 64, 1024)
    func = function([x], te.compute((64, 512), lambda i, j: x[index(i, j)] * 2.0))
    assert PREFETCH not in schedule(Elementwise(), func, target_of("znver4")).script()
    a = draw((64, 1024))
    rows, cols = np.indices((64, 512))
    np.testing.assert_array_equal(
        run(schedule(Elementwise(), func), a)[0], a[index(rows, cols)] * 2
    )


def test_nothing_in_the_caches():
    assert PREFETCH not in schedule(Elementwise(), STENCILS["blur"](64, 512)).script()


def test_work_groups_prefetch_in_opencl(streamed):
    found = work_groups(schedule(Elementwise(), STENCILS["blur"](64, 512), target_of("znver4")))
    assert found is not None
    assert any(PREFETCH in text and "__builtin_prefetch(at" in text for text in found.before)
