# SPDX-License-Identifier: Apache-2.0
"""Planes of bytes, and devices that are not there."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_fusion.distributed.accelerator.device import open_driver
from tvm_fusion.distributed.accelerator.driver import Place, check_index, planes
from tvm_fusion.errors import TargetError


def cut(data: st.DataObject, window: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """A region of a window, not empty."""
    region = []
    for low, high in window:
        begin = data.draw(st.integers(low, high - 1))
        region.append((begin, data.draw(st.integers(begin + 1, high))))
    return region


@given(data=st.data(), dtype=st.sampled_from(["uint8", "float32", "int64"]))
def test_planes_are_the_bytes_of_a_view(data: st.DataObject, dtype: str) -> None:
    """A region of an array on the host lies in the window of another extent that a device has."""
    whole = [
        (0, extent) for extent in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ]
    window = cut(data, whole)
    region = cut(data, window)
    shape = [end for _, end in whole]
    array = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)
    view = array[tuple(slice(*ends) for ends in region)]
    found = np.zeros([end - begin for begin, end in window], dtype)
    place = Place.of(tuple(region), tuple(window), array.itemsize)
    for plane in planes(view, place):
        for row in range(plane.rows):
            ctypes.memmove(
                found.ctypes.data + plane.offset + row * plane.offset_pitch,
                plane.address + row * plane.pitch,
                plane.length,
            )
    inside = zip(region, window, strict=True)
    at = tuple(slice(begin - low, end - low) for (begin, end), (low, _) in inside)
    np.testing.assert_array_equal(found[at], view)
    found[at] = 0
    assert not found.any(), "nothing beside the region is written"


def test_whole_rows_are_one_plane() -> None:
    array = np.zeros((6, 4, 5), np.float32)
    dense = Place(0, (80, 20, 4))
    assert [plane.rows for plane in planes(array[1:3], dense)] == [1]
    assert [(p.rows, p.length) for p in planes(array[:, 1:3], Place(0, (40, 20, 4)))] == [(6, 40)]
    assert [(p.rows, p.offset_pitch) for p in planes(array[1:3, 1:3], dense)] == [(2, 80)]
    assert list(planes(array[:0], dense)) == []


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="no device opencl:2; it has opencl:0 .First., opencl:1"):
        check_index("opencl", 2, ["First", "Second"])
    with pytest.raises(TargetError, match="no device cuda:0; it has none"):
        check_index("cuda", 0, [])
    monkeypatch.setattr(ctypes, "CDLL", _no_library)
    with pytest.raises(TargetError, match=r"this machine has no NVIDIA driver \(libcuda.so.1\)"):
        open_driver("cuda", 0)
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    monkeypatch.delitem(
        sys.modules, "tvm_fusion.distributed.accelerator.opencl_driver", raising=False
    )
    with pytest.raises(TargetError, match=r"need pyopencl .*pip install 'tvm-fusion\[opencl\]'"):
        open_driver("opencl", 0)


def _no_library(name: str, *_: object) -> None:
    raise OSError(f"{name}: no such file")
