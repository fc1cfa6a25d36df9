# SPDX-License-Identifier: Apache-2.0
"""Parcels: the choice of how they travel, and what is copied."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.distribute import streamed_copy
from schedules.distribute.streamed_copy import LEAST_BYTES, MOST_BYTES, UNIT
from tvm_fusion.distributed.world.packing import SHORT_SEGMENT, always
from tvm_fusion.distributed.world.parcel import Parcel, name_ranks, segment_bytes
from tvm_fusion.distributed.world.shared_slots import Slot


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """A region of a C-contiguous array."""
    extents = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(["int8", "float32", "float64"]))
    whole = np.arange(np.prod(extents)).reshape(extents).astype(dtype)
    begins = [draw(st.integers(0, extent - 1)) for extent in extents]
    ends = [draw(st.integers(b + 1, n)) for b, n in zip(begins, extents, strict=True)]
    return whole[tuple(slice(b, e) for b, e in zip(begins, ends, strict=True))]


@given(views())
def test_segments(view: np.ndarray) -> None:
    addresses = np.zeros(view.shape, np.int64)
    for axis, stride in enumerate(view.strides):
        shape = [-1 if other == axis else 1 for other in range(view.ndim)]
        addresses += (np.arange(view.shape[axis]) * stride).reshape(shape)
    jumps = np.flatnonzero(np.diff(addresses.ravel()) != view.itemsize)
    first = (jumps[0] + 1 if jumps.size else view.size) * view.itemsize
    assert segment_bytes(view) == first


@given(st.lists(views(), min_size=1, max_size=3))
def test_packed_bytes_are_those_of_the_regions(regions: list[np.ndarray]) -> None:
    parcel = Parcel(1, regions, packing=always("packed"))
    parcel.pack()
    expected = b"".join(view.tobytes() for view in regions)
    assert parcel.nbytes == len(expected)
    assert parcel.stage is not None and parcel.stage.tobytes() == expected
    parcel.stage[:] = 255 - parcel.stage
    parcel.unpack()
    content = b"".join(view.tobytes() for view in regions)
    assert content == bytes(255 - byte for byte in expected)


@pytest.mark.parametrize(
    ("columns", "is_staged", "is_copied"),
    [(SHORT_SEGMENT - 1, True, True), (SHORT_SEGMENT, False, False)],
)
def test_long_segments_stay_where_they_are(columns: int, is_staged: bool, is_copied: bool) -> None:
    array = np.zeros((3, SHORT_SEGMENT + 7), np.uint8)
    parcel = Parcel(1, [array[:, :columns]])
    assert (parcel.stage is not None) == is_staged
    assert (parcel.stage is not None and not np.shares_memory(parcel.stage, array)) == is_copied
    rows = Parcel(1, [array[1:]])
    assert rows.stage is not None and np.shares_memory(rows.stage, array)
    assert Parcel(1, [array[:1], array[1:]]).stage is not None


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Bytes, number and stride of the pieces of all streamed copies."""
    found = []

    def copy(to: int, source: int, size: int, count: int, stride: int) -> None:
        found.append((size, count, stride))
        compiled(to, source, size, count, stride)

    compiled = streamed_copy.streamed_copy()
    monkeypatch.setattr(streamed_copy, "streamed_copy", lambda: copy)
    return found


def sent_bytes(parcel: Parcel) -> bytes:
    """Bytes in the slot of a parcel after it has been packed; the slot was empty before."""
    assert parcel.slot is not None
    parcel.slot.data[:] = 0
    parcel.pack()
    return parcel.slot.data[: parcel.nbytes].tobytes()


BORDERS = [border + k for border in (LEAST_BYTES, MOST_BYTES) for k in (-1, 0, 1)]


@pytest.mark.parametrize("nbytes", BORDERS)
def test_odd_pieces_are_streamed_together(
    nbytes: int, streamed: list[tuple[int, int, int]]
) -> None:
    slot = Slot(memoryview(mmap.mmap(-1, 2 * MOST_BYTES)))
    rows = np.random.default_rng().integers(0, 256, (2, nbytes), np.uint8)
    views = [rows[0, 5 : nbytes // 2], rows[:, : nbytes // 8]]
    views.append(rows[1, : nbytes - sum(view.size for view in views)])
    parcel = Parcel(1, views, lambda *_: slot)
    assert parcel.nbytes == nbytes
    parcel.stream()
    for _ in range(2):  # the second time with other bytes
        assert sent_bytes(parcel) == b"".join(view.tobytes() for view in views)
        rows += 1
    is_streamed = LEAST_BYTES <= nbytes <= MOST_BYTES
    assert streamed == [(-(-nbytes // UNIT) * UNIT, 1, 0)] * (2 if is_streamed else 0)


@pytest.mark.parametrize(
    ("region", "pieces"),
    [
        (np.s_[:, 2:4], (224, 64, 6272)),
        (np.s_[::2, 2:4], (224, 32, 12544)),
        (np.s_[:1, :, 4:8], (16, 56, 112)),
        (np.s_[1:3], (12544, 1, 0)),
        (np.s_[:, :, 4:8], None),  # A region in rows.
        (np.s_[0, :, 3:6], None),  # A region of 12 bytes.
    ],
)
def test_pieces_are_streamed_from_where_they_lie(
    region: Any, pieces: tuple[int, int, int] | None, streamed: list[tuple[int, int, int]]
) -> None:
    slot = Slot(memoryview(mmap.mmap(-1, 2 * MOST_BYTES)))
    array = np.random.default_rng().random((64, 56, 28), np.float32)
    views = [array[region], np.zeros(LEAST_BYTES, np.uint8)]
    parcel = Parcel(1, views, lambda *_: slot)
    parcel.stream()
    array += 1
    assert sent_bytes(parcel) == b"".join(view.tobytes() for view in views)
    whole = [(LEAST_BYTES, 1, 0)]
    assert streamed == ([pieces, *whole] if pieces else [(parcel.nbytes, 1, 0)])


def test_names() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_memory_of_a_device_is_not_packed() -> None:
    view = np.zeros((4, 8), np.float32)[:, 2:4]
    assert Parcel(1, [view], packing=always("packed")).stage is not None
    for views in ([view], [view, view]):
        parcel = Parcel(1, views, on_device=True, packing=always("packed"))
        assert parcel.stage is None
        parcel.pack()
