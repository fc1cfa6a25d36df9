# SPDX-License-Identifier: Apache-2.0
"""Operation sequences on a CUDA driver of Python, whose streams run ahead as events allow.

The kernels are machine code for sm_90, which needs a GPU: here numpy computes what each launch is
for, on the memory that its arguments point to.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from loop_nests import blur, random_arrays

from tvm_fusion import distributed
from tvm_fusion.distributed.device import cuda_driver
from tvm_fusion.distributed.device.driver import open_driver
from tvm_fusion.distributed.world.local_world import run_ranks
from tvm_fusion.errors import DistributedError, TargetError

Kernel = Callable[[list[int]], None]


class FakeCUDA:
    """Functions of the driver as ``ctypes`` calls them; memory is that of this process."""

    def __init__(self, kernel: Kernel = lambda _: None, devices: int = 1) -> None:
        self.kernel = kernel
        self.devices = devices
        self.failing = ""
        self.memory: dict[int, Any] = {}
        self.streams: dict[int, deque[tuple[str, Any]]] = {}
        self.done: set[int] = set()
        self.released: list[str] = []
        self.launches = 0
        self.order = (0, 1, 2)  # the first of these streams that can go on does
        self._next = 100

    def __getattr__(self, name: str) -> Callable[..., int]:
        """What only releases, or changes nothing here."""
        return lambda *_: self.released.append(name) or int(name == self.failing) * 2

    def _new(self) -> int:
        self._next += 1
        return self._next

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.devices
        return 0

    def cuGetErrorString(self, status: Any, text: Any) -> int:  # noqa: N802
        text._obj.value = b"out of memory" if status.value == 2 else b"?"
        return 0

    def cuMemAlloc_v2(self, memory: Any, size: Any) -> int:  # noqa: N802
        if self.failing == "cuMemAlloc_v2":
            return 2
        block = np.full(size.value, 0xFF, np.uint8)
        memory._obj.value = block.ctypes.data
        self.memory[block.ctypes.data] = block
        return 0

    def cuStreamCreate(self, stream: Any, flags: Any) -> int:  # noqa: N802
        assert flags.value == 1, "the default stream would order all others"
        stream._obj.value = self._new()
        self.streams[stream._obj.value] = deque()
        return 0

    def cuEventCreate(self, event: Any, _: Any) -> int:  # noqa: N802
        event._obj.value = self._new()
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        self.streams[stream.value].append(("record", event.value))
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, _: Any) -> int:  # noqa: N802
        self.streams[stream.value].append(("wait", event.value))
        return 0

    def _do(self, stream: Any, action: Callable[[], object]) -> int:
        self.streams[stream.value].append(("do", action))
        return 0

    def cuMemcpyHtoDAsync_v2(self, dest: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        ends = dest.value, source.value, size.value
        return self._do(stream, lambda: ctypes.memmove(*ends))

    def cuMemcpyDtoHAsync_v2(self, dest: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        return self.cuMemcpyHtoDAsync_v2(dest, source, size, stream)

    def cuMemcpy2DAsync_v2(self, copy: Any, stream: Any) -> int:  # noqa: N802
        c = copy._obj
        source = c.srcHost if c.srcMemoryType == 1 else c.srcDevice
        dest = c.dstHost if c.dstMemoryType == 1 else c.dstDevice
        steps = range(c.Height), c.dstPitch, c.srcPitch, c.WidthInBytes

        def run() -> None:
            rows, dest_pitch, source_pitch, width = steps
            for row in rows:
                ctypes.memmove(dest + row * dest_pitch, source + row * source_pitch, width)

        return self._do(stream, run)

    def cuLaunchKernel(self, kernel: Any, *others: Any) -> int:  # noqa: N802
        *_, stream, params, extra = others
        assert extra is None
        self.launches += 1
        # All parameters of these kernels have eight bytes; they are read when the call is made.
        values = [ctypes.c_int64.from_address(address).value for address in params]
        return self._do(stream, lambda: self.kernel(values))

    def cuStreamSynchronize(self, stream: Any) -> int:  # noqa: N802
        while self.streams[stream.value]:
            queues = list(self.streams.values())
            ready = [
                queues[number]
                for number in self.order
                if queues[number]
                and (queues[number][0][0] != "wait" or queues[number][0][1] in self.done)
            ]
            assert ready, "streams wait for each other"
            what, of = ready[0].popleft()
            if what == "record":
                self.done.add(of)
            elif what == "do":
                of()
        return 0


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
