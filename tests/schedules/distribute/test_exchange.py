# SPDX-License-Identifier: Apache-2.0
"""Regions and messages, against sets of elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_nests import elements

from schedules.distribute.exchange import (
    Exchange,
    LocalBuffer,
    Message,
    Region,
    difference,
    hull,
    intersection,
    messages_of,
    region_size,
    segment_size,
    union,
)
from schedules.errors import OpError

intervals = st.tuples(st.integers(0, 6), st.integers(0, 6))
regions = st.tuples(intervals, intervals)


@given(regions, regions)
def test_difference(a: Region, b: Region) -> None:
    rest = difference(a, b)
    found = [element for region in rest for element in elements(region)]
    assert sorted(found) == sorted(set(elements(a)) - set(elements(b)))
    assert region_size(intersection(a, b)) == len(set(elements(a)) & set(elements(b)))


@given(st.lists(regions, max_size=6))
def test_union(parts: list[Region]) -> None:
    found = [element for region in union(parts) for element in elements(region)]
    assert sorted(found) == sorted({e for region in parts for e in elements(region)})
    if parts:
        assert all(intersection(region, hull(parts)) == region for region in parts)


@given(st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=1, max_size=4), st.integers(0, 3))
def test_contiguous_pieces_are_those_of_numpy(axes: list[tuple[int, int, int]], first: int) -> None:
    window = tuple((first, first + before + extent + after - 2) for before, extent, after in axes)
    begins = [first + before - 1 for before, _, _ in axes]
    region = tuple((b, b + axis[1]) for b, axis in zip(begins, axes, strict=True))
    places = np.arange(region_size(window)).reshape([end - begin for begin, end in window])
    view = LocalBuffer(places, (first,) * len(axes)).view(region)
    jumps = np.flatnonzero(np.diff(view.ravel()) != 1)
    assert segment_size(region, window) == (jumps[0] + 1 if jumps.size else view.size)


def test_neighbours_become_one_region() -> None:
    assert union([((0, 2), (0, 4)), ((4, 5), (0, 4)), ((2, 4), (0, 4))]) == [((0, 5), (0, 4))]


def test_messages_of_copies_come_from_the_nearest_owner() -> None:
    whole = ((0, 4),)
    owned = [whole, ((0, 0),), ((0, 0),), ((2, 4),)]
    found = messages_of("A", [[], [], [whole], []], owned)
    assert found == (Message(0, 2, "A", ((0, 2),)), Message(3, 2, "A", ((2, 4),)))


def test_what_nobody_owns_is_refused() -> None:
    with pytest.raises(OpError, match=r"rank 1 reads region \(\(3, 5\),\) of buffer 'A', which no"):
        messages_of("A", [[], [((0, 5),)]], [((0, 3),), ((6, 8),)])


def test_exchange() -> None:
    first = Message(0, 1, "A", ((0, 2), (0, 3)))
    second = Message(1, 2, "B", ((0, 1),))
    exchange = Exchange(4, (first, second), synchronous=True)
    assert exchange.sent_by(1) == (second,)
    assert exchange.received_by(1) == (first,)
    assert exchange.of_rank(2) == Exchange(4, (second,), synchronous=True)
    assert exchange.bytes({"A": 4, "B": 8}) == 32
    assert (first.shape, first.size) == ((2, 3), 6)


def test_local_buffer() -> None:
    local = LocalBuffer(np.arange(12).reshape(3, 4), (5, 2))
    assert local.region == ((5, 8), (2, 6))
    view = local.view(((6, 8), (2, 4)))
    assert view.tolist() == [[4, 5], [8, 9]]
    view[...] = 0
    assert local.array[1].tolist() == [0, 0, 6, 7]
    assert local.view(((9, 9), (2, 6))).shape == (0, 4)
    with pytest.raises(OpError, match="is not inside the local window"):
        local.view(((4, 6), (2, 4)))
