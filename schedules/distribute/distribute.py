# SPDX-License-Identifier: Apache-2.0
"""Distribution of the loops of a function over ranks.

Owner computes: each rank computes its part of the output. Of an input it owns the part that lies
at its output, and receives from other ranks what else it reads (its halo). A dimension of an input
that no distributed loop moves is not cut: every rank holds all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import tvm_ffi
from tvm import s_tir, tirx

from ..errors import OpError
from .exchange import Exchange, Message, Region, difference, hull, messages_of, region_size
from .loop_nest import LoopNest, read_loop_nest, shape_of
from .ownership import Owners
from .partition import Partition, balanced, bounds_of, grids
from .regions import regions_needed
from .repetition import needed_by_steps, repeated_input, rows_of_steps, windows_of_steps
from .transfer import Transfer, check_waits, deliver


@dataclass(frozen=True)
class Part:
    """Part of a program that one rank computes and holds.

    Parameters
    ----------
    rank : int
        The rank.
    rows : Region
        Iterations of each distributed loop; a loop without any means that it computes nothing.
    owned : Mapping[str, Region]
        For each parameter what the rank is given (inputs) or computes (the output).
    windows : Mapping[str, Region]
        For each parameter what the rank has memory for: what it owns and what it reads.
    steps : tuple[Region, ...]
        Iterations of each step between two exchanges; those of the last are ``rows``.
    """

    rank: int
    rows: Region
    owned: Mapping[str, Region]
    windows: Mapping[str, Region]
    steps: tuple[Region, ...]

    @property
    def is_empty(self) -> bool:
        """True if the rank computes nothing."""
        return region_size(self.rows) == 0


@dataclass(frozen=True)
class Distribution:
    """A function whose loops are distributed.

    Parameters
    ----------
    nest : LoopNest
        The function.
    partition : Partition
        The parts of its loops.
    parts : tuple[Part, ...]
        One for each rank.
    transfers : tuple[Transfer, ...]
        Transfers that were asked for; they come before the inferred exchange, in this order.
    exchange : Exchange
        The inferred exchange: everything else that a rank reads and does not own.
    repeat : str | None
        The input that takes the output in the next step.
    """

    nest: LoopNest
    partition: Partition
    parts: tuple[Part, ...]
    transfers: tuple[Transfer, ...]
    exchange: Exchange
    repeat: str | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.parts)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges in order."""
        return (*(transfer.exchange for transfer in self.transfers), self.exchange)

    @cached_property
    def itemsizes(self) -> dict[str, int]:
        """Bytes of an element of each parameter."""
        return {
            buffer.name: (tvm_ffi.dtype(str(buffer.dtype)).bits + 7) // 8
            for buffer in self.nest.func.params
        }

    @property
    def bytes(self) -> int:
        """Bytes that all ranks together send."""
        return sum(exchange.bytes(self.itemsizes) for exchange in self.exchanges)

    def interior(self, rank: int) -> Region:
        """The largest range of a rank's loops, found axis by axis, that reads only what it owns.

        Empty where there is none, or where the rank is to receive nothing.
        """
        part = self.parts[rank]
        if part.is_empty or not any(e.of_rank(rank).received_by(rank) for e in self.exchanges):
            return tuple((begin, begin) for begin, _ in part.rows)
        rows = list(part.rows)
        for axis in range(len(rows)):
            rows[axis] = self._shrunk(part, rows, axis)
        return tuple(rows) if self._is_local(part, tuple(rows)) else ((0, 0),) * len(rows)

    def _shrunk(self, part: Part, rows: Sequence[tuple[int, int]], axis: int) -> tuple[int, int]:
        """A loop's range without the iterations at either end that read a halo of this axis."""
        begin, end = rows[axis]

        def is_local(one: int) -> bool:
            middle = [((b + e) // 2, (b + e) // 2 + 1) for b, e in rows]
            middle[axis] = (one, one + 1)
            return self._is_local(part, tuple(middle))

        while begin < end and not is_local(begin):
            begin += 1
        while begin < end and not is_local(end - 1):
            end -= 1
        return begin, end

    def _is_local(self, part: Part, rows: Region) -> bool:
        """True if a range reads only what the rank owns."""
        needed = regions_needed(self.nest, self.nest.output_region(rows))
        return not any(
            difference(region, part.owned[buffer.name])
            for buffer in self.nest.inputs
            for region in needed.get(buffer, [])
        )


def distribute(
    source: tirx.PrimFunc | s_tir.Schedule,
    loop: str | int | s_tir.schedule.LoopRV | Sequence[str | int | s_tir.schedule.LoopRV],
    ranks: int | None = None,
    *,
    sizes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    grid: Sequence[int] | None = None,
    owned: Mapping[str, Sequence[int]] | None = None,
    transfers: Sequence[Transfer] = (),
    repeat: str | None = None,
    exchange_every: int = 1,
) -> Distribution:
    """Distribute one spatial loop, or a grid of several, over ranks.

    Parameters
    ----------
    source : tirx.PrimFunc or s_tir.Schedule
        The function, or a schedule of which it is the ``main``, before its loops are split.
    loop : str, int, LoopRV, or a sequence of them
        Loops of the block that computes the output: names, axes of the output, loops of the
        schedule.
    ranks : int, optional
        Number of ranks; parts differ by at most one iteration. Not needed with ``sizes``.
    sizes : Sequence[int], optional
        Iterations of each part; for several loops a sequence of them for each.
    grid : Sequence[int], optional
        Ranks along each of several loops; by default the grid that sends the fewest bytes.
    owned : Mapping[str, Sequence[int]], optional
        Of some inputs, how many indices of its distributed dimension each part owns; by default
        those around what it reads. For one loop only.
    transfers : Sequence[Transfer]
        Explicit transfers (:func:`send_recv`), before the inferred exchange.
    repeat : str, optional
        The input that takes the output in the next step; both have the same shape and type, and
        ranks own the same of both. The output then has the window of this input.
    exchange_every : int
        Steps between two exchanges, which bring halos for all of them; 1 without ``repeat``.

    Returns
    -------
    Distribution
        Parts and messages of all ranks.

    Raises
    ------
    OpError
        If loops, sizes, grid or transfers do not fit the function, or if what a part reads cannot
        be bounded or is owned by no rank.
    """
    loops = [loop] if isinstance(loop, str | int | s_tir.schedule.LoopRV) else list(loop)
    nest = read_loop_nest(source, loops)
    if not loops:
        raise OpError("no loop to distribute is named")
    if exchange_every < 1 or (exchange_every > 1 and repeat is None):
        raise OpError(
            f"exchange_every is {exchange_every}; expected 1, or more for a function with repeat="
        )
    choices = _Choices(owned or {}, transfers, repeat, exchange_every)
    if sizes is not None:
        return _plan(nest, _given(nest, sizes, ranks), choices)
    if ranks is None:
        raise OpError("neither the number of ranks nor the sizes of parts are given")
    if grid is None:
        candidates = grids(max(ranks, 1), len(loops))
    else:
        candidates = [tuple(grid)]
        _check_grid(candidates[0], ranks, loops)
    plans = (_plan(nest, Partition(_bounds(nest, parts, ranks)), choices) for parts in candidates)
    return min(plans, key=lambda plan: (plan.bytes, len(plan.exchange.messages)))


def _bounds(nest: LoopNest, grid: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    if ranks < 1:
        grid = (ranks,)
    return tuple(balanced(extent, n) for extent, n in zip(nest.extents, grid, strict=False))


def _check_grid(grid: Sequence[int], ranks: int, loops: Sequence[object]) -> None:
    count = 1
    for parts in grid:
        count *= parts
    if len(grid) != len(loops) or count != ranks or min(grid) < 1:
        raise OpError(
            f"grid {list(grid)} does not spread {len(loops)} loops over {ranks} ranks; expected "
            f"{len(loops)} positive numbers whose product is {ranks}"
        )


def _given(
    nest: LoopNest, sizes: Sequence[int] | Sequence[Sequence[int]], ranks: int | None
) -> Partition:
    """The partition of given sizes."""
    lists: list[Sequence[int]] = [
        list(one) if isinstance(one, Sequence) else [one] for one in sizes
    ]
    if all(isinstance(one, int) for one in sizes):
        lists = [[size for one in lists for size in one]]
    if len(lists) != len(nest.loops):
        raise OpError(f"sizes are given for {len(lists)} loops; expected {len(nest.loops)}")
    parts = zip(nest.loop_names, nest.extents, lists, strict=True)
    partition = Partition(
        tuple(bounds_of(extent, one, f"loop {name!r}") for name, extent, one in parts)
    )
    if ranks not in (None, partition.ranks):
        raise OpError(f"sizes are given for {partition.ranks} ranks; expected {ranks}")
    return partition


@dataclass(frozen=True)
class _Choices:
    """Options of a user beside the parts."""

    owned: Mapping[str, Sequence[int]]
    transfers: Sequence[Transfer]
    repeat: str | None
    steps: int


def _plan(nest: LoopNest, partition: Partition, choices: _Choices) -> Distribution:
    """Who owns what, who needs what, and the messages that follow."""
    again = None if choices.repeat is None else repeated_input(nest, choices.repeat)
    owners = Owners(nest, partition, dict(choices.owned))
    regions = [owners.of_rank(rank) for rank in range(partition.ranks)]
    if choices.repeat is not None and choices.repeat not in choices.owned:
        for rank, mine in enumerate(regions):  # what it computes for the next step
            mine[choices.repeat] = nest.output_region(partition.rows(rank))
    shapes = {buffer.name: shape_of(buffer) for buffer in nest.inputs}
    delivery = deliver(choices.transfers, shapes, regions)
    parts: list[Part] = []
    read: list[dict[str, list[Region]]] = []
    for rank in range(partition.ranks):
        rows = partition.rows(rank)
        exact = needed_by_steps(nest, again, rows, choices.steps)
        read.append({buffer.name: exact.get(buffer, []) for buffer in nest.inputs})
        steps = (rows,) if again is None else rows_of_steps(nest, again, rows, choices.steps)
        mine = regions[rank] | {nest.output.name: nest.output_region(rows)}
        used = windows_of_steps(nest, steps)
        windows = {}
        for buffer in nest.func.params:
            held = [mine[buffer.name], *delivery.received(rank, buffer.name)]
            held += [used[buffer]] if buffer in used else []
            windows[buffer.name] = _window(held, shape_of(buffer))
        if again is not None:
            _check_owners(nest, rank, mine, again.name)
            both = hull([windows[again.name], windows[nest.output.name]])
            windows |= {again.name: both, nest.output.name: both}
        parts.append(Part(rank, rows, mine, windows, steps))
    check_waits(delivery, read)
    messages: list[Message] = []
    for name in shapes:
        lacking = [
            _without(regions[name], delivery.received(rank, name))
            for rank, regions in enumerate(read)
        ]
        messages += messages_of(name, lacking, [part.owned[name] for part in parts])
    messages.sort(key=lambda m: (m.source, m.dest, m.buffer, m.region))
    exchange = Exchange(len(choices.transfers), tuple(messages))
    return Distribution(nest, partition, tuple(parts), delivery.transfers, exchange, choices.repeat)


def _check_owners(nest: LoopNest, rank: int, owned: Mapping[str, Region], repeat: str) -> None:
    """Refuse a rank that does not own of an input what it computes for the next step."""
    mine, made = owned[repeat], owned[nest.output.name]
    if mine != made and (region_size(mine) or region_size(made)):
        raise OpError(
            f"rank {rank} owns {mine} of {repeat!r} and computes {made} of the output, which "
            "cannot be the same in the next step; leave out owned="
        )


def _without(regions: Sequence[Region], others: Sequence[Region]) -> list[Region]:
    """Difference of two sets of disjoint regions."""
    rest = list(regions)
    for other in others:
        rest = [part for piece in rest for part in difference(piece, other)]
    return rest


def _window(held: Sequence[Region], shape: tuple[int, ...]) -> Region:
    """Memory for some regions; never empty, since a kernel takes no empty array."""
    filled = [region for region in held if region_size(region)]
    if filled:
        return hull(filled)
    return tuple((0, min(1, extent)) for extent in shape)
