# SPDX-License-Identifier: Apache-2.0
"""Steps that pass over the memory together have the bits of steps one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_nests import heat2d, heat3d, lagging, random_arrays, wave2d
from rank_stencils import run_all
from tvm import te, tirx

from examples.stencils import function, image, level, pixel, total
from schedules.distribute.cost import Network, Processor, work_of
from schedules.distribute.time_skewing import skew_of
from tvm_fusion.distributed import Program, compile, program


def smooth(rows: int, cols: int) -> tirx.PrimFunc:
    """Pixels of three channels, rounded: kernels link functions for their loads."""
    a = image(rows, cols, 3, dtype="uint8")

    def value(i: tirx.Var, j: tirx.Var, c: tirx.Var) -> tirx.Expr:
        near = total(level(a, i + step, j, c) for step in (-1, 0, 1)) * (1 / 3)
        return tirx.if_then_else(tirx.all(0 < i, i < rows - 1), near, level(a, i, j, c))

    return function(a, te.compute(a.shape, lambda i, j, c: pixel(value(i, j, c), "uint8"), "next"))


CASES: dict[str, tuple[Any, Any]] = {
    "smooth": (smooth, "A"),
    "heat2d": (heat2d, "A"),
    "heat3d": (heat3d, "A"),
    "wave2d": (wave2d, {"A": "next", "V": "speed"}),
    "lagging": (lagging, "A"),
}


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows for a cache of 8 KB, so that small arrays do not fit."""
    monkeypatch.setattr(program, "skew_of", small)


def small(plan: Any, rank: int, rows: Any, _: int, threads: int) -> Any:
    return skew_of(plan, rank, rows, 1 << 13, threads)


def skewed(made: Program) -> list[int]:
    """Ranks whose steps pass over the memory together."""
    return [
        rank for rank, pieces in enumerate(made.pieces) if any(piece.steps > 1 for piece in pieces)
    ]


def check(
    func: tirx.PrimFunc, repeat: Any, runs: Sequence[int], threads: int = 1, **options: Any
) -> Program:
    """Compare runs of some steps with those of a program that computes each step by itself."""
    arrays = random_arrays(func)
    alone = compile(func, 1, repeat=repeat)
    made = compile(func, repeat=repeat, threads=threads, overlap="never", **options)
    for steps in runs:
        expected = run_all(alone, arrays, steps)
        for name, found in run_all(made, arrays, steps).items():
            assert np.isfinite(found).all()
            np.testing.assert_array_equal(found, expected[name])
    return made


@pytest.mark.quick_cases("2-lagging", "1-smooth")
@pytest.mark.usefixtures("small_cache")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_of_single_steps(name: str, threads: int) -> None:
    case, repeat = CASES[name]
    func = case(157, {"heat3d": 4, "smooth": 64}.get(name, 21))
    runs = (9, 8, 7, 6)  # Rounds of five leave four, three, two and one of these.
    assert skewed(check(func, repeat, runs, threads, ranks=2, exchange_every=5)) == [0, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("small_cache")
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_sizes(data: st.DataObject) -> None:
    deep = data.draw(st.integers(2, 6))
    threads = data.draw(st.integers(1, 3))
    sizes = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=3))
    sizes.insert(data.draw(st.integers(0, len(sizes))), data.draw(st.integers(72, 150)))
    func = lagging(sum(sizes), data.draw(st.integers(15, 40)))
    steps = data.draw(st.integers(1, 2 * deep))
    assert skewed(check(func, "A", [steps], threads, sizes=sizes, exchange_every=deep))


@pytest.mark.slow
def test_results_stay_in_the_caches() -> None:
    func = heat2d(1 << 16, 2048)  # each step by itself is written past them
    streams = {
        every: "tvm_fusion_stream" in _text(compile(func, 1, repeat="A", exchange_every=every))
        for every in (1, 8)
    }
    assert streams == {1: True, 8: False}


def _text(made: Program) -> str:
    return "".join(kernel.script() for kernel in made.kernels.values())


@pytest.mark.slow
def test_explained(small_cache: None) -> None:
    made = compile(heat2d(200, 64), 2, repeat="A", exchange_every=4)
    assert made.explain().count("steps_0[0:100] of 4 steps") == 1
    apart = compile(heat2d(200, 64), 2, repeat="A", exchange_every=4, overlap="always")
    assert skewed(made) == [0, 1] and skewed(apart) == []
    slow = Processor(rate=1e6, bandwidth=1e18)
    slower = compile(heat2d(200, 64), 2, repeat="A", exchange_every=4, processor=slow)
    works = [work_of(slower.distribution.nest, ((0, n),), {"A": 4, "next": 4}) for n in (100, 103)]
    least, most = (work.operations / slow.rate for work in works)
    assert least < slower.cpu_seconds(0) < most  # A step has rows of the other's halo.


@pytest.mark.slow
def test_overlap_that_gains_less(small_cache: None) -> None:
    """Messages travel by themselves, but the memory, or the core, takes most of the time."""
    figures: Any = {
        "network": Network(latency=4e-6, bandwidth=1e12, progress=1.0),
        "processor": Processor(rate=1e12, bandwidth=1e9),
    }
    options: Any = {"repeat": "A", "overlap": "auto"} | figures
    assert skewed(compile(heat2d(400, 64), 2, exchange_every=4, **options)) == [0, 1]
    busy = options | {"processor": Processor(rate=1e9, bandwidth=1e12)}
    assert skewed(compile(heat2d(400, 64), 2, exchange_every=4, **busy)) == []


def test_own_schedules_stay(small_cache: None) -> None:
    made = compile(heat2d(200, 64), 2, repeat="A", exchange_every=4, schedule={1: lambda sch: None})
    assert skewed(made) == []


@pytest.mark.slow
def test_chosen_where_arrays_exceed_the_cache(small_cache: None) -> None:
    few, many = heat2d(30, 16), heat2d(400, 16)
    figures: Any = {"processor": Processor(rate=1e12, bandwidth=1e9), "repeat": "A"}
    depths = [
        compile(func, 1, exchange_every="auto", **figures).distribution.deep for func in (few, many)
    ]
    assert depths == [1, 16]
