# SPDX-License-Identifier: Apache-2.0
"""Operation sequences on a CUDA driver of Python, whose streams run ahead as events allow.

The kernels are machine code for sm_90, which needs a GPU: here numpy computes what each launch is
for, on the memory that its arguments point to.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCUDA, Kernel
from loop_nests import blur, random_arrays

from tvm_fusion import distributed
from tvm_fusion.distributed.accelerator import cuda_driver
from tvm_fusion.distributed.accelerator.device import open_driver
from tvm_fusion.distributed.world.local_world import run_ranks
from tvm_fusion.errors import DistributedError, TargetError


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeCUDA:
    fake = FakeCUDA()
    monkeypatch.setattr(cuda_driver, "load_library", lambda: fake)
    return fake


def numpy_blur(rows: int, columns: int) -> Kernel:
    """The blur as a kernel; windows begin with what rows read, and have the same extents."""

    def kernel(values: list[int]) -> None:
        source, dest, *_ = values
        a = _array(source, (rows + 2, columns + 2))
        bx = (a[:, :-2] + a[:, 1:-1] + a[:, 2:]) / 3
        _array(dest, (rows, columns))[...] = (bx[:-2] + bx[1:-1] + bx[2:]) / 3

    return kernel


def _array(address: int, shape: tuple[int, int]) -> np.ndarray:
    size = shape[0] * shape[1]
    return np.ctypeslib.as_array((ctypes.c_float * size).from_address(address)).reshape(shape)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("loop", [0, 1])
def test_events_order_all_that_depends_on_each_other(library: FakeCUDA, loop: int) -> None:
    """One stream runs ahead of another as far as events allow: a missing one would be seen."""
    func = blur(24, 24)
    arrays = random_arrays(func)
    split = [6, 18]
    device = distributed.Device("cuda -arch=sm_90", chunks=6)
    program = distributed.compile(func, loop=loop, devices=[device], split=split)
    [[share]] = program.shares.devices
    assert share.code.cubin.startswith(b"\x7fELF")
    library.kernel = numpy_blur(*((3, 24) if loop == 0 else (24, 3)))
    results = []

    def work(world: Any) -> None:
        local = program.on(world)
        local.input("A").owned[...] = arrays["A"]
        for library.order in itertools.permutations(range(3)):
            local.output.window.array[...] = np.nan
            results.append(local().copy())

    run_ranks(1, work)
    a = arrays["A"]
    bx = (a[:, :-2] + a[:, 1:-1] + a[:, 2:]) / 3
    for result in results:
        np.testing.assert_allclose(result, (bx[:-2] + bx[1:-1] + bx[2:]) / 3, rtol=1e-5)
    assert library.launches == 6 * 6
    assert len(library.memory) == 4  # two slots of each window


def test_memory_is_released(library: FakeCUDA) -> None:
    driver = open_driver("cuda", 0)
    driver.allocate(8)
    driver.pin(np.zeros(1 << 16, np.uint8))
    driver.queue()
    del driver
    assert library.released[-4:] == [
        "cuMemHostUnregister",
        "cuStreamDestroy_v2",
        "cuMemFree_v2",
        "cuDevicePrimaryCtxRelease_v2",
    ]


def test_refused(library: FakeCUDA) -> None:
    with pytest.raises(TargetError, match=r"no device cuda:1; it has cuda:0"):
        open_driver("cuda", 1)
    driver = open_driver("cuda", 0)
    library.failing = "cuMemAlloc_v2"
    with pytest.raises(
        DistributedError, match="cuda:0 failed in cuMemAlloc_v2: out of memory .2.;"
    ):
        driver.allocate(1 << 40)
    library.devices = 0
    with pytest.raises(TargetError, match="no device cuda:0; it has none"):
        open_driver("cuda", 0)
