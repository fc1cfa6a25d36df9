# SPDX-License-Identifier: Apache-2.0
"""GPU rule for one depthwise convolution in ``NCHW4c``.

A thread computes four channels of several pixels in a column (:mod:`.depthwise_column`);
neighbouring threads have neighbouring columns.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.branch import when
from schedules.workload.conv2d import Conv2DKernel

from ..core.kernel_function import unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..core.rule import GPURule
from ..core.vector_loads import flat_view
from ..gemm.epilogue import LayerEpilogue, lanes_at
from ..gemm.implicit_gemm import LANES, ConvShape
from .conv2d import batch_of, packed_kernel
from .depthwise_column import Column

THREADS = 128
MOST_TAPS = 49  # the nest is unrolled


class DepthwiseConv2D(GPURule):
    """Computes a depthwise convolution, with rows of the data reused in registers.

    Takes what :class:`schedules.gpu.Conv2D` takes, but depthwise layers, of up to 49 taps; returns
    None for everything else.
    """

    def kernel(self, func: tirx.PrimFunc, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        kernel = packed_kernel(func, layers=1)
        if kernel is None or not kernel.layers[0].is_depthwise or kernel.data_layout == "NCHW":
            return None
        shape = ConvShape.of(kernel, batch_of(func))
        if shape.taps > MOST_TAPS:
            return None
        return depthwise_template(func, kernel, choose_rows(shape, gpu), gpu)


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
    func: tirx.PrimFunc, kernel: Conv2DKernel, rows: int, gpu: GPUInfo
) -> tirx.PrimFunc:
    """Write the kernel.

    Parameters
    ----------
    func : tirx.PrimFunc
        A function with the parameters data, weight, bias[, residual], output.
    kernel : Conv2DKernel
        Its workload.
    rows : int
        Outputs of a thread.
    gpu : GPUInfo
        The device.
    """
    threads = gpu.block_threads(THREADS)
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
