# SPDX-License-Identifier: Apache-2.0
"""Combining the states of the blocks of a cluster, in an order that never changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx

from ..branch import when
from . import cluster_ops, reduce_state
from .device_ops import sync
from .index_math import i64
from .reduce_context import ReduceContext
from .reduce_state import Buffers, States, Workloads


class ClusterExchange:
    """Shared memory that the blocks of a cluster read of each other.

    Parameters
    ----------
    ctx : ReduceContext
        The thread; its split is the rank of its block.
    """

    def __init__(self, ctx: ReduceContext):
        self.ctx = ctx
        self._shared: list[tirx.Buffer] = []

    def combine(
        self, workloads: Workloads, states: Buffers, condition: tirx.Expr | None = None
    ) -> None:
        """Combine the states of the leaders of all blocks, in the order of their ranks.

        Parameters
        ----------
        workloads : Sequence[ReduceWorkload]
            The sisters.
        states : Buffers
            Those of the thread. The leaders get the same bits in all blocks.
        condition : tirx.Expr | None
            Which blocks get them, if not all.
        """
        ctx, results = self.ctx, self.ctx.results
        member, members = (ctx.lane, ctx.config.lanes) if ctx.is_y else (ctx.row, ctx.config.rows)
        places = [i64(k * members) + member for k in range(results)]
        # Of its own for each call: others may read it until they leave.
        shared = reduce_state.allocate(workloads, members * results, "shared")
        self._shared += [buffer for fields in shared for buffer in fields]
        sync()  # TVM gives the memory that was read before to the new buffers
        with when(ctx.is_leader):
            for k, place in enumerate(places):
                reduce_state.store(shared, place, reduce_state.load(states, k))
        cluster_ops.arrive()
        cluster_ops.wait()
        with when(ctx.is_leader, condition):
            for k, place in enumerate(places):
                reduce_state.store(states, k, _read(shared, place, 0))
                for rank in range(1, ctx.config.cluster):
                    reduce_state.update(workloads, states, k, _read(shared, place, rank))

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Let other blocks read to the end while what is built inside runs; nothing follows it."""
        cluster_ops.arrive()
        yield
        cluster_ops.wait()
        for buffer in self._shared:
            cluster_ops.keep(buffer)


def _read(shared: Buffers, place: tirx.Expr, rank: int) -> States:
    """The states of another block."""
    return [tuple(cluster_ops.read(field, place, rank) for field in fields) for fields in shared]
