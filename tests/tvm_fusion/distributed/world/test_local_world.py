# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads: messages, collectives, failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.distribute.exchange import Exchange, LocalBuffer, Message
from tvm_fusion.distributed.world.local_world import LocalWorld, run_ranks
from tvm_fusion.errors import DistributedError, InvalidInputError

RING = Exchange(3, tuple(Message(r, (r + 1) % 3, "A", ((r, r + 1),)) for r in range(3)))


def buffer_of(rank: int) -> dict[str, LocalBuffer]:
    values = np.full(3, np.nan)
    values[rank] = rank
    return {"A": LocalBuffer(values, (0,))}


def test_ring() -> None:
    def work(world: LocalWorld) -> list[float]:
        buffers = buffer_of(world.rank)
        world.start(RING, buffers)
        world.finish(RING)
        world.barrier()
        assert world.sent == [(RING.sent_by(world.rank)[0], 8)]
        return list(np.nan_to_num(buffers["A"].array, nan=-1))

    assert run_ranks(3, work) == [[0, -1, 2], [0, 1, -1], [-1, 1, 2]]


def test_gather() -> None:
    found = run_ranks(2, lambda world: world.all_gather(np.array([world.rank, 7])).tolist())
    assert found == [[[0, 7], [1, 7]]] * 2


@pytest.mark.parametrize("size", [0, "2", 1.0])
def test_a_number_of_ranks_that_is_none(size: Any) -> None:
    with pytest.raises(InvalidInputError, match="number of ranks is .*; expected a positive int"):
        run_ranks(size, lambda world: world.rank)


def test_different_texts() -> None:
    with pytest.raises(DistributedError, match=r"ranks \[2\] and rank 0 have different plans"):
        run_ranks(3, lambda world: world.agree("a" if world.rank < 2 else "b", "plans"))


def test_a_failing_rank_ends_the_others() -> None:
    def work(world: LocalWorld) -> None:
        if world.rank == 1:
            raise ValueError("no luck")
        world.barrier()

    with pytest.raises(ValueError, match="no luck"):
        run_ranks(3, work)


def test_a_missing_message() -> None:
    def work(world: LocalWorld) -> None:
        if world.rank:
            world.start(RING, buffer_of(world.rank))
            world.finish(RING)

    with pytest.raises(DistributedError, match="exchange 3: rank 1 waits for rank 0 for more than"):
        run_ranks(3, work, timeout=0.1)


def test_unbalanced_calls() -> None:
    def twice(world: LocalWorld) -> None:
        world.start(RING, buffer_of(world.rank))
        world.start(RING, buffer_of(world.rank))

    with pytest.raises(DistributedError, match="exchange 3 is started twice"):
        run_ranks(1, twice)
    with pytest.raises(DistributedError, match="exchange 3 is finished without a start"):
        run_ranks(1, lambda world: world.finish(RING))
