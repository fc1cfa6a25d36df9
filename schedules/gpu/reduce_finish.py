# SPDX-License-Identifier: Apache-2.0
"""What happens to a block's states: written, added atomically, or left to the last block."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..branch import when
from ..reduce_operator import State, field_dtypes, finish
from . import reduce_state
from .atomics import atomic_update_vector
from .block_combine import combine_groups
from .device_ops import draw_ticket, fence, reset_counter, sync
from .index_math import i64
from .reduce_config import partials, power_of_two, ticket_words
from .reduce_context import ReduceContext
from .reduce_state import Buffers


def one_block(ctx: ReduceContext, states: Buffers) -> None:
    """Write the outputs of the block."""
    _for_each_result(ctx, states, lambda m, state: _write(ctx, m, state))


def atomic(ctx: ReduceContext, states: Buffers) -> None:
    """Combine the states of the block with the outputs, which hold the identity."""
    first = ctx.first_output
    with when(_is_leader(ctx), ctx.exists(first)):
        values = [reduce_state.load(states, k)[0] for k in range(_results(ctx))]
        atomic_update_vector(ctx, first, values)


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
    drawn = T.alloc_buffer((1,), "int32", scope="shared")
    with T.If(tirx.EQ(ctx.thread, i64(0))):
        with T.Then():
            counter = T.address_of(tickets[ctx.tile])
            own = T.bind(draw_ticket(ctx.gpu, counter, ctx.config.splits))
            T.buffer_store(drawn, own, [0])
            reset_counter(ctx.gpu, counter, own, ctx.config.splits)
    sync()
    ticket = T.bind(drawn[0])
    is_last = tirx.EQ(ticket, tirx.const(ctx.config.splits - 1, "int32"))
    if ctx.gpu.kind == "opencl":  # compilers of OpenCL err on barriers under a condition
        fence(ctx.gpu)
        _combine_partials(ctx, kept, is_last)
    else:
        with T.If(is_last):
            with T.Then():
                _combine_partials(ctx, kept)


def _combine_partials(
    ctx: ReduceContext, kept: Buffers, condition: tirx.Expr | None = None
) -> None:
    """Combine the partial results of a tile in the order of their splits and write the outputs.

    All threads come here; memory is read and written under ``condition``, if there is one.
    """
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
            with when(group < i64(groups), split < i64(config.splits), condition):
                row = ctx.tile * i64(config.splits) + split
                read = reduce_state.load(kept, row * i64(config.tile_outputs) + place)
                reduce_state.update(workload, state, 0, read)
        combine_groups(ctx, state, group, groups, column, width)
        m = ctx.tile_start + place
        with when(tirx.EQ(group, i64(0)), ctx.exists(m), condition):
            _write(ctx, m, reduce_state.load(state, 0))


def _for_each_result(
    ctx: ReduceContext,
    states: Buffers,
    action: Callable[[tirx.Expr, State], None],
    guarded: bool = True,
) -> None:
    """Call ``action`` with each output of the block and its state, on the thread that has it."""
    first = ctx.first_output
    with when(_is_leader(ctx), ctx.exists(first) if guarded else None):
        for k in range(_results(ctx)):
            action(first + i64(k), reduce_state.load(states, k))


def _is_leader(ctx: ReduceContext) -> tirx.Expr:
    """Whether the thread has results of the block."""
    return tirx.EQ(ctx.row if ctx.is_y else ctx.lane, i64(0))


def _results(ctx: ReduceContext) -> int:
    """How many neighbouring results a leader has."""
    return ctx.config.vector if ctx.is_y else 1


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
