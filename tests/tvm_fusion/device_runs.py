# SPDX-License-Identifier: Apache-2.0
"""Runs of programs with OpenCL devices: poisoned memory, counted copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from opencl import POISON, opencl_context
from opencl_device import cl

from tvm_fusion.distributed import Program
from tvm_fusion.distributed.accelerator import opencl_driver
from tvm_fusion.distributed.accelerator.driver import Place, planes
from tvm_fusion.distributed.world.local_world import LocalWorld, run_ranks


class WatchedDriver(opencl_driver.OpenCLDriver):
    """The OpenCL device of the tests, whose memory is poisoned when it is allocated."""

    def __init__(self, index: int) -> None:
        self.name = f"opencl:{index}"
        self._context = opencl_context()
        self.log: list[tuple[str, int]] = []
        self.queues: list[WatchedQueue] = []

    def allocate(self, nbytes: int) -> Any:
        memory = super().allocate(nbytes)
        with cl.CommandQueue(self._context) as queue:
            cl.enqueue_fill_buffer(queue, memory, POISON, 0, memory.size)
        return memory

    def queue(self) -> WatchedQueue:
        self.queues.append(WatchedQueue(self.name, cl.CommandQueue(self._context), self.log))
        return self.queues[-1]


class WatchedQueue(opencl_driver.OpenCLQueue):
    """A queue that notes what is copied."""

    def __init__(self, name: str, queue: Any, log: list[tuple[str, int]]) -> None:
        super().__init__(name, queue)
        self.log = log

    def copy_in(self, dest: Any, place: Place, view: np.ndarray, after: Any) -> Any:
        self.log.append(("in", sum(plane.nbytes for plane in planes(view, place))))
        return super().copy_in(dest, place, view, after)

    def copy_out(self, view: np.ndarray, source: Any, place: Place, after: Any) -> Any:
        self.log.append(("out", sum(plane.nbytes for plane in planes(view, place))))
        return super().copy_out(view, source, place, after)

    def launch(self, kernel: Any, launch: Any, arguments: Any, after: Any) -> Any:
        self.log.append(("kernel", 0))
        return super().launch(kernel, launch, arguments, after)


def slices(region: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(begin, end) for begin, end in region)


def run(
    program: Program, arrays: Mapping[str, np.ndarray], steps: int = 1
) -> tuple[np.ndarray, ...]:
    """Outputs of a program on ranks of this process; what a rank does not own is poisoned."""
    nest = program.distribution.nest
    results = {out.name: np.full_like(arrays[out.name], np.nan) for out in nest.outputs}

    def work(world: LocalWorld) -> None:
        local = program.on(world)
        for buffer in nest.inputs:
            held = local.input(buffer.name)
            held.window.array[...] = np.nan
            held.owned[...] = arrays[buffer.name][slices(held.region)]
        for output in local.outputs.values():
            output.window.array[...] = np.nan
        local(steps)
        for name, output in local.outputs.items():
            results[name][slices(output.region)] = output.owned

    run_ranks(program.ranks, work)
    return tuple(results.values())
