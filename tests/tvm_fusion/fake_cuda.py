# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver of Python, whose streams run ahead of each other as far as events allow."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

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
        self.copied = 0  # bytes
        self.order = (0, 1, 2)  # the first of these streams that can go on does
        self._next = 100

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Return a function that does nothing: it would only release, or change nothing here."""
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
        self.copied += size.value
        return self._do(stream, lambda: ctypes.memmove(*ends))

    def cuMemcpyDtoHAsync_v2(self, dest: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        return self.cuMemcpyHtoDAsync_v2(dest, source, size, stream)

    def cuMemcpy2DAsync_v2(self, copy: Any, stream: Any) -> int:  # noqa: N802
        c = copy._obj
        source = c.srcHost if c.srcMemoryType == 1 else c.srcDevice
        dest = c.dstHost if c.dstMemoryType == 1 else c.dstDevice
        steps = range(c.Height), c.dstPitch, c.srcPitch, c.WidthInBytes
        self.copied += c.Height * c.WidthInBytes

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
