# SPDX-License-Identifier: Apache-2.0
"""Functions whose steps pass over the memory together: blocks, chunks, predicted times."""

from __future__ import annotations

from typing import Any

import pytest
from loop_nests import blur, cvt_color, heat2d, heat3d, lagging, random_arrays, wave2d
from tvm import te, tirx

from examples.stencils import function, image
from schedules.distribute.cost import Processor
from schedules.distribute.distribute import distribute
from schedules.distribute.time_skewing import Skew, seconds_of_steps, skew_of

CACHE = 1 << 14
FIELDS = {"A": "next", "V": "speed"}


def mirrored(rows: int = 96, cols: int = 16) -> tirx.PrimFunc:
    a = image(rows, cols)
    return function(a, te.compute((rows, cols), lambda i, j: a[rows - 1 - i, j] + 1.0, "next"))


def in_two_stages(rows: int = 96, cols: int = 16) -> tirx.PrimFunc:
    a = image(rows, cols)
    half = te.compute((rows, cols), lambda i, j: a[i, j] * 0.5, "half")
    return function(a, te.compute((rows, cols), lambda i, j: half[i, j] + 1.0, "next"))


def summed(rows: int = 96, cols: int = 16) -> tirx.PrimFunc:
    a, k = image(rows, cols), te.reduce_axis((0, cols), "k")
    return function(a, te.compute((rows, cols), lambda i, j: te.sum(a[i, k] * 0.1, k), "next"))


def with_unused(rows: int = 96, cols: int = 16) -> tirx.PrimFunc:
    a, unused = image(rows, cols), image(3, name="unused")
    return function(a, unused, te.compute((rows, cols), lambda i, j: a[i, j] + 1.0, "next"))


def leaning(rows: int = 96, cols: int = 16) -> tirx.PrimFunc:
    """The second output reads the first one a row below."""
    a, v = image(rows, cols), image(rows, cols, name="V")
    speed = te.compute((rows, cols), lambda i, j: a[i, j] + v[i, j], "speed")
    after = te.compute(
        (rows, cols),
        lambda i, j: tirx.if_then_else(i < rows - 1, speed[i + 1, j], speed[i, j]) * 0.5,
        "next",
    )
    return function(a, v, after, speed)


def chosen(
    func: tirx.PrimFunc,
    steps: int = 4,
    repeat: Any = "A",
    ranks: int = 1,
    threads: int = 1,
    loop: Any = 0,
    cache: int = CACHE,
) -> Skew | None:
    plan = distribute(func, loop, ranks, repeat=repeat, exchange_every=steps)
    found = {skew_of(plan, rank, plan.parts[rank].rows, cache, threads) for rank in range(ranks)}
    assert len(found) == 1
    return found.pop()


def test_blocks() -> None:
    # A row of both arrays has 128 bytes; 128 fit, of which 5 are between the steps.
    assert chosen(heat2d(96, 16)) is None, "all of it fits"
    assert chosen(heat2d(960, 16)) == Skew(steps=4, reach=1, block=32, chunks=1)
    assert chosen(heat2d(960, 16), threads=2) == Skew(steps=4, reach=1, block=32, chunks=2)
    assert chosen(heat2d(960, 16), ranks=3) == Skew(steps=4, reach=1, block=32, chunks=1)
    assert chosen(heat2d(960, 64)) == Skew(steps=4, reach=1, block=24, chunks=1)
    assert chosen(heat2d(960, 64), steps=16) == Skew(steps=16, reach=1, block=12, chunks=1)
    assert chosen(lagging(960)) == Skew(steps=4, reach=2, block=32, chunks=1)
    assert chosen(wave2d(960, 16), repeat=FIELDS) == Skew(4, reach=1, block=32, chunks=1)
    assert chosen(heat3d(960, 4)) == Skew(steps=4, reach=1, block=32, chunks=1)
    assert chosen(with_unused(960)) == Skew(steps=4, reach=0, block=32, chunks=1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("func", "options"),
    [
        pytest.param(heat2d(960, 16), {"steps": 1}, id="one step"),
        pytest.param(heat2d(960, 256), {}, id="rows too long"),
        pytest.param(heat2d(960, 16), {"cache": 0}, id="no cache"),
        pytest.param(heat2d(320, 64), {"loop": [0, 1], "ranks": 4}, id="a grid"),
        pytest.param(heat2d(960, 16), {"ranks": 120}, id="few rows a rank"),
        pytest.param(heat2d(330, 32), {"threads": 40, "steps": 8}, id="few rows a thread"),
        pytest.param(heat2d(9600, 16), {"steps": 65, "cache": 1 << 15}, id="many steps"),
        pytest.param(heat2d(960, 960), {"loop": 1}, id="columns"),
        pytest.param(summed(960), {}, id="a sum"),
        pytest.param(mirrored(960), {}, id="distances that differ"),
        pytest.param(in_two_stages(960), {}, id="a hidden stage"),
        pytest.param(leaning(960), {"repeat": FIELDS}, id="other rows of an output"),
    ],
)
def test_each_step_by_itself(func: tirx.PrimFunc, options: dict[str, Any]) -> None:
    assert chosen(func, **options) is None


def test_functions_without_repeat() -> None:
    for func in (blur(960, 64), cvt_color(960, 64)):
        plan = distribute(func, 0, 2)
        assert skew_of(plan, 0, plan.parts[0].rows, CACHE, 1) is None


def test_ranks_without_rows() -> None:
    plan = distribute(heat2d(960, 16), 0, sizes=[960, 0], repeat="A", exchange_every=4)
    first, second = (skew_of(plan, part.rank, part.rows, CACHE, 1) for part in plan.parts)
    assert first is not None and second is None


def test_predicted_seconds() -> None:
    func = heat2d(960, 64)
    plan = distribute(func, 0, 1, repeat="A", exchange_every=4)
    array, rows = random_arrays(func)["A"].nbytes, plan.parts[0].rows
    slow_memory = Processor(rate=1e18, bandwidth=1e9)
    apart = seconds_of_steps(plan, 0, rows, slow_memory, is_skewed=False)
    together = seconds_of_steps(plan, 0, rows, slow_memory, is_skewed=True)
    assert apart == pytest.approx(4 * 2 * array / 1e9)
    assert together == pytest.approx(2 * 2 * array / 1e9, rel=1e-6)
    slow_core = Processor(rate=1e9, bandwidth=1e18)
    assert seconds_of_steps(plan, 0, rows, slow_core, is_skewed=True) == pytest.approx(
        seconds_of_steps(plan, 0, rows, slow_core, is_skewed=False)
    )
