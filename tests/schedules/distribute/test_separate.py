# SPDX-License-Identifier: Apache-2.0
"""Loops that are cut into parts with schedules of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from loop_nests import chain, random_arrays
from tvm import s_tir

from schedules.distribute.localize import separate_at
from schedules.errors import OpError
from tests.targets import compile_unchecked


def test_pieces_compute_the_whole() -> None:
    func = chain(13)
    pieces = separate_at(func, "i", [3, 9])
    assert [piece.rows for piece in pieces] == [(0, 3), (3, 9), (9, 13)]
    functions = {}
    for number, piece in enumerate(pieces):
        schedule = s_tir.Schedule(piece.function.func)
        if number == 1:
            schedule.unroll(schedule.get_loops(schedule.get_sblock("T"))[-1])
        functions[f"piece_{number}"] = schedule.mod["main"].with_attr(
            "global_symbol", f"piece_{number}"
        )
    functions["whole"] = func.with_attr("global_symbol", "whole")
    library = compile_unchecked(tvm.IRModule(functions))
    arrays = random_arrays(func)
    expected, result = (np.full_like(arrays["T"], np.nan) for _ in range(2))
    source = tvm.runtime.tensor(arrays["A"])
    whole, parts = tvm.runtime.tensor(expected), tvm.runtime.tensor(result)
    library["whole"](source, whole)
    for number, piece in enumerate(pieces):
        library[f"piece_{number}"](source, parts, *piece.scalars)
        assert np.isnan(parts.numpy()[piece.rows[1] :]).all()
    np.testing.assert_array_equal(parts.numpy(), whole.numpy())


@pytest.mark.parametrize("points", [[0], [13], [20], [5, 5], [6, 3], [-1], [1.5], ["3"], 13])
def test_points_outside(points: Any) -> None:
    with pytest.raises(OpError, match="do not cut the loop 'i': expected ascending .* 1 to 12"):
        separate_at(chain(13), "i", points)
