# SPDX-License-Identifier: Apache-2.0
"""Runs GPU functions on the CPU: TVM's OpenCL text, executed by an OpenCL for CPUs.

The text is what TVM's own lowering generates, and the launches follow the host code of that
lowering: kernels in their order, grids computed from the sizes of the arguments, buffers of the
function allocated for each call. What a kernel must not rely on is poisoned: its scratch buffers
at every call, and a guard zone behind every buffer, which must survive.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import tvm
from half_arithmetic import refuse_half_arithmetic
from opencl_device import choose_device, cl, find_platforms
from tvm import tirx

from schedules.errors import EngineError, OpError
from tests.targets import PLAIN
from tvm_fusion.codegen.host_code import (
    AfterSplit,
    Allocation,
    HostCode,
    Launch,
    Step,
    opencl_texts,
)
from tvm_fusion.compiler.build_kernels import GPU_LOWERING

# Guard and poison: NaN in every float type, -1 or the largest value in the others.
POISON = np.array([0xFF], np.uint8)
_GUARD_BYTES = 4096

# Arrays are small: most kernels run for less time than it takes to optimize them.
_OPTIONS = "-w -cl-opt-disable"

# Helpers with which :meth:`Session.launch_block` runs one block of a grid, by its offset.
BLOCK_BY_BLOCK = "#define get_group_id(axis) (get_global_id(axis) / get_local_size(axis))\n"


@functools.cache
def _context_or_reason() -> cl.Context | str:
    try:
        return cl.Context([choose_device(find_platforms())])
    except EngineError as error:
        return str(error)


def opencl_context() -> cl.Context:
    """Return the context of all kernels; where no OpenCL is usable, skip the running test.

    All skips have this place and one reason, so that pytest's summary has one line for them. Not
    for fixtures: skips in those have the places of the tests.
    """
    found = _context_or_reason()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def new_queue() -> cl.CommandQueue:
    """Create an in-order queue; kernels in different queues may run at the same time."""
    return cl.CommandQueue(opencl_context())


def compile_opencl(
    mod: tvm.IRModule | tirx.PrimFunc,
    target: tvm.target.Target | None = None,
    helpers: str = "",
) -> OpenCLKernels:
    """Compile a function for OpenCL, and its text for the CPU.

    Parameters
    ----------
    mod : tvm.IRModule or tirx.PrimFunc
        The function, bound to ``blockIdx`` and ``threadIdx``; a module has it alone.
    target : tvm.target.Target, optional
        An OpenCL target with a host; a plain one by default.
    helpers : str
        OpenCL C text of the functions that kernels use by ``T.call_extern``; it is put before
        each kernel, since TVM can add none to its OpenCL text.

    Returns
    -------
    kernels : OpenCLKernels
        The compiled function.

    Raises
    ------
    OpError
        Where the module has several functions, or one without kernels, or one whose kernels
        compute in half precision.
    """
    if isinstance(mod, tirx.PrimFunc):
        mod = tvm.IRModule.from_expr(mod)
    if len(mod.functions) != 1:
        raise OpError(f"one function can be compiled at a time, not {len(mod.functions)}")
    split = AfterSplit()
    target = tvm.target.Target(target or {"kind": "opencl"}, PLAIN)  # the host's code never runs
    with tvm.transform.PassContext(instruments=[split]):
        built = tirx.build(mod, target, GPU_LOWERING)
    hosts, kernels = split.functions()
    if not kernels:
        raise OpError("the function launches no kernel: bind its loops to blockIdx, threadIdx")
    for kernel in kernels.values():
        refuse_half_arithmetic(kernel)
    [host] = hosts.values()
    return OpenCLKernels(host, kernels, built.imports[0].inspect_source(), helpers)


class OpenCLKernels:
    """A function compiled for OpenCL.

    Attributes
    ----------
    source : str
        The OpenCL text of all kernels, as TVM generated it.
    """

    def __init__(
        self, host: tirx.PrimFunc, kernels: dict[str, tirx.PrimFunc], source: str, helpers: str
    ) -> None:
        self.source = source
        self._host = host
        self._kernels = kernels
        self._programs = {
            name: cl.Program(opencl_context(), helpers + text).build(_OPTIONS)
            for name, text in opencl_texts(source).items()
        }

    def run(self, *arguments: np.ndarray | float) -> None:
        """Call the function once; the arrays are read and overwritten, as on a GPU.

        Parameters
        ----------
        *arguments : numpy.ndarray or number
            Arguments in the order of the function's parameters.

        Raises
        ------
        InvalidInputError
            Where an argument does not fit its parameter.
        OpError
            Where a kernel wrote behind the end of a buffer, or has an empty grid.
        """
        session = self.session(*arguments)
        session.launch()
        for argument, result in zip(arguments, session.read(), strict=True):
            if isinstance(argument, np.ndarray):
                argument[...] = result

    def session(
        self,
        *arguments: np.ndarray | float,
        other: Session | None = None,
        shared: Sequence[int] = (),
    ) -> Session:
        """Copy the arguments to the device, for many calls on the same buffers.

        Parameters
        ----------
        *arguments : numpy.ndarray or number
            Arguments in the order of the function's parameters.
        other : Session, optional
            One whose buffers are used, too.
        shared : Sequence[int]
            The numbers of the parameters for which they are.
        """
        return Session(self, arguments, other, shared)

    def launches(self, *arguments: np.ndarray | float) -> list[Launch]:
        """List the launches of a call with these arguments, without running it."""
        steps = self._host_code(arguments).steps()
        return [step.launch for step in steps if isinstance(step, Step)]

    def _host_code(self, arguments: Sequence[np.ndarray | float], stream: int = 0) -> HostCode:
        return HostCode(self._host, self._kernels, arguments, stream)


class Session:
    """The arguments of a function on the device, kept between its calls.

    Attributes
    ----------
    stream : int
        What the function gets as the number of its CUDA stream, if it asks for that.
    """

    def __init__(
        self,
        kernels: OpenCLKernels,
        arguments: Sequence[np.ndarray | float],
        other: Session | None = None,
        shared: Sequence[int] = (),
    ) -> None:
        self.stream = 0
        kernels._host_code(arguments)  # refuses what does not fit
        self._kernels = kernels
        self._arguments = arguments
        self._own_queue = new_queue()
        self._queues = [self._own_queue]
        self._allocated: list[tuple[cl.Buffer, int]] = []
        self._buffers: dict[tirx.Var, cl.Buffer] = {}
        for number, param in enumerate(kernels._host.params):
            argument = arguments[number]
            if other is not None and number in shared:
                self._buffers[param] = other._buffers[param]
            elif isinstance(argument, np.ndarray):
                self._buffers[param] = self._allocate(self._own_queue, argument.nbytes)
                if argument.nbytes:
                    cl.enqueue_copy(self._own_queue, self._buffers[param], argument)
        self._own_queue.finish()

    def launch(self, queue: cl.CommandQueue | None = None) -> None:
        """Enqueue the function's kernels, in the queue of its own or in another one.

        Returns at once: ``finish`` and ``read`` wait for the kernels.
        """
        queue = queue or self._own_queue
        if queue not in self._queues:
            self._queues.append(queue)
        for launch, kernel in self._prepared(queue):
            threads = tuple(g * b for g, b in zip(launch.grid, launch.block, strict=True))
            cl.enqueue_nd_range_kernel(queue, kernel, threads, launch.block)
        queue.flush()

    def launch_block(self, *block: int, wait: bool = True) -> None:
        """Run one block of the function's only kernel.

        Parameters
        ----------
        *block : int
            Its ``blockIdx``, x first. The function was compiled with :data:`BLOCK_BY_BLOCK`.
        wait : bool
            Whether to return when it has ended, or when it has begun; then ``finish`` and ``read``
            wait for it.
        """
        [(launch, kernel)] = self._prepared(self._own_queue)
        offset = tuple(index * size for index, size in zip(block, launch.block, strict=True))
        event = cl.enqueue_nd_range_kernel(
            self._own_queue, kernel, launch.block, launch.block, global_work_offset=offset
        )
        self._own_queue.flush()
        if wait:
            self._own_queue.finish()
            return
        # Else our own thread may begin with it, when it waits for a block in another queue.
        while event.command_execution_status > cl.command_execution_status.RUNNING:
            time.sleep(1e-3)

    def _prepared(self, queue: cl.CommandQueue) -> Iterator[tuple[Launch, cl.Kernel]]:
        """The launches of one call, with the arguments set."""
        buffers = dict(self._buffers)
        for step in self._kernels._host_code(self._arguments, self.stream).steps():
            if isinstance(step, Allocation):
                buffers[step.buffer] = self._allocate(queue, step.nbytes)
                continue
            launch = step.launch
            kernel = cl.Kernel(self._kernels._programs[launch.kernel], launch.kernel)
            kernel.set_args(
                *(
                    buffers[argument] if dtype is None else dtype.type(argument)
                    for argument, dtype in step.arguments
                )
            )
            yield launch, kernel

    def write(self, number: int, values: np.ndarray) -> None:
        """Overwrite the beginning of an argument, while launches of other sessions may run."""
        param = list(self._kernels._host.params)[number]
        cl.enqueue_copy(self._own_queue, self._buffers[param], values)
        self._own_queue.finish()

    def finish(self) -> None:
        """Wait for all launches, and check that no buffer was written behind its end.

        Raises
        ------
        OpError
            Where one was.
        """
        for queue in self._queues:
            queue.finish()
        guard = np.empty(_GUARD_BYTES, np.uint8)
        for buffer, nbytes in self._allocated:
            cl.enqueue_copy(self._own_queue, guard, buffer, src_offset=nbytes)
            if (guard != POISON).any():
                raise OpError(f"a kernel wrote behind the end of a buffer of {nbytes} bytes")

    def read(self) -> list[np.ndarray | float]:
        """Wait for all launches; return what the arguments hold now, in new arrays."""
        self.finish()
        results: list[np.ndarray | float] = []
        for param, argument in zip(self._kernels._host.params, self._arguments, strict=True):
            if isinstance(argument, np.ndarray):
                argument = np.empty_like(argument)
                if argument.nbytes:
                    cl.enqueue_copy(self._own_queue, argument, self._buffers[param])
            results.append(argument)
        return results

    def _allocate(self, queue: cl.CommandQueue, nbytes: int) -> cl.Buffer:
        buffer = cl.Buffer(opencl_context(), cl.mem_flags.READ_WRITE, nbytes + _GUARD_BYTES)
        cl.enqueue_fill_buffer(queue, buffer, POISON, 0, buffer.size)
        self._allocated.append((buffer, nbytes))
        return buffer
