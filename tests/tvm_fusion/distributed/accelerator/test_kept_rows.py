# SPDX-License-Identifier: Apache-2.0
"""Rows that stay on devices from step to step: the results of the CPU alone, counted copies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_runs import WatchedDriver, run
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_nests import Interpreter, elements, gaps, heat2d, heat3d, lagging, random_arrays
from mpi_ranks import needs_mpi, run_ranks
from opencl import opencl_context
from tvm import te, tirx

from examples.stencils import function, image, wave2d
from schedules.distribute.cost import Processor
from schedules.distribute.split import Accelerator
from schedules.distribute.time_skewing import skew_of
from schedules.distribute.transfer import send_recv
from tvm_fusion.distributed import Device, compile, measure_split, program
from tvm_fusion.distributed.local_program import LocalProgram
from tvm_fusion.distributed.world import local_world
from tvm_fusion.errors import InvalidInputError, OpError, TargetError

pytestmark = pytest.mark.usefixtures("as_gpu")

PROGRAM = Path(__file__).with_name("gpu_aware_program.py")
MOVE = send_recv("A", (4, 5), 0, 1)
FIELDS = {"A": "next", "V": "speed"}
ALONE = {"devices": ["opencl"], "split": [0, 11]}  # all rows of heat2d on one device


def check(
    func: Any, steps: int, ranks: int = 1, repeat: Mapping[str, str] | str = "A", **options: Any
) -> Any:
    """Compile for devices, and compare with one rank without."""
    arrays = random_arrays(func)
    program = compile(func, ranks, repeat=repeat, **options)
    expected = run(compile(func, 1, repeat=repeat), arrays, steps)
    for found, wanted in zip(run(program, arrays, steps), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)
    return program


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("steps", [1, 3])
def test_only_halos_are_copied_between_steps(steps: int, opened: list[WatchedDriver]) -> None:
    """Counted against every element that each side reads of the other."""
    func = heat2d()
    program = check(func, steps, devices=["opencl"], split=[4, 7])
    interpreter = Interpreter(func)
    cpu, device = (set(elements((rows, (0, 7)))) for rows in ((0, 4), (4, 11)))
    # Corners are not read, but lie in the box of what is.
    read, read_by_cpu = (
        {(at[0], j) for index in rows for _, at in interpreter.reads(index) for j in range(7)}
        for rows in (device, cpu)
    )
    into, out = len(read - device), len(read_by_cpu & device)
    assert into > 0 and out > 0
    step = [("kernel", 0), ("out", 4 * out), ("in", 4 * into)]
    wanted = [("in", 4 * len(read)), *step * (steps - 1), ("kernel", 0), ("out", 4 * len(device))]
    assert opened[0].log == wanted
    assert program.shares.devices[0][0].sequence.kept.bytes({"A": 4, "next": 4}) == (
        4 * into,
        4 * out,
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_halos_of_several_steps(
    steps: int, opened: list[WatchedDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every two steps: two rows of the CPU are copied in, and two that it reads out.

    The CPU begins when no copy from its windows is left, since its second step overwrites them.
    """
    func = heat2d(24, 7)
    run_steps, waiting = LocalProgram.run_steps, []

    def noted(self: LocalProgram, first: int = 0) -> None:
        waiting.extend(len(driver.queues[0]._events) for driver in opened)
        run_steps(self, first)

    monkeypatch.setattr(LocalProgram, "run_steps", noted)
    program = check(func, steps, devices=["opencl"], split=[9, 15], exchange_every=2)
    assert "56 in and 56 out every 2 steps" in program.explain()
    row, begun = 4 * 7, steps % 2  # a run of an odd number of steps ends with one
    both, one = [("kernel", 0)] * 2, [("kernel", 0)]
    between = [("out", 2 * row), ("in", 2 * row)]
    rounds = [both] * (steps // 2) + [one] * begun
    wanted = [("in", 17 * row), *rounds[0]]
    for kernels in rounds[1:]:
        wanted += [*between, *kernels]
    assert opened[0].log == [*wanted, ("out", 15 * row)]
    assert waiting == [0] * len(rounds)


def test_not_from_what_nobody_has_filled() -> None:
    a = te.placeholder((8, 3), "int32", "A")
    out = te.compute((8, 3), lambda i, j: 100 // a[te.min(i + 1, 7), j], "out")
    func = te.create_prim_func([a, out], index_dtype_override="int64")
    options: Any = {"devices": ["opencl"], "split": [2, 6], "repeat": "A"}
    assert compile(func, exchange_every="auto", **options).distribution.deep == 1
    with pytest.raises(OpError, match="exchange_every is 2, and the function divides or indexes"):
        compile(func, exchange_every=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "split"), [(1, [90, 70]), (2, [50, 30])])
def test_beside_steps_that_pass_over_the_memory_together(
    ranks: int, split: list[int], opened: list[WatchedDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(plan: Any, rank: int, rows: Any, _: int, threads: int) -> Any:
        return skew_of(plan, rank, rows, 1 << 13, threads)

    monkeypatch.setattr(program, "skew_of", small)
    for steps in (6, 5, 1):
        options: Any = {"split": dict.fromkeys(range(ranks), split), "exchange_every": 3}
        made = check(lagging(160, 24), steps, ranks, devices=["opencl"], **options)
        assert [piece.steps for pieces in made.pieces for piece in pieces] == [3] * ranks


def zero_border(rows: int = 11, cols: int = 7) -> tirx.PrimFunc:
    """Rows of the border read nothing."""
    a = image(rows, cols)
    return function(
        a,
        te.compute(
            (rows, cols),
            lambda i, j: tirx.if_then_else(
                tirx.all(0 < i, i < rows - 1), a[i - 1, j] + 0.5 * a[i + 1, j], 0.0
            ),
            "next",
        ),
    )


def rows_below(rows: int = 8, cols: int = 3) -> tirx.PrimFunc:
    """The first row of a part is not read by the part."""
    a = image(rows, cols)
    return function(
        a, te.compute((rows, cols), lambda i, j: 0.5 * a[te.min(i + 1, rows - 1), j], "next")
    )


def two_of_one_block(rows: int = 12, cols: int = 6) -> tirx.PrimFunc:
    """One block whose outputs read different rows."""
    a, v = image(rows, cols), image(rows, cols, name="V")
    k = te.reduce_axis((0, 3), "k")
    near = lambda i: te.min(te.max(i + k - 1, 0), rows - 1)  # noqa: E731
    sums = te.comm_reducer(
        lambda mine, other: (mine[0] + other[0], mine[1] + other[1]),
        lambda *types: tuple(tirx.const(0, each) for each in types),
    )
    both = te.compute(
        (rows, cols), lambda i, j: sums((0.3 * a[near(i), j], 0.2 * v[i, j]), axis=k), "both"
    )
    return function(a, v, *both)


@pytest.mark.slow
@pytest.mark.parametrize("deep", [2, 3])
@pytest.mark.parametrize(
    ("func", "split"),
    [(zero_border(), [1, 10]), (zero_border(), [10, 1]), (rows_below(), [2, 6]), (gaps(), [4, 8])],
    ids=["border of the CPU", "border of the device", "rows below", "gaps"],
)
def test_steps_that_read_other_rows(
    func: Any, split: list[int], deep: int, opened: list[WatchedDriver]
) -> None:
    """Steps compute other rows than those that follow, or none."""
    for steps in (deep, 2 * deep + 1):
        check(func, steps, devices=["opencl"], split=split, exchange_every=deep)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("func", "ranks", "options"),
    [
        pytest.param(heat2d(), 1, ALONE, marks=pytest.mark.slow),
        (heat2d(), 1, {**ALONE, "exchange_every": 3}),
        (
            two_of_one_block(),
            1,
            {"devices": ["opencl"], "split": [4, 8], "repeat": {"A": "both.v0", "V": "both.v1"}},
        ),
        (
            heat2d(),
            1,
            {"devices": ["opencl", "opencl"], "split": [3, 1, 7], "exchange_every": 2},
        ),
        (heat2d(24, 7), 3, {"devices": ["opencl"], "split": [3, 5], "exchange_every": 3}),
        (
            wave2d(20, 6),
            2,
            {
                "devices": ["opencl"],
                "split": {1: [4, 6]},
                "repeat": FIELDS,
                "exchange_every": 3,
            },
        ),
        (heat2d(), 1, {"devices": ["opencl", "opencl"], "split": [3, 1, 7]}),
        pytest.param(
            heat2d(), 1, {"devices": ["opencl"], "split": [3, 4], "loop": 1}, marks=pytest.mark.slow
        ),
        (heat2d(), 3, {"devices": {0: ["opencl"], 2: ["opencl"]}, "split": {0: [0, 3], 2: [1, 3]}}),
        pytest.param(
            heat2d(),
            4,
            {
                "devices": ["opencl"],
                "loop": ["i", "j"],
                "grid": [2, 2],
                "split": {0: [2, 3], 1: [0, 5], 2: [2, 4], 3: [0, 6]},
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(heat3d(), 2, {"devices": ["opencl"], "split": [1, 2]}, marks=pytest.mark.slow),
        (heat3d(5, 6), 2, {"devices": ["opencl"], "split": [1, 2], "loop": 2}),
        (wave2d(9, 6), 2, {"devices": ["opencl"], "split": {1: [0, 5]}, "repeat": FIELDS}),
    ],
)
def test_steps(func: Any, ranks: int, options: dict[str, Any], opened: list[WatchedDriver]) -> None:
    check(func, 4, ranks, **options)
    assert opened


def test_transfers(opened: list[WatchedDriver]) -> None:
    """A rank that has received what a device computes sends it on."""
    moves = [send_recv("A", (3, 5), 0, 1), send_recv("A", (4, 6), 1, 0)]
    check(heat2d(), 4, 2, devices=["opencl"], split={0: [0, 5], 1: [2, 4]}, transfers=moves)


def test_inputs_that_no_step_changes(opened: list[WatchedDriver]) -> None:
    a, factor = te.placeholder((8, 3), name="A"), te.placeholder((8, 3), name="F")
    out = te.compute((8, 3), lambda i, j: a[te.min(i + 1, 7), j] * factor[i, j], "out")
    func = te.create_prim_func([a, factor, out], index_dtype_override="int64")
    check(func, 3, devices=["opencl"], split=[2, 6])
    assert [size for what, size in opened[0].log if what == "in"] == [60, 72]  # F once


@given(data=st.data())
@settings(max_examples=max(3, settings.default.max_examples // 10))
def test_any_split_and_loop(data: st.DataObject) -> None:
    opencl_context()
    loop = data.draw(st.sampled_from([0, 1]))
    extent = (11, 7)[loop]
    first = data.draw(st.integers(0, extent))
    second = data.draw(st.integers(first, extent))
    split = [first, second - first, extent - second]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tvm_fusion.distributed.program.open_driver", lambda _, index: WatchedDriver(index)
        )
        check(heat2d(), 3, loop=loop, devices=["opencl", "opencl"], split=split)


def test_chunks_pass_through_the_device(opened: list[WatchedDriver]) -> None:
    program = compile(heat2d(), devices=[Device("opencl", chunks=2)], repeat="A", split=[0, 11])
    assert program.shares.devices[0][0].sequence.kept is None


@pytest.mark.slow
def test_the_split_of_the_model() -> None:
    """Copies of all rows take longer than their computation; those of halos do not."""
    figures = Accelerator(rate=3e9, bandwidth=1e12, link=1e8, latency=1e-9)
    rows = []
    for chunks in (None, 8):
        device = Device("opencl", figures=figures, chunks=chunks)
        cpu = Processor(rate=1e9, bandwidth=1e12)
        program = compile(heat2d(400, 64), devices=[device], processor=cpu, repeat="A")
        rows += [
            end - begin for [share] in program.shares.devices for begin, end in [share.rows[0]]
        ]
    assert rows[0] > 250 > 150 > rows[1]


@pytest.mark.slow
def test_measured_split(opened: list[WatchedDriver]) -> None:
    found = measure_split(heat2d(64, 32), ["opencl"], repeat="A")
    assert found.devices[0](64) > 0
    used = [driver for driver in opened if driver.queues]
    copies = [what for what, _ in used[-1].log if what != "kernel"]
    assert copies == ["in"]  # all rows are there, and nobody reads them


@pytest.mark.slow
def test_explain() -> None:
    device = Device("opencl", figures=Accelerator(rate=1e9, bandwidth=1e9, link=1e9, latency=1e-6))
    program = compile(heat2d(), devices=[device], split=[4, 7], repeat="A")
    assert "opencl:0 meanwhile: 4:11, which stay there; " in program.explain()
    assert " in first, 196 out last, " in program.explain()
    compiled = compile(heat2d(), devices=["cuda -arch=sm_90"], split=[4, 7], repeat="A")
    assert compiled.shares.devices[0][0].code.cubin.startswith(b"\x7fELF")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"devices": ["opencl"], "split": [1, 10]}, InvalidInputError, "rows of rank 0 do not"),
        ({**ALONE, "repeat": None}, InvalidInputError, "do not stay on one device; compile the"),
        ({}, InvalidInputError, "one device a rank without chunks="),
        ({"ranks": 2, "transfers": [MOVE]}, InvalidInputError, "has transfers of inputs; leave"),
        (ALONE, TargetError, "MPI takes no memory of opencl:0"),
    ],
)
def test_gpu_aware_refused(
    options: dict[str, Any],
    error: type[Exception],
    reason: str,
    opened: list[WatchedDriver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_world.LocalWorld, "takes_device_memory", True)
    program = compile(heat2d(), **{"ranks": 1, "repeat": "A"} | options)
    with pytest.raises(error, match=reason):
        local_world.run_ranks(program.ranks, lambda world: program.on(world, gpu_aware=True))


def test_gpu_aware_refuses_halos_that_the_host_keeps(
    opened: list[WatchedDriver],
) -> None:
    field, speed = (te.placeholder((12, 6), "float32", name) for name in ("A", "speed"))

    def around(data: te.Tensor, i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        return data[tirx.max(i - 1, 0), j] + data[tirx.min(i + 1, 11), j]

    result = te.compute((12, 6), lambda i, j: around(field, i, j) * around(speed, i, j), "next")
    func = te.create_prim_func([field, speed, result], index_dtype_override="int64")
    split = {0: [0, 6], 1: [0, 6]}
    program = compile(func, ranks=2, repeat="A", devices=["opencl"], split=split)
    with pytest.raises(InvalidInputError, match="ranks exchange speed, which no step computes"):
        local_world.run_ranks(2, lambda world: program.on(world, gpu_aware=True))


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("axis", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_ranks_with_gpus(axis: int) -> None:
    """Halos through memory of the host, and from GPU to GPU: of rows, and of columns."""
    outcome = run_ranks(3, PROGRAM, str(axis))
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("all checked") == 3
