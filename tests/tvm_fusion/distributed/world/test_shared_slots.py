# SPDX-License-Identifier: Apache-2.0
"""Slots of shared memory: both sides find the same one, and it holds one message at a time."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from schedules.distribute.exchange import Exchange
from tvm_fusion.distributed.world.parcel import Parcel
from tvm_fusion.distributed.world.shared_slots import (
    MOST_BYTES,
    NodeSlots,
    SlotReceive,
    SlotSend,
    shared_file,
)

RANKS = {4: 0, 6: 1, 9: 2}  # Ranks of one node of several.


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with shared_file(len(RANKS)) as found:
        yield found
    assert not Path(found).exists()


def test_both_sides_find_the_same_slot_and_no_other_pair_does(path: str) -> None:
    nodes = {rank: NodeSlots(path, RANKS, rank) for rank in RANKS}
    pairs = [(a, b) for a in RANKS for b in RANKS if a != b]
    sizes = [(0, 100), (3, 7), (0, 50), (0, 5000), (3, 7), (0, 100)]
    for source, dest in pairs:
        for exchange, nbytes in sizes:
            slot = nodes[source].outgoing(exchange, dest, nbytes)
            assert slot is not None and not slot.is_full
            slot.data[:nbytes] = 16 * source + dest
            slot.send(nbytes)
            there = nodes[dest].incoming(exchange, source, nbytes)
            assert there is not None and there.is_full and there.nbytes == nbytes
            assert set(there.data[:nbytes].tolist()) == {16 * source + dest}
            there.take()
            assert not slot.is_full
            slot.data[:] = 255
        again = nodes[source].outgoing(0, dest, 5000)
        assert again is not None and again is nodes[source].outgoing(0, dest, 5000)
        assert again is not nodes[source].outgoing(0, dest, 100)


def test_messages_of_all_pairs_at_once(path: str) -> None:
    nodes = {rank: NodeSlots(path, RANKS, rank) for rank in RANKS}
    pairs = [(source, dest) for source in RANKS for dest in RANKS if source != dest]
    most = nodes[4].most
    for source, dest in pairs:
        slot = nodes[source].outgoing(0, dest, most)
        assert slot is not None and not slot.is_full
        slot.data[:] = 16 * source + dest
        slot.send(most)
    for source, dest in pairs:
        slot = nodes[dest].incoming(0, source, most)
        assert slot is not None and slot.is_full and (slot.data == 16 * source + dest).all()


def test_what_mpi_sends(path: str) -> None:
    node = NodeSlots(path, RANKS, 4)
    assert node.outgoing(0, 5, 8) is None  # Rank 5 is on another node.
    assert node.outgoing(0, 4, 8) is None  # itself
    assert node.outgoing(0, 6, node.most + 1) is None
    in_turn = Exchange(0, (), in_turn=True).slot
    assert node.outgoing(in_turn, 6, node.most_in_turn) is not None
    assert node.outgoing(in_turn, 6, node.most_in_turn + 1) is None
    slots = [node.outgoing(number, 6, node.most) for number in range(20)]
    assert slots[0] is not None and slots[-1] is None  # all memory of this pair is in use
    assert node.outgoing(0, 6, node.most) is slots[0]
    assert node.outgoing(0, 9, node.most) is not None


@pytest.mark.parametrize(("ranks", "most"), [(2, MOST_BYTES), (3, 1 << 19), (60, 1 << 18)])
def test_long_parcels_leave_room_for_others(path: str, ranks: int, most: int) -> None:
    found = NodeSlots(path, {rank: rank for rank in range(ranks)}, 0).most
    assert most - 64 <= found <= most  # whole cache lines


@pytest.mark.parametrize("ranks", range(2, 7))
def test_parcels_in_turn_leave_room_for_shorter_ones(path: str, ranks: int) -> None:
    node = NodeSlots(path, {rank: rank for rank in range(ranks)}, 0)
    for number in (-1, -2):
        for fraction in (1, 2, 4, 8):
            assert node.outgoing(number, 1, node.most_in_turn // fraction) is not None


@pytest.mark.parametrize("name", ["memfd_create", "posix_fallocate"])
def test_nothing_is_made_where_there_is_no_shared_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space")

    def made(ranks: int) -> bool:
        with shared_file(ranks) as path:
            return path != ""

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert made(2) and not made(1)
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, name, full)
        assert not made(2)
    assert os.listdir("/proc/self/fd") == before
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not made(2)


def test_parcels_through_a_slot(path: str) -> None:
    """A part of an array arrives in one of another form; 600 messages overflow the counts."""
    sides = NodeSlots(path, RANKS, 4), NodeSlots(path, RANKS, 6)
    here, there = np.zeros((5, 6), "float32"), np.zeros((3, 4), "float32")
    sent = Parcel(6, [here[1:4, 2:6]], lambda peer, n: sides[0].outgoing(1, peer, n))
    got = Parcel(4, [there], lambda peer, n: sides[1].incoming(1, peer, n))
    assert sent.slot is not None and got.slot is not None
    send, receive = SlotSend(sent.slot, sent.nbytes), SlotReceive(got.slot)
    for number in range(600):
        here[...] = np.arange(30).reshape(5, 6) + number
        assert send.Test() and not receive.Test()
        sent.pack()
        send.Start()
        here[...] = -1
        assert not send.Test() and receive.Test() and receive.Get_count() == 48
        got.unpack()
        np.testing.assert_array_equal(there, (np.arange(30).reshape(5, 6) + number)[1:4, 2:6])
