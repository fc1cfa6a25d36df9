# SPDX-License-Identifier: Apache-2.0
"""Rows of filters with a border: those of a step share their loads where no condition fails."""

from __future__ import annotations

import numpy as np
import pytest
from cpu.machine_cases import loops_of, target_of
from cpu.rule_cases import HOST, draw, function, loops, parallel, run, schedule, tensor
from tvm import te, tirx
from tvm.script import tirx as T
from tvm.target import Target

from examples.stencils import STENCILS
from schedules.cpu.loops.fallback import Elementwise
from schedules.cpu.nests import elementwise_nest, streaming_stores
from schedules.cpu.nests.stencil_rows import ROWS
from schedules.distribute.distribute import distribute
from schedules.distribute.localize import localize
from tests.selection import in_turns
from tvm_fusion import distributed
from tvm_fusion.distributed import run_ranks

REPEAT = {"heat2d": {"A": "next"}, "heat3d": {"A": "next"}, "wave2d": {"A": "next", "V": "speed"}}


def steps(func: tirx.PrimFunc) -> list[tirx.For]:
    return loops(func, tirx.ForKind.UNROLLED)


def padded(rows: int, cols: int, above: int, below: int) -> tirx.PrimFunc:
    """A filter along the columns of an image with rows of zeros around."""
    x = tensor("x", rows, cols)
    inside = te.compute(
        (rows + above + below, cols),
        lambda i, j: tirx.if_then_else(
            tirx.all(above <= i, i < above + rows), x[tirx.max(i - above, 0), j], 0.0
        ),
    )
    out = te.compute(
        (rows + above + below - 2, cols),
        lambda i, j: inside[i, j] + inside[i + 1, j] * 2.0 + inside[i + 2, j],
    )
    return function([x], out)


def row_by_row(monkeypatch, func: tirx.PrimFunc) -> tirx.PrimFunc:
    with monkeypatch.context() as patched:
        patched.setattr(elementwise_nest, "shared_rows", lambda *_: None)
        return schedule(Elementwise(), func)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", ["znver4", "x86-64-v3"])
@pytest.mark.parametrize(("name", "size"), [("heat2d", (64, 512)), ("heat3d", (64, 512))])
def test_rows_inside_a_border_share_their_loads(cpu, name, size):
    plan = distribute(STENCILS[name](*size), 0, 2)
    part = plan.parts[0]
    func = localize(plan.nest, part.rows, part.windows).func
    found = loops_of({"h": schedule(Elementwise(), func, target_of(cpu))}, cpu)["h"]
    # Rows share the two rows, or planes, beside them, but for the outermost.
    own = 3 if name == "heat2d" else 5
    inside = [loop for loop in found if loop.innermost and loop.fmas == 2 * ROWS]
    assert min(loop.loads for loop in inside) <= own * ROWS + 2
    assert not any(loop.stack_loads or loop.stack_stores for loop in inside)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("size", "name", "stream"),
    in_turns(
        [(8, 16), (9, 53), (37, 64), (30, 15)],
        ["heat2d", "heat3d", "wave2d"],
        [False, True],
    ),
)
def test_numbers_are_those_of_single_rows(monkeypatch, name, size, stream):
    if stream:
        monkeypatch.setattr(streaming_stores, "_LEAST_CACHES", 0)
    func = STENCILS[name](*size)
    count = len(func.params) - len(REPEAT[name])
    inputs = [draw([int(n) for n in param.shape], k) for k, param in enumerate(func.params[:count])]
    scheduled, alone = schedule(Elementwise(), func), row_by_row(monkeypatch, func)
    assert steps(scheduled) and not steps(alone)
    for found, expected in zip(run(scheduled, *inputs), run(alone, *inputs), strict=True):
        np.testing.assert_array_equal(found, expected)
    if name == "heat2d":
        (a,) = inputs
        change = a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:] - 4 * a[1:-1, 1:-1]
        expected = a.copy()
        expected[1:-1, 1:-1] += np.float32(0.1) * change
        np.testing.assert_allclose(run(scheduled, a)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("size", [(8, 20), (9, 21)])
def test_conditions_on_other_loops(monkeypatch, size):
    func = STENCILS["heat3d"](*size)
    a = draw([int(n) for n in func.params[0].shape])
    alone = row_by_row(monkeypatch, func)
    monkeypatch.setattr(elementwise_nest, "shared_rows", lambda *_: 1)  # not the planes
    together = schedule(Elementwise(), func)
    assert steps(together)
    np.testing.assert_array_equal(run(together, a)[0], run(alone, a)[0])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("above", [0, 1, 5])
@pytest.mark.parametrize("below", [0, 2, 9])
def test_conditions_on_rows_alone(above, below):
    func = padded(21, 40, above, below)
    scheduled = schedule(Elementwise(), func)
    assert steps(scheduled)
    x = draw((21, 40))
    wide = np.pad(x, ((above, below), (0, 0)))
    expected = wide[:-2] + wide[1:-1] * 2 + wide[2:]
    np.testing.assert_allclose(run(scheduled, x)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REPEAT))
@pytest.mark.parametrize("sizes", [[1, 3, 19, 2, 12], [12, 25], [0, 36, 1]])
def test_ranks_have_the_bits_of_one(name, sizes):
    func = STENCILS[name](37, 21)

    def work(program):
        def steps_of(world):
            local = program.on(world)
            for number, buffer in enumerate(program.distribution.nest.inputs):
                held = local.input(buffer.name)
                whole = draw([int(n) for n in buffer.shape], number)
                held.owned[...] = whole[tuple(slice(*ends) for ends in held.region)]
            local(3)
            return {name: local.input(name).owned.copy() for name in REPEAT[name]}

        return steps_of

    alone = run_ranks(1, work(distributed.compile(func, 1, repeat=REPEAT[name])))[0]
    parts = run_ranks(len(sizes), work(distributed.compile(func, sizes=sizes, repeat=REPEAT[name])))
    for buffer, expected in alone.items():
        together = np.concatenate([part[buffer] for part in parts])
        np.testing.assert_array_equal(together, expected)


@pytest.mark.slow
def test_more_ranks_than_rows():
    func = STENCILS["heat2d"](9, 40)
    program = distributed.compile(func, 11)
    whole = draw((9, 40))

    def work(world):
        local = program.on(world)
        held = local.input("A")
        held.owned[...] = whole[tuple(slice(*ends) for ends in held.region)]
        return local().copy()

    expected = run(schedule(Elementwise(), func), whole)[0]
    np.testing.assert_array_equal(np.concatenate(run_ranks(11, work)), expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "condition",
    [
        lambda i, j: i + 1 < j,  # A condition on a row and a column together.
        lambda i, j: i % 2 == 0,  # A condition on every other row.
    ],
)
def test_other_conditions_leave_rows_alone(condition):
    x = tensor("x", 34, 64)
    out = te.compute(
        (32, 64),
        lambda i, j: tirx.if_then_else(condition(i, j), x[i, j] + x[i + 1, j] + x[i + 2, j], 0.0),
    )
    scheduled = schedule(Elementwise(), function([x], out))
    assert not steps(scheduled)
    a = draw((34, 64))
    rows, cols = np.indices((32, 64))
    expected = np.where(
        np.vectorize(lambda i, j: bool(condition(int(i), int(j))))(rows, cols),
        a[:-2] + a[1:-1] + a[2:],
        0,
    )
    np.testing.assert_allclose(run(scheduled, a)[0], expected, rtol=1e-6, atol=1e-6)


@T.prim_func(private=True, s_tir=True)
def bound(x: T.Buffer((34, 64), "float32"), o: T.Buffer((32, 64), "float32")):
    for i, j in T.grid(32, 64):
        with T.sblock("o"):
            v, w = T.axis.remap("SS", [i, j])
            at: T.let[T.int32] = v + w
            o[v, w] = T.if_then_else(
                v < 30 and at < 40, x[v, w] + x[v + 1, w] + x[v + 2, w], T.float32(0)
            )


def test_conditions_on_what_a_block_binds_stay_in_it():
    a = draw((34, 64))
    rows, cols = np.indices((32, 64))
    expected = np.where((rows < 30) & (rows + cols < 40), a[:-2] + a[1:-1] + a[2:], 0)
    np.testing.assert_allclose(run(schedule(Elementwise(), bound), a)[0], expected, atol=1e-5)


def test_every_core_has_steps():
    def rows_in_parallel(cores: int) -> list[int]:
        target = Target({**dict(HOST.export()), "num-cores": cores})
        return parallel(schedule(Elementwise(), STENCILS["heat2d"](32, 4096), target))

    assert rows_in_parallel(2) == [32 // ROWS]
    assert rows_in_parallel(16) == [32]
