# SPDX-License-Identifier: Apache-2.0
"""GPU rules for element-wise functions, and for windows that slide over one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.gpu.core.kernel_function import write_kernels
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.rule import GPURule
from schedules.schedule_rule import KernelFacts
from schedules.tir.block_expressions import Stage, stages_of
from schedules.tir.expression_walk import loads, uses
from schedules.tir.extents import constant
from schedules.tir.index_math import ceildiv, i64, simplified

from .coalescing import Lanes, best_lanes, injective_spaces, is_scattered, spaces_of
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


_LARGEST_WINDOW = 72  # 8 x 8, or 3 x 3 of eight channels


class Pooling(GPURule):
    """Maxima, averages and weighted sums of windows up to 8 x 8, with padding and strides.

    A thread computes neighbouring elements of the output, with the window unrolled: in NCHW4c four
    channels of a pixel, by 16-byte loads under the padding's condition. Element-wise producers and
    consumers are part of the kernel. Weighted sums are the depthwise convolutions, and those of a
    few channels a group, that no other rule takes: those of float16.

    Left alone: larger windows and whole rows, which are reductions; sums over all channels.
    """

    def kernel(self, facts: KernelFacts, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        return write_windows(facts.func, facts.read(stages_of), gpu)


def write_windows(
    func: tirx.PrimFunc, stages: Sequence[Stage] | None, gpu: GPUInfo
) -> tirx.PrimFunc | None:
    """The kernel of a function with these stages; None if they are not :class:`Pooling`'s."""
    if stages is None or not any(stage.reduced for stage in stages):
        return None
    if not all(_is_window(stage) for stage in stages if stage.reduced):
        return None
    return write_spaces(func, spaces_of(func, stages), gpu)


def _is_window(stage: Stage) -> bool:
    """Return whether a reduction is small and slides over one tensor, with weights or without."""
    extents = [constant(axis.dom.extent) for axis in stage.reduced]
    known = [extent for extent in extents if extent is not None]
    return (
        len(known) == len(extents)
        and math.prod(known) <= _LARGEST_WINDOW
        and slid_tensor(stage) is not None
    )


def slid_tensor(stage: Stage) -> tirx.Buffer | None:
    """Return the one tensor over which a reduction slides; None if there is none.

    It may have weights, but then sums over all channels are products of matrices.
    """
    read = [load for load in loads(stage.value) if not load.source.same_as(stage.output)]
    sliding = [
        (load.source, index) for load in read for index in load.indices if _slides(index, stage)
    ]
    if len({source for source, _ in sliding}) != 1:
        return None
    [source, _], *_ = sliding
    has_weights = any(not load.source.same_as(source) for load in read)
    is_slid = (
        constant(axis.dom.extent) == 1 or any(uses(index, axis.var) for _, index in sliding)
        for axis in stage.reduced
    )
    return source if not has_weights or all(is_slid) else None


def _slides(index: tirx.Expr, stage: Stage) -> bool:
    return _has(index, stage.axes) and _has(index, stage.reduced)


def _has(index: tirx.Expr, axes: Sequence[tirx.IterVar]) -> bool:
    return uses(index, *(axis.var for axis in axes))
