# SPDX-License-Identifier: Apache-2.0
"""What happens to a block's states: written, added atomically, or left to the last block."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..reduce_operator import State, field_dtypes, finish
from . import reduce_state
from .atomics import atomic_update
from .block_combine import combine_groups
from .device_ops import draw_ticket, fence, sync
from .index_math import i64
from .reduce_config import partials, power_of_two, ticket_words
from .reduce_context import ReduceContext
from .reduce_state import Buffers


def one_block(ctx: ReduceContext, states: Buffers) -> None:
    """Write the outputs of the block."""
    _for_each_result(ctx, states, lambda m, state: _write(ctx, m, state))


def atomic(ctx: ReduceContext, states: Buffers) -> None:
    """Combine the states of the block with the outputs, which hold the identity."""
    _for_each_result(ctx, states, lambda m, state: atomic_update(ctx, m, state[0]))


def last_block(ctx: ReduceContext, states: Buffers) -> None:
    """Leave the states in the scratch; the block that comes last combines those of its tile."""
    tickets, kept = _scratch(ctx)
    width = ctx.config.tile_outputs
    base = (ctx.tile * i64(ctx.config.splits) + ctx.split) * i64(width)

    def keep(m: tirx.Expr, state: State) -> None:
        reduce_state.store(kept, base + (m - ctx.tile_start), state)

    _for_each_result(ctx, states, keep, guarded=False)
    fence(ctx.gpu)
    sync()
    is_last = T.alloc_buffer((1,), "int32", scope="shared")
    with T.If(tirx.EQ(ctx.thread, i64(0))):
        with T.Then():
            counter = T.address_of(tickets[ctx.tile])
            T.buffer_store(is_last, draw_ticket(ctx.gpu, counter, ctx.config.splits), [0])
    sync()
    ticket = T.bind(is_last[0])
    with T.If(tirx.EQ(ticket, tirx.const(ctx.config.splits - 1, "int32"))):
        with T.Then():
            fence(ctx.gpu)
            if ctx.gpu.kind == "opencl":
                with T.If(tirx.EQ(ctx.thread, i64(0))):
                    with T.Then():
                        T.buffer_store(tickets, tirx.const(0, "int32"), [ctx.tile])
            _combine_partials(ctx, kept)


def _combine_partials(ctx: ReduceContext, kept: Buffers) -> None:
    """Combine the partial results of a tile in the order of their splits and write the outputs."""
    config, workload = ctx.config, ctx.workload
    width = min(config.tile_outputs, config.threads)
    groups = min(config.threads // width, power_of_two(config.splits))
    group, column = ctx.thread // i64(width), ctx.thread % i64(width)
    state = reduce_state.allocate(workload, 1, "local")
    for chunk in range(0, config.tile_outputs, width):
        place = column + i64(chunk)
        reduce_state.clear(workload, state, 1)
        with T.serial(i64(0), i64(-(-config.splits // groups))) as step:
            split = T.bind(step * i64(groups) + group)
            with T.If(tirx.all(group < i64(groups), split < i64(config.splits))):
                with T.Then():
                    row = ctx.tile * i64(config.splits) + split
                    read = reduce_state.load(kept, row * i64(config.tile_outputs) + place)
                    reduce_state.update(workload, state, 0, read)
        combine_groups(ctx, state, group, groups, column, width)
        m = ctx.tile_start + place
        with _where(tirx.EQ(group, i64(0)), ctx.exists(m)):
            with T.Then():
                _write(ctx, m, reduce_state.load(state, 0))


def _for_each_result(
    ctx: ReduceContext,
    states: Buffers,
    action: Callable[[tirx.Expr, State], None],
    guarded: bool = True,
) -> None:
    """Call ``action`` with each output of the block and its state, on the thread that has it."""
    leader = tirx.EQ(ctx.row if ctx.is_y else ctx.lane, i64(0))
    first = ctx.first_output
    with _where(leader, ctx.exists(first) if guarded else None):
        with T.Then():
            for k in range(ctx.config.vector if ctx.is_y else 1):
                action(first + i64(k), reduce_state.load(states, k))


def _where(condition: tirx.Expr, other: tirx.Expr | None):
    return T.If(condition if other is None else tirx.all(condition, other))


def _write(ctx: ReduceContext, m: tirx.Expr, state: State) -> None:
    ctx.write(m, finish(ctx.workload, state, ctx.reduction.reduced))


def _scratch(ctx: ReduceContext) -> tuple[tirx.Buffer, list[tirx.Buffer]]:
    """The tickets, and one buffer of partial results for each field, all views of the scratch."""
    scratch = ctx.reduction.scratch
    assert scratch is not None, "last_block is only chosen where there is a scratch"
    words = int(scratch.shape[0])
    tickets = T.decl_buffer((words,), "int32", data=scratch.data)
    word = ticket_words(ctx.config, ctx.reduction.loops)
    count = partials(ctx.config, ctx.reduction.loops)
    fields = []
    for dtype in field_dtypes(ctx.workload):
        size = 2 if dtype.endswith("64") else 1
        fields.append(
            T.decl_buffer((count,), dtype, data=scratch.data, elem_offset=i64(word // size))
        )
        word += size * (-(-count // 2) * 2)
    return tickets, fields
