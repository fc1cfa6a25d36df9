# SPDX-License-Identifier: Apache-2.0
"""An OpenCL for CPUs as a device with one core of its own, beside a CPU with the others.

Its workers are started on the last processor that this process may use. The thread that waits for
the device sleeps: Intel's runtime would let it compute with them, on a processor of the CPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tvm_fusion.distributed import program
from tvm_fusion.distributed.accelerator.opencl_driver import OpenCLDriver, OpenCLQueue, cl
from tvm_fusion.errors import TargetError

_ADD = "__kernel void add(__global float* a) { a[get_global_id(0)] += 1.0f; }"


class SleepingQueue(OpenCLQueue):
    """A queue for which a thread waits without computing."""

    def finish(self) -> None:
        """Wait for all operations."""
        ended = threading.Event()
        marker = cl.enqueue_marker(self._queue)
        marker.set_callback(cl.command_execution_status.COMPLETE, lambda _: ended.set())
        self._queue.flush()
        ended.wait()
        super().finish()


class OneCoreDriver(OpenCLDriver):
    """The OpenCL device, whose workers are threads of one processor; all programs share it."""

    def __init__(self, index: int) -> None:
        processors = sorted(os.sched_getaffinity(0))
        if len(processors) < 2:
            raise TargetError(f"the device needs a core of its own; there are {len(processors)}")
        self._others, last = set(processors[:-1]), processors[-1]
        os.sched_setaffinity(0, {last})  # threads inherit it
        super().__init__(index)
        queue = cl.CommandQueue(self._context)
        memory = cl.Buffer(self._context, cl.mem_flags.READ_WRITE, 4 << 20)
        kernel = cl.Kernel(cl.Program(self._context, _ADD).build("-w"), "add")
        kernel.set_args(memory)
        for _ in range(3):
            cl.enqueue_nd_range_kernel(queue, kernel, (1 << 20,), (64,))
            cl.enqueue_copy(queue, np.empty(1 << 20, np.float32), memory)
        queue.finish()
        os.sched_setaffinity(0, processors)

    def queue(self) -> SleepingQueue:
        """Make a queue."""
        return SleepingQueue(self.name, cl.CommandQueue(self._context))

    @contextmanager
    def cpu_beside(self) -> Iterator[None]:
        """Keep the calling thread, and so its kernels, from the device's processor."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._others)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def use_one_core(index: int) -> OneCoreDriver:
    """Let the programs of this process run on such a device."""
    driver = OneCoreDriver(index)
    program.open_driver = lambda kind, index: driver
    return driver
