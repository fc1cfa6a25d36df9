# SPDX-License-Identifier: Apache-2.0
"""Combination of the states of a block's threads, and of a cluster's blocks, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tvm import tirx

from schedules.gpu.core import cluster_intrinsics
from schedules.gpu.core.intrinsics import shuffle_xor, sync
from schedules.tir.index_math import i64
from schedules.tir.statements import when

from . import state_buffers
from .context import ReduceContext
from .state_buffers import Buffers, States, Workloads


class Meeting(NamedTuple):
    """Code at a barrier that all threads of the block reach."""

    before: Callable[[], None]
    behind: Callable[[], None]


_FEW_WARPS = 8  # whose states all threads combine, where a branch to one of them would take longer
TREE_ARITY = 4  # states that a thread combines between two barriers


def combine_lanes(
    ctx: ReduceContext,
    workloads: Workloads,
    states: Buffers,
    meeting: Meeting | None = None,
) -> None:
    """Combine the states at 0 of a row's lanes; lane 0 gets the result there.

    What is emitted by ``meeting`` comes before and behind the barrier of the warps of a row.
    """
    lanes = ctx.config.lanes
    if lanes == 1:
        return
    width = min(lanes, ctx.gpu.warp_size)
    exchange(workloads, states, width)
    if width == 1:
        combine_groups(ctx, workloads, states, ctx.lane, lanes, ctx.row, ctx.config.rows)
    elif width < lanes:
        _warps_through_memory(ctx, workloads, states, width, meeting)


def combine_rows(ctx: ReduceContext, workloads: Workloads, states: Buffers) -> None:
    """Combine the vectors of states of all rows; row 0 gets the result."""
    config = ctx.config
    member, members = ctx.lane, config.lanes
    combine_groups(ctx, workloads, states, ctx.row, config.rows, member, members, config.vector)


def share_lanes(ctx: ReduceContext, workloads: Workloads, states: Buffers) -> None:
    """Combine the states at 0 of a row's lanes; all of them get the result there."""
    lanes = ctx.config.lanes
    width = min(lanes, ctx.gpu.warp_size)
    if width > 1:
        exchange(workloads, states, width)  # All lanes have the same bits then.
        if width < lanes:
            _share_warps(ctx, workloads, states, width)
    elif lanes > 1:
        combine_groups(ctx, workloads, states, ctx.lane, lanes, ctx.row, ctx.config.rows)
        share_leaders(ctx, workloads, states)


def share_rows(ctx: ReduceContext, workloads: Workloads, states: Buffers) -> None:
    """Combine the vectors of states of all rows; all rows get the result."""
    if ctx.config.rows > 1:
        combine_rows(ctx, workloads, states)
        share_leaders(ctx, workloads, states)


def share_leaders(ctx: ReduceContext, workloads: Workloads, states: Buffers) -> None:
    """Broadcast the states of the leaders to their rows, or to their columns in form *y*."""
    config = ctx.config
    member, members = (ctx.lane, config.lanes) if ctx.is_y else (ctx.row, config.rows)
    shared = state_buffers.allocate(workloads, members * ctx.results, "shared")
    sync()
    with when(ctx.is_leader):
        for k in range(ctx.results):
            place = i64(k * members) + member
            state_buffers.store(shared, place, state_buffers.load(states, k))
    sync()
    for k in range(ctx.results):
        place = i64(k * members) + member
        state_buffers.store(states, k, state_buffers.load(shared, place))


def combine_groups(
    ctx: ReduceContext,
    workloads: Workloads,
    states: Buffers,  # ``vector`` states of each thread.
    # ``group``, ``groups``: the thread's group, and the number of groups, a power of two.
    group: tirx.Expr,
    groups: int,
    # ``member``, ``members``: the thread's number in its group, and the size of a group.
    member: tirx.Expr,
    members: int,
    vector: int = 1,  # States of a thread.
) -> None:
    """Combine states of equal members of all groups in shared memory; group 0 gets the result."""

    def place(of: tirx.Expr, k: int) -> tirx.Expr:
        # Members innermost: neighbouring threads use different banks.
        return (of * i64(vector) + i64(k)) * i64(members) + member

    while groups > 1:
        fewer = max(1, groups // TREE_ARITY)
        shared = state_buffers.allocate(workloads, groups * members * vector, "shared")
        sync()  # TVM may give the memory that was just read to the new buffers
        with when(None if groups * members == ctx.config.threads else group < i64(groups)):
            for k in range(vector):
                state_buffers.store(shared, place(group, k), state_buffers.load(states, k))
        sync()
        with when(group < i64(fewer)):
            for other in range(fewer, groups, fewer):
                for k in range(vector):
                    read = state_buffers.load(shared, place(group + i64(other), k))
                    state_buffers.update(workloads, states, k, read)
        groups = fewer


def exchange(workloads: Workloads, states: Buffers, width: int) -> None:
    """Combine the states at 0 of groups of ``width`` neighbouring lanes by a butterfly."""
    for distance in _halves(width):
        other = [
            tuple(shuffle_xor(value, distance, width) for value in state)
            for state in state_buffers.load(states, 0)
        ]
        state_buffers.update(workloads, states, 0, other)


def _warps_through_memory(
    ctx: ReduceContext,
    workloads: Workloads,
    states: Buffers,
    width: int,
    meeting: Meeting | None,
) -> None:
    """Combine in lane 0 of each row the states of the first lanes of the row's warps, as a tree."""
    warps = ctx.config.lanes // width
    shared = state_buffers.allocate(workloads, ctx.config.threads // width, "shared")
    with when(tirx.EQ(ctx.thread % i64(width), i64(0))):
        state_buffers.store(shared, ctx.thread // i64(width), state_buffers.load(states, 0))
    if meeting is not None:
        meeting.before()
    sync()
    if meeting is not None:
        meeting.behind()
    is_one = meeting is None or warps > _FEW_WARPS
    with when(tirx.EQ(ctx.lane, i64(0)) if is_one else None):
        each = state_buffers.allocate(workloads, warps, "local")
        for warp in range(warps):
            of_warp = state_buffers.load(shared, ctx.row * i64(warps) + i64(warp))
            state_buffers.store(each, warp, of_warp)
        state_buffers.fold(workloads, each, warps)
        state_buffers.store(states, 0, state_buffers.load(each, 0))


def _share_warps(ctx: ReduceContext, workloads: Workloads, states: Buffers, width: int) -> None:
    """Combine in every warp the states of all warps of its row."""
    warps = ctx.config.lanes // width
    shared = state_buffers.allocate(workloads, ctx.config.threads // width, "shared")
    sync()  # another stage may still read the same memory
    with when(tirx.EQ(ctx.thread % i64(width), i64(0))):
        state_buffers.store(shared, ctx.thread // i64(width), state_buffers.load(states, 0))
    sync()
    one_of_each = ctx.row * i64(warps) + ctx.lane % i64(warps)
    state_buffers.store(states, 0, state_buffers.load(shared, one_of_each))
    exchange(workloads, states, warps)


def _halves(width: int) -> list[int]:
    found = []
    while width > 1:
        width //= 2
        found.append(width)
    return found


class ClusterExchange:
    """Shared memory of each block that the other blocks of a cluster read.

    Chains open it before any other shared memory.
    """

    def __init__(
        self,
        ctx: ReduceContext,  # The thread; its split is the rank of its block.
    ):
        self.ctx = ctx
        config = ctx.config
        self._members = config.lanes if ctx.is_y else config.rows
        # One for each stage: other blocks may read it until they leave.
        self._shared = [
            state_buffers.allocate(stage.workloads, self._members * ctx.results, "shared")
            for stage in ctx.group.stages
        ]
        self._unused = list(self._shared)
        self._keep()  # else TVM shares it with larger buffers, which then need other memory

    def combine(
        self,
        workloads: Workloads,  # The sisters of the stage.
        states: Buffers,  # States of the thread. The leaders get the same bits in all blocks.
        condition: tirx.Expr | None = None,  # Condition for a block to get them, if not all do.
    ) -> None:
        """Combine the states of the leaders of all blocks, in the order of their ranks.

        Called for each stage in turn.
        """
        ctx, shared = self.ctx, self._unused.pop(0)
        member = ctx.lane if ctx.is_y else ctx.row
        places = [i64(k * self._members) + member for k in range(ctx.results)]
        sync()  # sisters may share the memory of what was just read
        with when(ctx.is_leader):
            for k, place in enumerate(places):
                state_buffers.store(shared, place, state_buffers.load(states, k))
        cluster_intrinsics.arrive()
        cluster_intrinsics.wait()
        with when(ctx.is_leader, condition):
            for k, place in enumerate(places):
                state_buffers.store(states, k, _read(shared, place, 0))
                for rank in range(1, ctx.config.cluster):
                    state_buffers.update(workloads, states, k, _read(shared, place, rank))

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Let other blocks read to the end while the code built inside runs; nothing follows it."""
        cluster_intrinsics.arrive()
        yield
        cluster_intrinsics.wait()
        self._keep()

    def _keep(self) -> None:
        for shared in self._shared:
            for fields in shared:
                for buffer in fields:
                    cluster_intrinsics.keep(buffer)


def _read(shared: Buffers, place: tirx.Expr, rank: int) -> States:
    """The states of another block."""
    return [
        tuple(cluster_intrinsics.read(field, place, rank) for field in fields) for fields in shared
    ]
