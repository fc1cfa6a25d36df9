# SPDX-License-Identifier: Apache-2.0
"""Program of every rank in the tests of exchanges: random parts and halos against one array."""

from __future__ import annotations

import os
import time
from unittest import mock

import numpy as np
from mpi4py import MPI

from schedules.distribute.exchange import Exchange, LocalBuffer, Message, messages_of
from tvm_fusion import distributed
from tvm_fusion.distributed.world import job_session
from tvm_fusion.distributed.world.packing import LONG_REGION
from tvm_fusion.distributed.world.parcel import PreparedExchange
from tvm_fusion.errors import DistributedError


def bounds(generator, extent, parts):
    """Begins and ends of uneven parts of an axis; some may be empty."""
    cuts = sorted(generator.integers(0, extent + 1, parts - 1).tolist())
    return list(zip([0, *cuts], [*cuts, extent], strict=True))


def draw(generator, shape, axis, parts, halo):
    """Owned regions, and those needed: an axis is cut, and a halo reaches over the cuts."""
    owned, needed = [], []
    for begin, end in bounds(generator, shape[axis], parts):
        region = [(0, extent) for extent in shape]
        region[axis] = (begin, end)
        owned.append(tuple(region))
        region[axis] = (max(0, begin - halo), min(shape[axis], end + halo))
        needed.append([tuple(region)] if begin < end else [])
    return owned, needed


def window(whole, needed, owned, on_device=False):
    """A rank's window: its own elements and, before an exchange, something else in the halo."""
    region = needed[0] if needed else tuple((begin, begin) for begin, _ in owned)
    array = np.empty([end - begin for begin, end in region], whole.dtype)
    buffer = LocalBuffer(array, tuple(begin for begin, _ in region), on_device)
    fill(buffer, whole, owned)
    return buffer


def fill(buffer, whole, owned):
    buffer.array[...] = np.nan if buffer.array.dtype.kind == "f" else 77
    if buffer.array.size:
        buffer.view(owned)[...] = whole[tuple(slice(*ends) for ends in owned)]


def check_exchanges(world, cases):
    for number, (shape, axis, halo, dtypes) in enumerate(cases):
        generator = np.random.default_rng(number)
        messages, windows, wholes = [], [], []
        for name, dtype in zip("AB", dtypes, strict=False):
            owned, needed = draw(generator, shape, axis, world.size, halo)
            whole = generator.integers(0, 50, shape).astype(dtype)
            messages += messages_of(name, needed, owned)
            windows.append((name, needed[world.rank], owned[world.rank]))
            wholes.append(whole)
        order = sorted(messages, key=lambda m: (m.source, m.dest, m.buffer, m.region))
        exchange = Exchange(number % 7, tuple(order), synchronous=number % 2 == 1)
        for repeat in range(3):
            if repeat < 2:  # the last round uses the same arrays again
                buffers = {
                    # Nothing of those that stand for a device may be packed.
                    name: window(whole, needed, owned, on_device=repeat == 1)
                    for (name, needed, owned), whole in zip(windows, wholes, strict=True)
                }
            for (name, _, owned), whole in zip(windows, wholes, strict=True):
                whole += whole.dtype.type(1)
                fill(buffers[name], whole, owned)
            world.start(exchange, buffers)
            world.finish(exchange)
            for (name, needed, _), whole in zip(windows, wholes, strict=True):
                if needed:
                    expected = whole[tuple(slice(*ends) for ends in needed[0])]
                    np.testing.assert_array_equal(buffers[name].array, expected)


def check_corners(world):
    """A grid of two columns: halos on all sides, with their corners, are of two dimensions."""
    rows, shape = (world.size + 1) // 2, (12, 10)

    def region(rank, halo):
        cut = [(shape[0] * (rank // 2) // rows, shape[0] * (rank // 2 + 1) // rows)]
        cut.append((0, 5) if rank % 2 == 0 else (5, 10))
        if world.size % 2 and rank == world.size - 1:
            cut[1] = (0, 10)
        ends = zip(cut, shape, strict=True)
        return tuple((max(0, b - halo), min(n, e + halo)) for (b, e), n in ends)

    owned = [region(rank, 0) for rank in range(world.size)]
    needed = [[region(rank, 2)] for rank in range(world.size)]
    whole = np.random.default_rng(1).random(shape)
    buffer = window(whole, needed[world.rank], owned[world.rank])
    exchange = Exchange(0, messages_of("A", needed, owned))
    world.start(exchange, {"A": buffer})
    world.finish(exchange)
    expected = whole[tuple(slice(*ends) for ends in needed[world.rank][0])]
    np.testing.assert_array_equal(buffer.array, expected)


def check_long_rows(world):
    """One row from each rank to the next: where it is contiguous on both, MPI sends it in place."""
    for number, columns in enumerate((LONG_REGION, LONG_REGION - 1)):
        messages = tuple(
            Message(rank, rank + 1, "A", ((rank, rank + 1), (0, columns)), columns)
            for rank in range(world.size - 1)
        )
        exchange = Exchange(10 + number, messages)
        first = max(0, world.rank - 1)
        array = np.full((world.rank + 1 - first, columns), 255, np.uint8)
        buffers = {"A": LocalBuffer(array, (first, 0))}
        for turn in range(3):
            array[-1] = world.rank + turn
            world.start(exchange, buffers)
            world.finish(exchange)
            assert (array[:-1] == world.rank - 1 + turn).all()
        [prepared] = world._prepared[exchange.id]
        parcels = [parcel for _, parcel, *_ in (*prepared.incoming, *prepared.outgoing)]
        assert len(parcels) == (world.size > 1) + (0 < world.rank < world.size - 1)
        for parcel in parcels:
            assert parcel.slot is None or columns < LONG_REGION
            assert np.shares_memory(parcel.stage, array) == (parcel.slot is None)


def check_one_message_a_peer(world):
    messages = [Message(0, 1, name, ((row, row + 1),)) for name in "AB" for row in (0, 2, 5)]
    buffers = {name: LocalBuffer(np.arange(6.0) * (world.rank == 0), (0,)) for name in "AB"}
    exchange = Exchange(1, tuple(messages))
    prepared = PreparedExchange(MPI, MPI.COMM_WORLD, exchange, buffers)
    assert len(prepared.requests) == (world.rank < 2)
    prepared.free()
    world.start(exchange, buffers)
    world.finish(exchange)
    if world.rank < 2:
        assert buffers["B"].array[[0, 2, 5]].tolist() == [0, 2, 5]


def check_a_slow_receiver(world):
    """A message is not overwritten by the next one before it is taken."""
    exchange = Exchange(5, (Message(0, 1, "A", ((0, 4),)),))
    buffers = {"A": LocalBuffer(np.zeros(4), (0,))}
    for number in range(1, 6):
        if world.rank == 1:
            time.sleep(0.02)
        buffers["A"].array[...] = number if world.rank == 0 else np.nan
        world.start(exchange, buffers)
        world.finish(exchange)
        assert world.rank > 1 or buffers["A"].array.tolist() == [number] * 4


def check_kept_windows(world):
    """A number with messages of two sizes; one side has a new window, the other its old one."""
    sizes = (100, 200, 100, 200)
    kept = {size: LocalBuffer(np.zeros(size), (0,)) for size in sizes}
    for number, size in enumerate(sizes):
        buffer = kept[size] if world.rank == 0 else LocalBuffer(np.full(size, np.nan), (0,))
        buffer.array[...] = number if world.rank == 0 else np.nan
        exchange = Exchange(6, (Message(0, 1, "A", ((0, size),)),))
        world.start(exchange, {"A": buffer})
        world.finish(exchange)
        assert world.rank > 1 or buffer.array.tolist() == [number] * size


def check_windows_in_turns(world):
    """A program's tensors take up to seven places in turns, which are prepared once."""
    exchange = Exchange(5, (Message(0, 1, "A", ((0, 4),)),))
    windows = [{"A": LocalBuffer(np.full(4, turn), (0,))} for turn in range(7)]
    rounds = []
    for _ in range(3):
        for buffers in windows:
            world.start(exchange, buffers)
            world.finish(exchange)
        rounds.append({id(each) for each in world._prepared[5]})
    assert rounds[0] == rounds[1] == rounds[2]


def check_processors(world, allowed):
    """Ranks have processors of their own, if there are enough."""
    if world.size > len(allowed):
        assert sorted(os.sched_getaffinity(0)) == allowed
        return
    ends = [len(allowed) * rank // world.size for rank in (world.rank, world.rank + 1)]
    assert sorted(os.sched_getaffinity(0)) == allowed[slice(*ends)]


def check_synchronous_transfers_in_any_order(world):
    """A send is complete when its receive has begun: the ends may come in any order."""
    exchanges = [
        Exchange(7 + source, (Message(source, 1 - source, name, ((0, 9),)),), synchronous=True)
        for source, name in enumerate("AB")
    ]
    buffers = {name: LocalBuffer(np.full(9, float(world.rank)), (0,)) for name in "AB"}
    for exchange in exchanges:
        world.start(exchange, buffers)
    for exchange in exchanges if world.rank == 0 else reversed(exchanges):
        world.finish(exchange)
    if world.rank < 2:
        assert [buffers[name].array[0] for name in "AB"] == [0, 1]


def check_a_device_beside(world):
    """One of two peers gets what lies in the memory of a device, the other what does not."""
    messages = (Message(1, 0, "A", ((0, 3),)), Message(1, 2, "B", ((0, 3),)))
    buffers = {name: LocalBuffer(np.full(3, float(world.rank)), (0,), name == "B") for name in "AB"}
    exchange = Exchange(9, messages)
    world.start(exchange, buffers)
    world.finish(exchange)
    if world.rank in (0, 2):
        assert buffers["AB"[world.rank // 2]].array.tolist() == [1] * 3


def check_collectives(world):
    rank, size = world.rank, world.size
    assert world.all_gather(np.array([rank, -rank])).tolist() == [[r, -r] for r in range(size)]
    sent = np.arange(size) + 100 * rank
    assert world.all_to_all(sent).tolist() == [100 * r + rank for r in range(size)]
    told = world.broadcast(np.arange(5) * (rank + 1), root=size - 1)
    assert told.tolist() == [size * n for n in range(5)]
    big = np.array([2**62, -(2**63), rank], "int64")
    with np.errstate(over="ignore"):
        expected = np.array([2**62, -(2**63), 0]) * np.int64(size)
    assert world.all_reduce(big, "sum")[:2].view("int64").tolist() == expected[:2].tolist()
    assert world.all_reduce(np.array([rank - 5], "int8"), "min").tolist() == [-5]
    world.barrier()
    world.agree("the same", "texts")


def check_refusals(world):
    whole = LocalBuffer(np.zeros(4), (0,))
    exchange = Exchange(2, ())
    world.start(exchange, {})
    for call, text in (
        (lambda: world.start(exchange, {}), "exchange 2 is started twice"),
        (lambda: world.finish(Exchange(3, ())), "exchange 3 is finished without a start"),
        (
            lambda: world.start(Exchange(4, (Message(0, 1, "B", ((0, 1),)),)), {"A": whole}),
            "moves buffer 'B' between ranks 0 and 1; expected it among ['A']",
        ),
        (lambda: world.agree(str(world.rank)), "and rank 0 have different programs"),
    ):
        try:
            call()
        except DistributedError as error:
            assert text in str(error), error
        else:
            assert "'B'" in text and world.rank > 1, text
            world.finish(Exchange(4, ()))
    world.finish(exchange)


CASES = [
    ((23, 5), 0, 2, ["float32", "float64"]),
    ((6, 31), 1, 3, ["float32"]),
    ((3, 4, 29), 2, 9, ["int8", "float64"]),
    ((2, 17, 6), 1, 40, ["uint8"]),
    ((40, 4096), 0, 1, ["float32"]),  # rows, from where they lie
    ((3, 40, 4096), 1, 2, ["float32"]),  # long segments: a datatype
    ((2, 3, 40, 2048), 2, 3, ["float32"]),
    ((7, 64, 8), 1, 1, ["float32"]),  # short segments: packed
]

ALLOWED = sorted(os.sched_getaffinity(0))
with distributed.session(timeout=30, bind=False):
    assert sorted(os.sched_getaffinity(0)) == ALLOWED
with (
    mock.patch.object(job_session, "time_limit", return_value=1),  # The limit of a container.
    distributed.session(timeout=30) as world,
):
    assert (world.threads, world.is_crowded) == (1, world.size > 1)
with distributed.session(timeout=30) as world:
    check_processors(world, ALLOWED)
    check_exchanges(world, CASES)
    check_corners(world)
    check_collectives(world)
    if world.size > 1:
        check_one_message_a_peer(world)
        check_long_rows(world)
        check_a_slow_receiver(world)
        check_kept_windows(world)
        check_windows_in_turns(world)
        check_synchronous_transfers_in_any_order(world)
        check_refusals(world)
    if world.size > 2:
        check_a_device_beside(world)
    print("all checked", flush=True)
