# SPDX-License-Identifier: Apache-2.0
"""Finish of a block's states: written, or combined with those of other blocks.

They are combined by the first block of a cluster, by atomic updates, or by the last block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.core import tagged_words
from schedules.gpu.core.intrinsics import sync
from schedules.gpu.core.machine_costs import COSTS
from schedules.gpu.core.tagged_words import word_count
from schedules.gpu.core.vector_loads import hold, store_vector
from schedules.gpu.core.workspace_slot import LaunchPlace
from schedules.tir.index_math import ceil_power_of_two, i64
from schedules.tir.statements import when
from schedules.workload.reduce_operator import State, field_dtypes
from schedules.workload.workspace_layout import first_word

from ..plan.config import blocks_at_once, state_words, tiles
from ..plan.group import ReductionStage
from . import state_buffers
from .atomic_update import atomic_update_vector
from .combine import ClusterExchange, Meeting, combine_groups, combine_lanes, exchange
from .context import ReduceContext, Results
from .state_buffers import Buffers, States

# Most words of a thread: for the one output of a tile in one word, and for others, where each
# thread has addresses of its own.
_WORDS_OF_ONE, _WORDS_OF_MANY = 16, 8
_OWN_REGISTERS = 28  # Registers of a thread that hold no words with their tags.


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
    count = tiles(ctx.config, stage.reductions[0].loops)
    splits = ctx.config.splits
    return LaunchPlace(ctx.gpu, ctx.workspace, address, ctx.stream, splits, count, ctx.tile)


def take_place(ctx: ReduceContext, place: LaunchPlace) -> None:
    """Find or claim the slot on one thread; a barrier must follow."""
    with when(tirx.EQ(ctx.thread, i64(0))):
        place.take()


def tell_ticket(ctx: ReduceContext, place: LaunchPlace) -> Meeting:
    """Code by which all threads learn slot and ticket at a barrier."""

    def tell() -> None:
        with when(tirx.EQ(ctx.thread, i64(0))):
            place.tell()

    return Meeting(tell, place.read)


def last_block(
    ctx: ReduceContext, stage: ReductionStage, states: Buffers, place: LaunchPlace
) -> None:
    """Leave the states in the slot, which is taken; the last block combines those of its tile."""
    if not place.is_read:  # the warps of a row have not met
        meeting = tell_ticket(ctx, place)
        meeting.before()
        sync()
        meeting.behind()
    partials = _Partials.open(ctx, stage, place)

    # Stores along a row are predicated, so that the compiler moves nothing into a branch.
    with when(ctx.is_leader if ctx.is_y else None):
        for k in range(ctx.results):
            output = ctx.first_output + i64(k) - ctx.tile_start
            own = state_buffers.load(states, k)
            partials.store(ctx.split, output, own, None if ctx.is_y else ctx.is_leader)
    is_last = T.bind(place.is_last)
    if ctx.gpu.kind == "opencl":  # whose compilers mishandle barriers under a condition
        sync()  # one thread may run to a barrier before another one starts
        _combine_partials(ctx, stage, partials, place, is_last)
        return
    with when(is_last):
        _combine_partials(ctx, stage, partials, place)


def _combine_partials(
    ctx: ReduceContext,
    stage: ReductionStage,
    partials: _Partials,
    place: LaunchPlace,
    condition: tirx.Expr | None = None,
) -> None:
    """Combine the partial results of a tile in the order of their splits and write the outputs.

    All threads execute this; memory is accessed under ``condition``, if there is one. The slot is
    given back by another warp than that of the first output, beside it: its fence takes longer.
    """
    config, workloads, warp = ctx.config, stage.workloads, ctx.gpu.warp_size
    is_one = config.tile_outputs == 1
    steps = -(-config.splits // warp)
    is_small = is_one and warp > 1 and steps * partials.count <= partials.room
    readers = warp if is_small else config.threads
    width = min(config.tile_outputs, readers)
    groups = min(readers // width, ceil_power_of_two(config.splits))
    group, column = ctx.thread // i64(width), ctx.thread % i64(width)
    reads = None if groups * width == config.threads else group < i64(groups)
    at_once = partials.at_once(groups)
    many = ceil_power_of_two(at_once)
    has_met = groups == 1 or (is_one and warp > 1)  # else combine_groups has a barrier

    def give_back() -> None:
        other = warp if warp < config.threads else 0
        with when(tirx.EQ(ctx.thread, i64(other)), condition):
            place.give_back()

    state = state_buffers.allocate(workloads, many, "local")
    is_full = config.splits == groups * at_once == groups * many and (reads is None or is_small)
    for chunk in range(0, config.tile_outputs, width):
        output = column + i64(chunk)
        if not is_full:
            state_buffers.clear(workloads, state, many)
        with when(reads):
            partials.read(state, output, group, groups, condition)
        if has_met:
            sync()  # all words have been read before the slot is given back
            if chunk + width >= config.tile_outputs:
                give_back()
        with when(ctx.thread < i64(warp) if is_small else None):
            state_buffers.fold(workloads, state, many)
            if is_small:
                exchange(workloads, state, groups)
        if is_one and warp > 1 and not is_small:  # threads past the groups have none
            combine_lanes(ctx, workloads, state)
        elif not is_small:
            combine_groups(ctx, workloads, state, group, groups, column, width)
        m = ctx.tile_start + output
        with when(tirx.EQ(group, i64(0)), ctx.exists(m), condition):
            _write(ctx, stage, m, state_buffers.load(state, 0))
    if not has_met:
        give_back()


def _write(ctx: ReduceContext, stage: ReductionStage, m: tirx.Expr, states: States) -> None:
    """Compute the results and the epilogues of one output, and store the outputs among them."""
    results = Results(ctx, m)
    results.add(stage, states)
    results.write(stage)


@dataclass(frozen=True)
class _Partials:
    """Partial results of a tile in the slot of the launch, as tagged words."""

    ctx: ReduceContext  # The thread.
    stage: ReductionStage
    words: tirx.Buffer  # All tagged words of the workspace.
    row: tirx.Expr  # Number of the tile's first block among all blocks of all slots.
    tag: tirx.Expr  # Tag of the launch.
    place: LaunchPlace  # The slot.

    @classmethod
    def open(cls, ctx: ReduceContext, stage: ReductionStage, place: LaunchPlace) -> _Partials:
        """Declare the view of the workspace; a barrier lies between taking the slot and this."""
        count = tiles(ctx.config, stage.reductions[0].loops)
        workspace, offset = ctx.workspace, first_word(count) // 2
        size = int(workspace.shape[0]) // 2 - offset
        words = T.decl_buffer((size,), "int64", data=workspace.data, elem_offset=i64(offset))
        row = (place.number * i64(count) + ctx.tile) * i64(ctx.config.splits)
        return cls(ctx, stage, words, row, T.bind(place.tag), place)

    def store(
        self,
        split: tirx.Expr,
        output: tirx.Expr,
        states: States,
        condition: tirx.Expr | None = None,
    ) -> None:
        """Store the states of an output of the tile, under a condition if there is one."""
        first = self._first(split, output)
        places = [first + i64(k * self.ctx.config.tile_outputs) for k in range(self.count)]
        for state in states:
            for value in state:
                count = word_count(str(value.ty.dtype))
                words, gpu = self.words, self.ctx.gpu
                tagged_words.store(gpu, words, places[:count], value, self.tag, condition)
                places = places[count:]

    def at_once(self, groups: int) -> int:
        """States of an output that a thread of one of ``groups`` reads at once."""
        steps = -(-self.ctx.config.splits // groups)
        return max(1, min(steps, self.room // self.count))

    @property
    def room(self) -> int:
        """Words that a thread reads at once."""
        group, config = self.ctx.group, self.ctx.config
        inputs, outputs = group.row_inputs(), group.row_outputs()
        blocks = blocks_at_once(config, self.stage.workloads, inputs, outputs)
        registers = COSTS.register_file // (config.threads * blocks)
        is_one = config.tile_outputs == self.count == 1
        most = _WORDS_OF_ONE if is_one else _WORDS_OF_MANY
        return min(most, max(1, (registers - _OWN_REGISTERS) // 2))

    def read(
        self,
        states: Buffers,
        output: tirx.Expr,
        group: tirx.Expr,
        groups: int,
        condition: tirx.Expr | None,
    ) -> None:
        """Combine the states of every ``groups``-th block, from block ``group`` on, into several.

        There are :meth:`at_once`, which are identities before, unless each gets one state.
        """
        step = self.at_once(groups) * groups
        turns, rest = divmod(self.ctx.config.splits, step)
        is_one = turns + (rest > 0) == 1

        def turn(start: tirx.Expr, count: int) -> None:
            first = T.bind(start + group)
            exists, places = [], []
            for k in range(-(-count // groups)):
                is_whole = (k + 1) * groups <= count
                exists.append(None if is_whole else group < i64(count - k * groups))
                places += self._places(first, k * groups, output, is_whole)
            found = tagged_words.wait_for(
                self.ctx.gpu, self.words, places, self.tag, self.place.wait, condition
            )
            for k, each in enumerate(exists):
                with when(each):
                    own = self._states(found[k * self.count : (k + 1) * self.count])
                    if is_one:
                        state_buffers.store(states, k, own)
                    else:
                        state_buffers.update(self.stage.workloads, states, k, own)

        if turns:
            with T.serial(i64(0), i64(turns)) as number:
                turn(number * i64(step), step)
        if rest:
            turn(i64(turns * step), rest)

    @property
    def count(self) -> int:
        """Words of an output."""
        return state_words(self.stage.workloads)

    def _first(self, split: tirx.Expr, output: tirx.Expr) -> tirx.Expr:
        """Place of the first word of an output."""
        return (self.row + split) * i64(self.count * self.ctx.config.tile_outputs) + output

    def _places(
        self, split: tirx.Expr, further: int, output: tirx.Expr, is_whole: bool
    ) -> list[tuple[tirx.Expr, int]]:
        """Places and offsets of an output's words in a block, or in the last one behind all."""
        outputs = self.ctx.config.tile_outputs
        if not is_whole:
            split = tirx.min(split + i64(further), i64(self.ctx.config.splits - 1))
            further = 0
        first, offset = self._first(split, output), further * self.count * outputs
        return [(first, offset + k * outputs) for k in range(self.count)]

    def _states(self, words: Sequence[tirx.Expr]) -> list[State]:
        states = []
        for workload in self.stage.workloads:
            values = []
            for dtype in field_dtypes(workload):
                count = word_count(dtype)
                values.append(tagged_words.value_of(words[:count], dtype))
                words = words[count:]
            states.append(tuple(values))
        return states
