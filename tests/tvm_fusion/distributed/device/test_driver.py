# SPDX-License-Identifier: Apache-2.0
"""Planes of bytes, and devices that are not there."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_fusion.distributed.device.driver import check_index, open_driver, planes
from tvm_fusion.errors import TargetError


@given(data=st.data(), dtype=st.sampled_from(["uint8", "float32", "int64"]))
def test_planes_are_the_bytes_of_a_view(data: st.DataObject, dtype: str) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    array = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)
    region = []
    for extent in shape:
        begin = data.draw(st.integers(0, extent - 1))
        region.append(slice(begin, data.draw(st.integers(begin + 1, extent))))
    view = array[tuple(region)]
    found = bytearray(view.nbytes)
    for plane in planes(view):
        for row in range(plane.rows):
            place = plane.dense + row * plane.length
            data_of_row = ctypes.string_at(plane.address + row * plane.pitch, plane.length)
            found[place : place + plane.length] = data_of_row
    assert bytes(found) == view.tobytes()


def test_whole_rows_are_one_plane() -> None:
    array = np.zeros((6, 4, 5), np.float32)
    assert [plane.rows for plane in planes(array[1:3])] == [1]
    assert [(p.rows, p.length) for p in planes(array[:, 1:3])] == [(6, 40)]
    assert list(planes(array[:0])) == []


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="no device opencl:2; it has opencl:0 .First., opencl:1"):
        check_index("opencl", 2, ["First", "Second"])
    with pytest.raises(TargetError, match="no device cuda:0; it has none"):
        check_index("cuda", 0, [])
    monkeypatch.setattr(ctypes, "CDLL", _no_library)
    with pytest.raises(TargetError, match=r"this machine has no NVIDIA driver \(libcuda.so.1\)"):
        open_driver("cuda", 0)
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    monkeypatch.delitem(sys.modules, "tvm_fusion.distributed.device.opencl_driver", raising=False)
    with pytest.raises(TargetError, match=r"need pyopencl .*pip install 'tvm-fusion\[opencl\]'"):
        open_driver("opencl", 0)


def _no_library(name: str, *_: object) -> None:
    raise OSError(f"{name}: no such file")
