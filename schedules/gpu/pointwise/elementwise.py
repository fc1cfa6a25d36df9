# SPDX-License-Identifier: Apache-2.0
"""GPU rule for functions that compute each output element on its own."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.schedule_rule import KernelFacts
from schedules.tir.extents import constant
from schedules.tir.index_math import ceildiv, i64, simplified

from ..core.kernel_function import write_kernels
from ..core.machine import GPUInfo
from ..core.rule import GPURule
from .axis_order import best_lanes, injective_spaces
from .coalescing import Lanes, is_scattered
from .iteration_domain import IterationSpace
from .point_kernel import Views, write_points

_LARGEST_BLOCK = 256
_SMALLEST_BLOCK = 64


class Elementwise(GPURule):
    """Injective functions: element-wise, cast, concatenation, split, slice, pad, gather, resize.

    All blocks become one kernel without intermediate tensors. A thread computes neighbouring
    elements, which it loads and stores 16 bytes at a time where they are contiguous and aligned;
    reads that are the same for all of them happen once. The loops run in the order of the outputs
    or of an input, whichever touches less memory: NCHW4c is unpacked in the order of its pixels.
    Outputs of different shapes use different blocks of one grid.

    Left alone: functions with a reduction, a scatter, or thread bindings.
    """

    def kernel(self, facts: KernelFacts, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        func = facts.func
        spaces = facts.read(injective_spaces)
        return write_spaces(func, spaces, gpu) if spaces else None


def write_spaces(
    func: tirx.PrimFunc, spaces: Sequence[IterationSpace], gpu: GPUInfo
) -> tirx.PrimFunc:
    """Write the kernel of some spaces, each in its best order and with its best vectors."""
    plans = [best_lanes(space) for space in spaces if constant(space.size) != 0]
    kernel = write_kernels(func, lambda: write_lanes(func, plans, gpu))
    if any(is_scattered(plan) for plan in plans):
        kernel = kernel.with_attr(attributes.SCATTERED, True)
    return kernel


def write_lanes(func: tirx.PrimFunc, plans: Sequence[Lanes], gpu: GPUInfo) -> None:
    """Emit one grid, of which each plan has a range of blocks."""
    if not plans:
        T.evaluate(0)
        return
    vectors = [ceildiv(plan.space.size, plan.vector) for plan in plans]
    threads = _threads(vectors, gpu)
    blocks = [simplified((count + i64(threads - 1)) // i64(threads)) for count in vectors]
    begins = [i64(0)]
    for count in blocks:
        begins.append(simplified(begins[-1] + count))
    with T.launch_thread("blockIdx.x", simplified(tirx.max(begins[-1], i64(1)))) as block:
        with T.launch_thread("threadIdx.x", i64(threads)) as thread:
            views = Views.declare(func, gpu)
            _write_ranges(plans, begins, block, threads, thread, views)


def _write_ranges(
    plans: Sequence[Lanes],
    begins: Sequence[tirx.Expr],
    block: tirx.Expr,
    threads: int,
    thread: tirx.Expr,
    views: Views,
) -> None:
    plan, *rest = plans
    if not rest:
        write_points(plan, views, T.bind((block - begins[0]) * i64(threads) + thread))
        return
    with T.If(block < begins[1]):
        with T.Then():
            _write_ranges([plan], begins, block, threads, thread, views)
        with T.Else():
            _write_ranges(rest, begins[1:], block, threads, thread, views)


def _threads(vectors: Sequence[tirx.Expr], gpu: GPUInfo) -> int:
    """Threads of a block: as many as still give every multiprocessor two blocks."""
    counts = [constant(count) for count in vectors]
    total = sum(count for count in counts if count is not None)
    threads = min(_LARGEST_BLOCK, gpu.max_threads)
    if None in counts:
        return threads
    while threads > _SMALLEST_BLOCK and total < 2 * gpu.multiprocessors * threads:
        threads //= 2
    return threads
