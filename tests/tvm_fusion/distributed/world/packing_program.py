# SPDX-License-Identifier: Apache-2.0
"""Program of every rank in the tests of packing: parcels of all shapes by each route, or, with a
file, the route of one of them."""

from __future__ import annotations

import itertools
import sys

import numpy as np

from schedules.distribute.exchange import Exchange, LocalBuffer, Message
from tvm_fusion import distributed
from tvm_fusion.distributed.world.packing import ROUTES, ParcelShape, always

CASES = [  # shape, axis that is cut, number of arrays
    ((9, 300), 0, 1),  # rows
    ((3, 1 << 14), 0, 1),
    ((3, 1 << 16), 0, 1),
    ((300, 9), 1, 1),  # columns
    ((1000, 40), 1, 1),
    ((20, 9000), 1, 1),
    ((5, 8, 7), 1, 1),  # planes and activations
    ((3, 8, 9000), 1, 1),
    ((2, 6, 8, 16), 2, 1),
    ((40, 6), 1, 3),
    ((6, 3000), 0, 2),
]


def route_of(parcel):
    if parcel.slot is not None:
        return "slot"
    return "packed" if parcel._copies else "in place"


def exchange_of(world, number, case):
    """Each rank sends its block of an axis to the next; every second time half of it."""
    shape, axis, arrays = case
    block = shape[axis] // world.size
    messages = []
    for name in map(str, range(arrays)):
        for rank in range(world.size - 1):
            region = [(0, extent) for extent in shape]
            if number % 2:
                region[0] = (0, max(1, shape[0] // 2))
            region[axis] = (rank * block, (rank + 1) * block)
            messages.append(Message(rank, rank + 1, name, tuple(region)))
    order = sorted(messages, key=lambda m: (m.source, m.dest, m.buffer))
    buffers = {
        name: LocalBuffer(np.zeros(shape, "float32"), (0,) * len(shape))
        for name in {message.buffer for message in order}
    }
    return Exchange(number, tuple(order)), buffers


def check_routes(world):
    numbers = itertools.count()
    for case, route in itertools.product(CASES, ROUTES):
        world.packing = always(route)
        exchange, buffers = exchange_of(world, next(numbers), case)
        whole = np.arange(np.prod(case[0]), dtype="float32").reshape(case[0])
        for turn in range(1, 4):
            for name, buffer in buffers.items():
                buffer.array[...] = whole + 7 * (world.rank + turn) + int(name)
            world.start(exchange, buffers)
            world.finish(exchange)
            for name, buffer in buffers.items():
                expected = whole + 7 * (world.rank + turn) + int(name)
                for message in exchange.received_by(world.rank):
                    if message.buffer == name:
                        ends = tuple(slice(*axis) for axis in message.region)
                        expected[ends] -= 7  # the neighbour's
                np.testing.assert_array_equal(buffer.array, expected)
        [prepared] = world._prepared[exchange.id]
        for parcel in [p for _, p, *_ in (*prepared.incoming, *prepared.outgoing)]:
            is_whole = len(parcel.views) == 1 and parcel.views[0].flags.c_contiguous
            taken = "in place" if route == "packed" and is_whole else route
            assert route_of(parcel) == taken, (case, route, route_of(parcel))
        world.forget(exchange.id)
    print("all checked", flush=True)


def tell_route(world):
    exchange, buffers = exchange_of(world, 0, ((300, 9), 1, 1))
    world.start(exchange, buffers)
    world.finish(exchange)
    [prepared] = world._prepared[0]
    [parcel] = [p for _, p, *_ in (*prepared.incoming, *prepared.outgoing)]
    assert world.packing(ParcelShape(8, 8))[0] == route_of(parcel)
    print(route_of(parcel), flush=True)


with distributed.session(timeout=30, network=sys.argv[1] if sys.argv[1:] else None) as world:
    if sys.argv[1:]:
        tell_route(world)
    else:
        check_routes(world)
