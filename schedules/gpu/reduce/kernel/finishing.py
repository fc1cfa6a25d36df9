# SPDX-License-Identifier: Apache-2.0
"""Finish of a block's states: written, or combined with those of other blocks.

They are combined by the first block of a cluster, by atomic updates, or by the last block.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.core.intrinsics import draw_ticket, fence, sync
from schedules.gpu.core.vector_loads import hold, store_vector
from schedules.gpu.core.workspace_slot import HEADER_WORDS, LaunchPlace
from schedules.tir.branch import when
from schedules.tir.index_math import ceil_power_of_two, i64
from schedules.workload.reduce_operator import field_dtypes

from ..plan.config import tiles, word_count
from ..plan.group import ReductionStage
from ..plan.workspace import partials, ticket_stride, workspace_layout
from . import state_buffers
from .atomic_update import atomic_update_vector
from .block_combine import combine_groups, combine_lanes
from .cluster_combine import ClusterExchange
from .context import ReduceContext
from .results import Results
from .state_buffers import Buffers, States


def one_block(ctx: ReduceContext, stage: ReductionStage, states: Buffers) -> None:
    """Write the outputs of the block, neighbouring ones of a thread together."""
    first = ctx.first_output
    with when(ctx.is_leader, ctx.exists(first)):
        results = [Results(ctx, first + i64(k)) for k in range(ctx.results)]
        for k, at_m in enumerate(results):
            at_m.add(stage, state_buffers.load(states, k))
        for result in stage.results:
            if result.output is not None:
                values = [at_m.values[result.var] for at_m in results]
                _store(ctx, result.output, first, values)


def _store(
    ctx: ReduceContext, output: tirx.Buffer, first: tirx.Expr, values: list[tirx.Expr]
) -> None:
    view = ctx.flat(output)
    if view is not None and len(values) > 1:
        store_vector(hold(values, view.dtype), view, first)
        return
    for k, value in enumerate(values):
        ctx.write(output, first + i64(k), value)


def cluster(ctx: ReduceContext, stage: ReductionStage, states: Buffers) -> None:
    """Combine the states of the cluster; its first block writes the outputs."""
    exchange = ClusterExchange(ctx)
    is_first = tirx.EQ(ctx.split, i64(0))
    exchange.combine(stage.workloads, states, is_first)
    with exchange.leaving(), when(is_first):
        one_block(ctx, stage, states)


def atomic(ctx: ReduceContext, stage: ReductionStage, states: Buffers) -> None:
    """Combine the states of the block with the outputs, which hold the identity."""
    first = ctx.first_output
    with when(ctx.is_leader, ctx.exists(first)):
        loaded = [state_buffers.load(states, k) for k in range(ctx.results)]
        for number, reduction in enumerate(stage.reductions):
            values = [state[number][0] for state in loaded]
            atomic_update_vector(ctx, reduction, first, values)


def open_place(ctx: ReduceContext, stage: ReductionStage) -> LaunchPlace:
    """The slot for the partial results of this launch, which is yet to be taken."""
    stored = next(result.output for result in stage.results if result.output is not None)
    output = ctx.flat(stored)
    address = T.address_of(stored[(0,) * len(stored.shape)] if output is None else output[0])
    return LaunchPlace(ctx.gpu, ctx.workspace, address, ctx.stream)


def take_place(ctx: ReduceContext, place: LaunchPlace) -> None:
    """Find or claim the slot on one thread; a barrier must follow."""
    with when(tirx.EQ(ctx.thread, i64(0))):
        place.take()


def last_block(
    ctx: ReduceContext, stage: ReductionStage, states: Buffers, place: LaunchPlace
) -> None:
    """Leave the states in the slot, which is taken; the last block combines those of its tile."""
    count = tiles(ctx.config, stage.reductions[0].loops)
    sync()
    tickets, kept = _workspace(ctx, stage)
    ticket = place.number * i64(ticket_stride(count)) + ctx.tile
    row = (place.number * i64(count) + ctx.tile) * i64(ctx.config.splits)
    base = (row + ctx.split) * i64(ctx.config.tile_outputs)

    def keep(m: tirx.Expr, state: States) -> None:
        state_buffers.store(kept, base + (m - ctx.tile_start), state)

    _for_each_result(ctx, states, keep, guarded=False)
    fence(ctx.gpu)
    sync()
    drawn = T.alloc_buffer((1,), "int32", scope="shared")
    with T.If(tirx.EQ(ctx.thread, i64(0))):
        with T.Then():
            counter = T.address_of(tickets[ticket])
            T.buffer_store(drawn, draw_ticket(ctx.gpu, counter, ctx.config.splits), [0])
    sync()
    is_last = tirx.EQ(T.bind(drawn[0]), tirx.const(ctx.config.splits - 1, "int32"))
    # OpenCL compilers mishandle barriers under a condition.
    is_opencl = ctx.gpu.kind == "opencl"
    condition = is_last if is_opencl else None
    fence(ctx.gpu)
    with when(None if is_opencl else is_last):
        _combine_partials(ctx, stage, kept, row, condition)
        fence(ctx.gpu)
        sync()
        with when(tirx.EQ(ctx.thread, i64(0)), condition):
            place.give_back(count)


def _combine_partials(
    ctx: ReduceContext,
    stage: ReductionStage,
    kept: Buffers,
    row: tirx.Expr,
    condition: tirx.Expr | None = None,
) -> None:
    """Combine the partial results of a tile in the order of their splits and write the outputs.

    They are rows of the workspace from ``row`` on. All threads execute this; memory is accessed
    under ``condition``, if there is one.
    """
    config, workloads = ctx.config, stage.workloads
    width = min(config.tile_outputs, config.threads)
    groups = min(config.threads // width, ceil_power_of_two(config.splits))
    group, column = ctx.thread // i64(width), ctx.thread % i64(width)
    state = state_buffers.allocate(workloads, 1, "local")
    for chunk in range(0, config.tile_outputs, width):
        output = column + i64(chunk)
        state_buffers.clear(workloads, state, 1)
        with T.serial(i64(0), i64(-(-config.splits // groups))) as step:
            split = T.bind(step * i64(groups) + group)
            with when(group < i64(groups), split < i64(config.splits), condition):
                at = (row + split) * i64(config.tile_outputs) + output
                read = state_buffers.load(kept, at)
                state_buffers.update(workloads, state, 0, read)
        if width == config.rows == 1 and ctx.gpu.warp_size > 1:  # threads past the groups have none
            combine_lanes(ctx, workloads, state)
        else:
            combine_groups(ctx, workloads, state, group, groups, column, width)
        m = ctx.tile_start + output
        with when(tirx.EQ(group, i64(0)), ctx.exists(m), condition):
            _write(ctx, stage, m, state_buffers.load(state, 0))


def _for_each_result(
    ctx: ReduceContext,
    states: Buffers,
    action: Callable[[tirx.Expr, States], None],
    guarded: bool = True,
) -> None:
    """Call ``action`` with each output of the block and its states, on the thread that holds it."""
    first = ctx.first_output
    with when(ctx.is_leader, ctx.exists(first) if guarded else None):
        for k in range(ctx.results):
            action(first + i64(k), state_buffers.load(states, k))


def _write(ctx: ReduceContext, stage: ReductionStage, m: tirx.Expr, states: States) -> None:
    """Compute the results and the epilogues of one output, and store the outputs among them."""
    results = Results(ctx, m)
    results.add(stage, states)
    results.write(stage)


def _workspace(ctx: ReduceContext, stage: ReductionStage) -> tuple[tirx.Buffer, Buffers]:
    """The tickets, and a buffer of partial results for each field, all views of the workspace."""
    config, loops, data = ctx.config, stage.reductions[0].loops, ctx.workspace.data
    tickets = T.decl_buffer(ctx.workspace.shape, "int32", data=data, elem_offset=i64(HEADER_WORDS))
    places, _ = workspace_layout(config, loops, stage.workloads)
    count = partials(config, loops)
    buffers = []
    for workload in stage.workloads:
        fields = []
        for dtype in field_dtypes(workload):
            offset = i64(places.pop(0) // word_count(dtype))
            fields.append(T.decl_buffer((count,), dtype, data=data, elem_offset=offset))
        buffers.append(fields)
    return tickets, buffers
