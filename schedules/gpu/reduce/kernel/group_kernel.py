# SPDX-License-Identifier: Apache-2.0
"""GPU kernel of a group of coalesced reductions, for both ``cuda`` and ``opencl``.

Sisters, with or without epilogues::

    for tile in blockIdx.y, split in blockIdx.x:          # blockIdx.x alone if nothing is split
        for row, lane in threadIdx.x:
            states = identities
            for n in this split's share, unroll x vector elements at once:
                states = combine(states, values(m, n))    # loads first, 16 bytes each
                elements[m, n] = f(m, n)                  # if there are any
            states = combine over the block               # shuffles, shared memory
            finish                               # one_block, cluster, atomic or last_block

:mod:`schedules.gpu.reduce.kernel.chain_body` has the body of a chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.core.intrinsics import current_stream
from schedules.gpu.core.kernel_function import resident_blocks, unless_empty, write_kernels
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS
from schedules.tir.index_math import ceildiv, i64

from ..plan.config import ReduceConfig, blocks_at_once
from ..plan.group import ReduceGroup
from . import finishing, state_buffers
from .block_combine import combine_lanes, combine_rows
from .chain_body import write_chain
from .context import ReduceContext
from .initialise_output import initialise_output
from .reduced_loop import combine_vector, values_of, visit_share
from .stored_elements import store_elements, visit_twice

_FINISHES = {
    "one_block": finishing.one_block,
    "cluster": finishing.cluster,
    "atomic": finishing.atomic,
}


def write_kernel(group: ReduceGroup, config: ReduceConfig, gpu: GPUInfo) -> tirx.PrimFunc:
    """A function with thread bindings that computes ``group`` by ``config``.

    With the finish ``atomic`` it has two kernels, of which the first initialises the outputs.
    """

    def body() -> None:
        if config.finish == "atomic":
            initialise_output(group, config, gpu)
        with _threads(group, config, gpu) as ctx:
            _write_body(ctx)

    return write_kernels(group.func, body)


@contextmanager
def _threads(group: ReduceGroup, config: ReduceConfig, gpu: GPUInfo) -> Iterator[ReduceContext]:
    """Open the grid; the blocks of a cluster are neighbours in it."""
    count = ceildiv(group.outputs, config.tile_outputs)
    at_once = _blocks_at_once(group, config)
    if config.cluster > 1:
        size = i64(config.cluster)
        with (
            unless_empty(count),
            T.launch_thread("blockIdx.x", count * size) as block,
            T.launch_thread("clusterCtaIdx.x", size),
            T.launch_thread("threadIdx.x", i64(config.threads)) as thread,
            resident_blocks(gpu, at_once),
        ):
            yield ReduceContext.open(group, config, gpu, block // size, block % size, thread)
        return
    stream = current_stream(gpu) if config.finish == "last_block" else None
    axis = "blockIdx.y" if config.splits > 1 else "blockIdx.x"
    with unless_empty(count), T.launch_thread(axis, count) as tile:
        with T.launch_thread("threadIdx.x", i64(config.threads)) as thread:
            if config.splits == 1:
                with resident_blocks(gpu, at_once):
                    yield ReduceContext.open(group, config, gpu, tile, i64(0), thread)
                return
            with (
                T.launch_thread("blockIdx.x", i64(config.splits)) as split,
                resident_blocks(gpu, at_once),
            ):
                yield ReduceContext.open(group, config, gpu, tile, split, thread, stream)


def _blocks_at_once(group: ReduceGroup, config: ReduceConfig) -> int:
    """Blocks that should share a multiprocessor; 0 leaves it to the compiler."""
    if group.is_chain:
        return 1 if config.cluster > 1 and config.threads > COSTS.large_block else 0
    workloads = [reduction.workload for reduction in group.reductions]
    return blocks_at_once(config, workloads, group.row_inputs(), group.row_outputs())


def _write_body(ctx: ReduceContext) -> None:
    if ctx.group.is_chain:
        write_chain(ctx)
        return
    [stage] = ctx.group.stages
    vector = ctx.config.vector
    states = state_buffers.allocate(stage.workloads, vector, "local")
    state_buffers.clear(stage.workloads, states, vector)
    is_last_block = ctx.config.finish == "last_block"
    place = finishing.open_place(ctx, stage) if is_last_block else None
    # The words that all blocks share are far: they are read while the first loads are under way.
    take = None if place is None else partial(finishing.take_place, ctx, place)
    elements, exists = ctx.group.elements, ctx.exists(ctx.first_output)
    store = store_elements(ctx, elements, ctx.safe_output(), condition=exists)
    visit = visit_twice(combine_vector(ctx, stage, states, vector), store)
    state_buffers.begin_positions(stage.workloads, states, vector)
    visit_share(ctx, values_of(stage, elements), visit, take)
    state_buffers.end_positions(stage.workloads, states, vector)
    if ctx.is_y:
        combine_rows(ctx, stage.workloads, states)
    else:
        state_buffers.fold(stage.workloads, states, vector)
        meeting = None if place is None else finishing.tell_ticket(ctx, place)
        combine_lanes(ctx, stage.workloads, states, meeting)
    if place is None:
        _FINISHES[ctx.config.finish](ctx, stage, states)
    else:
        finishing.last_block(ctx, stage, states, place)
