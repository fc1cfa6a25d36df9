# SPDX-License-Identifier: Apache-2.0
"""Combination of the states of the blocks of a cluster, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx

from schedules.gpu.core import cluster_intrinsics
from schedules.gpu.core.intrinsics import sync
from schedules.tir.branch import when
from schedules.tir.index_math import i64

from . import state_buffers
from .context import ReduceContext
from .state_buffers import Buffers, States, Workloads


class ClusterExchange:
    """Shared memory of each block that the other blocks of a cluster read.

    Chains open it before any other shared memory.

    Parameters
    ----------
    ctx : ReduceContext
        The thread; its split is the rank of its block.
    """

    def __init__(self, ctx: ReduceContext):
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
        self, workloads: Workloads, states: Buffers, condition: tirx.Expr | None = None
    ) -> None:
        """Combine the states of the leaders of all blocks, in the order of their ranks.

        Called for each stage in turn.

        Parameters
        ----------
        workloads : Sequence[ReduceWorkload]
            The sisters of the stage.
        states : Buffers
            Those of the thread. The leaders get the same bits in all blocks.
        condition : tirx.Expr | None
            Condition for a block to get them, if not all do.
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
