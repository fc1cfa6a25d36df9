# SPDX-License-Identifier: Apache-2.0
"""Parts of loops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.distribute.partition import Partition, balanced, bounds_of, grids
from schedules.errors import OpError


@given(st.integers(0, 50), st.integers(1, 60))
def test_balanced(extent: int, parts: int) -> None:
    bounds = balanced(extent, parts)
    sizes = [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, extent, parts)
    assert max(sizes) - min(sizes) <= 1


def test_sizes() -> None:
    assert bounds_of(5, [2, 0, 3], "loop 'i'") == (0, 2, 2, 5)
    with pytest.raises(OpError, match="of loop 'i' sum up to 4; expected its extent 5"):
        bounds_of(5, [2, 2], "loop 'i'")
    with pytest.raises(OpError, match="expected 0 or more"):
        bounds_of(5, [6, -1], "loop 'i'")
    with pytest.raises(OpError, match="over 0 ranks"):
        balanced(5, 0)


def test_ranks_of_a_grid() -> None:
    partition = Partition(((0, 4, 8), (0, 1, 2, 3)))
    assert (partition.grid, partition.ranks) == ((2, 3), 6)
    assert [partition.place(rank) for rank in range(6)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert partition.rows(5) == ((4, 8), (2, 3))


def test_grids() -> None:
    assert grids(6, 1) == [(6,)]
    assert grids(6, 2) == [(1, 6), (2, 3), (3, 2), (6, 1)]
