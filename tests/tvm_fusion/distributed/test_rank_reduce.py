# SPDX-License-Identifier: Apache-2.0
"""Reductions over real processes: every operator, type and form, empty parts, bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mpi_ranks import needs_mpi, run_ranks

from tvm_fusion import distributed
from tvm_fusion.distributed.world.local_world import LocalWorld
from tvm_fusion.errors import OpError, TargetError

PROGRAM = Path(__file__).with_name("reduce_program.py")


@pytest.mark.slow  # two ranks have them in test_processes.py
@needs_mpi
@pytest.mark.parametrize(("ranks", "cases"), [(3, "all"), (5, "few")])
def test_reductions(ranks: int, cases: str) -> None:
    outcome = run_ranks(ranks, PROGRAM, cases)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("all checked") == ranks


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("operator", "dtype", "columns"),
    [("min", "int32", 6), ("or", "bool", 6), ("sum", "int8", 500)],
)
def test_threads_of_one_process(operator: str, dtype: str, columns: int) -> None:
    whole = np.random.default_rng(0).integers(0, 2, (7, columns)).astype(dtype)
    parts = whole[:2], whole[2:]
    found = distributed.run_ranks(
        2, lambda world: distributed.reduce(world, parts[world.rank], operator, np.int64(0))
    )
    combine = {"min": np.min, "or": np.any, "sum": np.sum}[operator]
    for each in found:
        np.testing.assert_array_equal(each, combine(whole, axis=0))


@pytest.mark.slow
def test_threads_share_out_many_outputs() -> None:
    """Also one kernel, whose inputs of all threads are copied, since none begins at 64 bytes."""

    def work(world: LocalWorld) -> list[np.ndarray]:
        return [distributed.reduce(world, part[world.rank], "argmax", 0) for part in parts]

    wholes = np.random.default_rng(0).random((50, 8, 9001), np.float32)
    parts = [np.split(whole, 4) for whole in wholes]
    for found in distributed.run_ranks(4, work):
        np.testing.assert_array_equal(found, wholes.argmax(1))


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"axes": 0.5}, OpError, "axes have 0.5; expected integers"),
        ({"axes": "0"}, OpError, "axes have '0'; expected integers"),
        ({"axis": None}, OpError, "axis is None; expected an integer"),
        ({"part": np.ma.masked_less(np.ones(3), 2)}, OpError, "the part is a masked array"),
        ({"part": np.ones(3, bool)}, OpError, "sum of bool; .* cast it first, or reduce by 'and'"),
        ({"part": np.ones(3, int), "operator": "mean"}, OpError, "floating-point type: cast it fi"),
        ({"target": "cuda -arch=sm_90"}, TargetError, "is a GPU; parts are reduced by the ranks'"),
    ],
)
def test_refused(arguments: dict, error: type[Exception], reason: str) -> None:
    given = {"part": np.ones((2, 3), np.float32), "operator": "sum"} | arguments
    with pytest.raises(error, match=reason):
        distributed.run_ranks(1, lambda world: distributed.reduce(world, **given))
