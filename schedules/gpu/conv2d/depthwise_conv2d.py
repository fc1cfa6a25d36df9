# SPDX-License-Identifier: Apache-2.0
"""GPU rule for one depthwise convolution in ``NCHW4c``.

A thread computes four channels of several pixels in a column (:mod:`.depthwise_column`);
neighbouring threads have neighbouring columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from schedules.schedule_rule import KernelFacts
from schedules.tir.statements import when
from schedules.workload.conv2d import Conv2DKernel

from ..core.kernel_function import unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..core.vector_loads import flat_view
from ..gemm.epilogue import LayerEpilogue, lanes_at
from ..gemm.implicit_gemm import LANES, ConvShape
from .conv2d import ConvRule, ConvTemplate, batch_of, packed_kernel
from .depthwise_column import Column

THREADS = 128
MOST_TAPS = 49  # the nest is unrolled
_ROWS = (1, 2, 3, 4, 6, 8)
_ALL_THREADS = (32, 64, 96, 128, 192, 256)
_MOST_SUMS = 128  # multiply-adds of a column of outputs, each in four lanes, that stay in order


@dataclass(frozen=True)
class DepthwiseKnobs:
    """Knobs of a depthwise convolution.

    Parameters
    ----------
    rows : int
        Outputs of a thread, in a column.
    threads : int
        Threads of a block.
    """

    rows: int
    threads: int


class DepthwiseTemplate(ConvTemplate[DepthwiseKnobs]):
    """Columns and blocks of :class:`DepthwiseConv2D`."""

    name = "gpu.depthwise_conv2d"
    version = 2
    knobs = DepthwiseKnobs
    rule = "DepthwiseConv2D"

    def default(self, workload: Conv2DKernel, machine: GPUInfo) -> DepthwiseKnobs:
        """Return as many rows as leave threads for all multiprocessors."""
        return default_knobs(_shape(workload), machine)

    def settings(self, workload: Conv2DKernel, machine: GPUInfo) -> Iterator[DepthwiseKnobs]:
        """Yield columns of a few rows, as far as they are unrolled, in blocks of any size."""
        shape = _shape(workload)
        for rows in _ROWS:
            if rows == 1 or (rows <= shape.out_size[0] and rows * shape.taps <= _MOST_SUMS):
                for threads in _ALL_THREADS:
                    if threads <= machine.max_threads:
                        yield DepthwiseKnobs(rows, threads)

    def kernel(
        self, func: tirx.PrimFunc, workload: Conv2DKernel, knobs: DepthwiseKnobs, gpu: GPUInfo
    ) -> tirx.PrimFunc:
        """Write the kernel."""
        return depthwise_template(func, workload, knobs)

    def cycles(self, workload: Conv2DKernel, knobs: DepthwiseKnobs, machine: GPUInfo) -> float:
        """Return the cycles of a multiprocessor."""
        return depthwise_cycles(_shape(workload), knobs.rows, machine)


DEPTHWISE = DepthwiseTemplate()


class DepthwiseConv2D(ConvRule):
    """Computes a depthwise convolution, with rows of the data reused in registers.

    Takes what :class:`schedules.gpu.Conv2D` takes, but depthwise layers, of up to 49 taps; returns
    None for everything else.
    """

    template = DEPTHWISE

    def kernel(self, facts: KernelFacts, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        func = facts.func
        kernel = _depthwise(func)
        if kernel is None:
            return None
        knobs = default_knobs(ConvShape.of(kernel, batch_of(func)), gpu)
        return depthwise_template(func, kernel, knobs)

    def workload(self, func: tirx.PrimFunc, target: Target) -> Conv2DKernel | None:
        """Return the convolution, if the batch is known."""
        kernel = _depthwise(func)
        return kernel if kernel is not None and kernel.is_static else None


def _depthwise(func: tirx.PrimFunc) -> Conv2DKernel | None:
    """The depthwise convolution of a function; None if it is none that the rule takes."""
    kernel = packed_kernel(func, layers=1)
    if kernel is None or not kernel.layers[0].is_depthwise or kernel.data_layout == "NCHW":
        return None
    return kernel if _shape(kernel).taps <= MOST_TAPS else None


def _shape(kernel: Conv2DKernel) -> ConvShape:
    return ConvShape.of(kernel, kernel.batch or 1)


def default_knobs(shape: ConvShape, gpu: GPUInfo) -> DepthwiseKnobs:
    """Rows by :func:`choose_rows`, in blocks of 128 threads if the device has them."""
    return DepthwiseKnobs(choose_rows(shape, gpu), gpu.block_threads(THREADS))


def depthwise_cycles(shape: ConvShape, rows: int, gpu: GPUInfo) -> float:
    """Predicted cycles of a multiprocessor's share, an estimate from instructions."""
    layer, (height, width) = shape.layer, shape.out_size
    seen = (rows - 1) * layer.strides[0] + (layer.kernel[0] - 1) * layer.dilation[0] + 1
    each = 8.0 * seen * layer.kernel[1] + 2 * shape.taps + 4 * rows * shape.taps + 60
    threads = shape.images * shape.out_planes * -(-height // rows) * width
    return each * threads / (COSTS.warp * COSTS.issue * gpu.multiprocessors) + COSTS.block_latency


def choose_rows(shape: ConvShape, gpu: GPUInfo) -> int:
    """Number of outputs of a thread: as many as leave threads for all multiprocessors.

    An estimate, measured on no GPU. A symbolic batch counts as one image.
    """
    height, width = shape.out_size
    for rows in (4, 2):
        threads = shape.images * shape.out_planes * -(-height // rows) * width
        waste = -(-height // rows) * rows / height
        if threads >= COSTS.hiding_threads * gpu.multiprocessors and waste < 1.2:
            return rows
    return 1


def depthwise_template(
    func: tirx.PrimFunc, kernel: Conv2DKernel, knobs: DepthwiseKnobs
) -> tirx.PrimFunc:
    """Write the kernel.

    Parameters
    ----------
    func : tirx.PrimFunc
        A function with the parameters data, weight, bias[, residual], output.
    kernel : Conv2DKernel
        Its workload.
    knobs : DepthwiseKnobs
        Outputs of a thread, and threads of a block.
    """
    rows, threads = knobs.rows, knobs.threads
    shape = ConvShape.of(kernel, batch_of(func))
    height, width = shape.out_size
    strips = -(-height // rows)
    count = shape.const(shape.batch) * (shape.out_planes * strips * width)

    blocks = (count + (threads - 1)) // threads

    def body() -> None:
        with (
            unless_empty(blocks),
            T.launch_thread("blockIdx.x", blocks) as block,
            T.launch_thread("threadIdx.x", shape.const(threads)) as thread,
        ):
            data, weight, bias, *residual, output = [flat_view(param) for param in func.params]
            item = T.bind(block * threads + thread)
            with when(item < count):
                plane, place = item // (strips * width), item % (strips * width)
                row, x = place // width * rows, place % width
                channel = plane % shape.out_planes
                column = Column(shape, rows, plane, channel, row, x, data, weight)
                sums = column.add_all()
                epilogue = LayerEpilogue(shape, bias, output, residual[0] if residual else None)
                loaded = epilogue.load_bias(channel)
                for number in range(rows):
                    y = row + number
                    with when(None if height % rows == 0 else y < height):
                        place = (plane * height + y) * width + x
                        epilogue.finish(place, loaded, lanes_at(sums, number * LANES))

    return write_kernels(func, body)
