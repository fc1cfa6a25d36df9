# SPDX-License-Identifier: Apache-2.0
"""Copies of a table of exchanges, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from schedules.distribute.exchange import Region
from schedules.distribute.rows.exchange_table import copy_fields, layout_in, packed_layout

WHOLE: Region = ((0, 2), (0, 4), (0, 6), (0, 5), (0, 8))


def run(fields: list[int], target: np.ndarray, source: np.ndarray) -> None:
    """Copy as the kernel does."""
    to, by, outer, outer_to, outer_by, inner, inner_to, inner_by, length = fields
    target, source = (array.reshape(-1).view(np.uint8) for array in (target, source))
    for i in range(outer):
        for j in range(inner):
            a, b = to + i * outer_to + j * inner_to, by + i * outer_by + j * inner_by
            target[a : a + length] = source[b : b + length]


@pytest.mark.parametrize(
    ("axes", "loops"),
    [
        ({}, (1, 1)),
        ({2: (1, 4)}, (1, 8)),  # rows
        ({1: (2, 4)}, (1, 2)),  # channels
        ({0: (1, 2), 1: (2, 4)}, (1, 1)),
        ({1: (2, 4), 2: (1, 4)}, (2, 2)),
        ({0: (1, 2), 2: (5, 6)}, (1, 4)),
    ],
)
def test_regions(axes: dict[int, tuple[int, int]], loops: tuple[int, int]) -> None:
    region = tuple(axes.get(axis, ends) for axis, ends in enumerate(WHOLE))
    array = np.random.default_rng(0).random([end for _, end in WHOLE]).astype(np.float32)
    part = array[tuple(slice(*ends) for ends in region)]
    packed = np.zeros(part.shape, np.float32)
    inside, alone = layout_in(region, WHOLE, 4), packed_layout(region, 4)
    fields = copy_fields(region, alone, inside, 4)
    assert fields is not None and (fields[2], fields[5]) == loops
    run(fields, packed, array)
    np.testing.assert_array_equal(packed, part)
    back = np.zeros_like(array)
    unpacking = copy_fields(region, inside, alone, 4)
    assert unpacking is not None
    run(unpacking, back, packed)
    np.testing.assert_array_equal(back[tuple(slice(*ends) for ends in region)], part)
    assert back.sum() == pytest.approx(part.sum(), rel=1e-4)


def test_three_loops_are_too_many() -> None:
    region = ((0, 2), (1, 3), (1, 4), (1, 3), (0, 8))
    assert copy_fields(region, packed_layout(region, 4), layout_in(region, WHOLE, 4), 4) is None
