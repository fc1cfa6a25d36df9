# SPDX-License-Identifier: Apache-2.0
"""Distribution of the loops of a function over ranks.

Owner computes: each rank computes its part of the output. Of an input it owns the part that lies
at its output, and receives from other ranks what else it reads (its halo). A dimension of an input
that no distributed loop moves is not cut: every rank holds all of it.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import tvm_ffi
from tvm import s_tir, tirx

from ..errors import OpError
from .exchange import (
    Exchange,
    Gather,
    Message,
    Region,
    difference,
    hull,
    messages_of,
    region_size,
    segment_size,
)
from .loop_nest import LoopNest, read_loop_nest, shape_of
from .ownership import Owners, needed_by_steps, repeated_inputs, rows_of_steps, windows_of_steps
from .partial_reduction import PartialReduction, partial_reduction
from .partition import Partition, even, grid_of, grids, is_count, sized
from .regions import regions_needed
from .transfer import Transfer, check_waits, deliver

_PROBES = 16  # iterations among which one is looked for that reads no halo


@dataclass(frozen=True)
class Part:
    """Part of a program that one rank computes and holds."""

    rank: int  # The rank.
    rows: Region
    """Iterations of each distributed loop; a loop without any means that it computes nothing."""
    owned: Mapping[str, Region]
    """Region of each parameter that the rank is given (inputs) or computes (outputs)."""
    windows: Mapping[str, Region]
    """Region of each parameter in the rank's memory: what it owns and what it reads."""
    steps: tuple[Region, ...]
    """Iterations of each step between two exchanges; those of the last are ``rows``."""

    @property
    def is_empty(self) -> bool:
        """True if the rank computes nothing."""
        return region_size(self.rows) == 0


@dataclass(frozen=True)
class Distribution:
    """A function whose loops are distributed."""

    nest: LoopNest  # The function.
    partition: Partition  # The parts of its loops.
    parts: tuple[Part, ...]  # One for each rank.
    transfers: tuple[Transfer, ...]
    """Transfers that were asked for, in order: those of inputs come before the inferred exchange,
    those of outputs at the end of a run."""
    exchange: Exchange  # The inferred exchange: everything else that a rank reads and does not own.
    repeat: Mapping[str, str]  # Inputs, and the outputs that they take in the next step.
    reduction: PartialReduction | None = None
    """The reduction of which each rank computes a part, if the distributed loop is one."""

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
        exchanged = sum(exchange.bytes(self.itemsizes) for exchange in self.exchanges)
        return exchanged + sum(gather.bytes for gather in self.gathers)

    @cached_property
    def gathers(self) -> tuple[Gather, ...]:
        """Those of the parts of a reduction, one of each output, at the end of a run."""
        if self.reduction is None:
            return ()
        sizes = {out.name: math.prod(shape_of(out)[1:]) for out in self.nest.outputs}
        return tuple(
            Gather(name, self.ranks, elements, self.itemsizes[name])
            for name, elements in sizes.items()
        )

    @cached_property
    def before(self) -> tuple[Transfer, ...]:
        """The transfers of inputs, before the inferred exchange."""
        names = {buffer.name for buffer in self.nest.inputs}
        return tuple(t for t in self.transfers if t.buffer in names)

    @cached_property
    def after(self) -> tuple[Transfer, ...]:
        """The transfers of outputs, at the end of a run."""
        return tuple(t for t in self.transfers if t not in self.before)

    def nest_of(self, rank: int) -> LoopNest:
        """The function of which a rank computes its part: that of all, but of a reduction."""
        if self.reduction is None:
            return self.nest
        return self._nests[self.reduction.extent(rank)]

    @cached_property
    def _nests(self) -> dict[int, LoopNest]:
        """The functions of parts of a reduction, by their extents."""
        exact = self.reduction.exact if self.reduction else {}
        return {extent: read_loop_nest(func, [0]) for extent, func in exact.items()}

    @property
    def deep(self) -> int:
        """Number of steps between two exchanges."""
        return len(self.parts[0].steps)

    def steps_of(self, rank: int, rows: Region) -> tuple[Region, ...]:
        """Rows of each step between two exchanges; the last one has some."""
        if rows == self.parts[rank].rows:
            return self.parts[rank].steps
        return rows_of_steps(self.nest, self.takers, rows, self.deep)

    @cached_property
    def takers(self) -> dict[tirx.Buffer, tirx.Buffer]:
        """The inputs and outputs that ``repeat`` names."""
        return repeated_inputs(self.nest, self.repeat)

    def interior(self, rank: int) -> Region:
        """The largest range of a rank's loops, found axis by axis, that reads only what it owns.

        Of the first step after an exchange. Empty where there is none, or where the rank is to
        receive nothing.
        """
        return self._interiors[rank]

    @cached_property
    def _interiors(self) -> list[Region]:
        return [self._interior(part) for part in self.parts]

    def _interior(self, part: Part) -> Region:
        awaited = (*(transfer.exchange for transfer in self.before), self.exchange)
        if part.is_empty or not any(exchange.received_by(part.rank) for exchange in awaited):
            return tuple((begin, begin) for begin, _ in part.rows)
        rows = list(part.steps[0])
        if not region_size(part.steps[0]):
            return part.steps[0]
        for axis in range(len(rows)):
            rows[axis] = self._shrunk(part, rows, axis)
        return tuple(rows) if self._is_local(part, tuple(rows)) else ((0, 0),) * len(rows)

    def _shrunk(self, part: Part, rows: Sequence[tuple[int, int]], axis: int) -> tuple[int, int]:
        """A loop's range without the iterations at either end that read a halo of this axis.

        What is left is taken to have no gaps, as with affine indices.
        """
        begin, end = rows[axis]

        @functools.cache
        def is_local(index: int) -> bool:
            middle = [((b + e) // 2, (b + e) // 2 + 1) for b, e in rows]
            middle[axis] = (index, index + 1)
            return self._is_local(part, tuple(middle))

        tried = sorted({begin, *range(begin, end, -((begin - end) // _PROBES)), end - 1})
        local = [index for index in tried if is_local(index)]
        if not local:
            return begin, begin
        first = bisect.bisect_left(range(begin, local[0]), True, key=is_local) + begin
        last = bisect.bisect_left(
            range(local[-1] + 1, end), True, key=lambda index: not is_local(index)
        )
        return first, last + local[-1] + 1

    def _is_local(self, part: Part, rows: Region) -> bool:
        """True if a range reads only what the rank owns."""
        needed = regions_needed(self.nest, self.nest.output_regions(rows))
        return not any(
            difference(region, part.owned[buffer.name])
            for buffer in self.nest.inputs
            for region in needed.get(buffer, [])
        )


def distribute(
    # The function, or a schedule of which it is the ``main``, before its loops are split.
    source: tirx.PrimFunc | s_tir.Schedule,
    # Loops of the block that computes the output: names, axes of the output, loops of the schedule.
    # If there are several outputs, each has such loops, with the same extents. One that is a
    # reduction is distributed alone (:mod:`.partial_reduction`): the outputs of the function then
    # have the parts of the ranks along an axis before the others.
    loop: str | int | s_tir.schedule.LoopRV | Sequence[str | int | s_tir.schedule.LoopRV],
    # Number of ranks; parts differ by at most one iteration. Not needed with ``sizes``.
    ranks: int | None = None,
    *,
    # Iterations of each part; for several loops a sequence of them for each.
    sizes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    # Ranks along each of several loops; by default the grid that sends the fewest bytes.
    grid: Sequence[int] | None = None,
    # How many indices of the distributed dimension of some inputs each part owns; by default those
    # around what it reads. For one loop only.
    owned: Mapping[str, Sequence[int]] | None = None,
    # Explicit transfers (:func:`send_recv`): of inputs, before the inferred exchange, which does
    # not repeat them; of outputs, at the end of a run.
    transfers: Sequence[Transfer] = (),
    # Whether what transfers do not bring is exchanged, too; else it is an error.
    infer: bool = True,
    # The input that takes the output in the next step, or several with an output each; both have
    # the same shape and type, and ranks own the same of both. An output then has the window of its
    # input.
    repeat: str | Mapping[str, str] | None = None,
    # Steps between two exchanges, which bring halos for all of them; 1 without ``repeat``.
    exchange_every: int = 1,
) -> Distribution:
    """Distribute one spatial loop, or a grid of several, over ranks.

    Returns parts and messages of all ranks. Raises ``OpError`` if loops, sizes, grid or transfers
    do not fit the function, or if what a part reads cannot be bounded, is owned by no rank, or
    without ``infer`` is brought by no transfer.
    """
    loops = list(loop) if isinstance(loop, Sequence) and not isinstance(loop, str) else [loop]
    if not loops:
        raise OpError("no loop to distribute is named")
    if ranks is not None and not is_count(ranks):
        raise OpError(f"ranks is {ranks!r}; expected a positive integer")
    if not is_count(exchange_every) or (exchange_every > 1 and not repeat):
        raise OpError(
            f"exchange_every is {exchange_every!r}; expected 1, or more for a function with repeat="
        )
    reduction = partial_reduction(source, loops[0], ranks, sizes) if len(loops) == 1 else None
    if reduction is not None:
        if grid is not None or repeat is not None:
            raise OpError(
                f"the loop {loops[0]!r} is a reduction, which is distributed alone, and whose "
                "whole result all ranks get, so that no input takes it in the next step; leave out "
                "grid= and repeat=, and write it into the input before the next call"
            )
        source, loops = reduction.func, [0]
        ranks = None if ranks is None and sizes is None else len(reduction.bounds) - 1
        sizes = None
    if not isinstance(owned, Mapping | None):
        raise OpError(f"owned is {owned!r}; expected sizes by inputs: {{'image': [302, 0]}}")
    nest = read_loop_nest(source, loops)
    choices = _Choices(owned or {}, transfers, infer, repeat, exchange_every)
    if sizes is not None:
        if grid is not None:
            raise OpError("a grid is given, and sizes, which are one already; leave either out")
        return _plan(nest, sized(nest.extents, nest.loop_names, sizes, ranks), choices)
    if ranks is None:
        raise OpError("neither the number of ranks nor the sizes of parts are given")
    candidates = grids(ranks, len(loops)) if grid is None else [grid_of(grid, ranks, len(loops))]
    plans = (_plan(nest, even(nest.extents, parts), choices) for parts in candidates)
    best = min(plans, key=lambda plan: (plan.bytes, len(plan.exchange.messages)))
    return replace(best, reduction=reduction)


@dataclass(frozen=True)
class _Choices:
    """Options of a user beside the parts."""

    owned: Mapping[str, Sequence[int]]
    transfers: Sequence[Transfer]
    infer: bool
    repeat: str | Mapping[str, str] | None
    steps: int


def _plan(nest: LoopNest, partition: Partition, choices: _Choices) -> Distribution:
    """Who owns what, who needs what, and the messages that follow."""
    again = repeated_inputs(nest, choices.repeat)
    owners = Owners(nest, partition, dict(choices.owned))
    regions = [owners.of_rank(rank) for rank in range(partition.ranks)]
    for rank, mine in enumerate(regions):
        made = {buffer: one for buffer, [one] in nest.output_regions(partition.rows(rank)).items()}
        for taker, output in again.items():
            if taker.name not in choices.owned:
                mine[taker.name] = made[output]
        mine |= {buffer.name: region for buffer, region in made.items()}
    shapes = {buffer.name: shape_of(buffer) for buffer in nest.func.params}
    delivery = deliver(choices.transfers, shapes, regions)
    parts: list[Part] = []
    read: list[dict[str, list[Region]]] = []
    for rank in range(partition.ranks):
        rows = partition.rows(rank)
        steps = rows_of_steps(nest, again, rows, choices.steps)
        exact = needed_by_steps(nest, again, steps)
        read.append({buffer.name: exact.get(buffer, []) for buffer in nest.inputs})
        mine = regions[rank]
        used = windows_of_steps(nest, steps)
        windows = {}
        for buffer in nest.func.params:
            held = [mine[buffer.name], *delivery.received(rank, buffer.name)]
            held += [used[buffer]] if buffer in used else []
            windows[buffer.name] = _window(held, shape_of(buffer))
        for taker, output in again.items():
            _check_owners(rank, mine, taker.name, output.name)
            both = hull([windows[taker.name], windows[output.name]])
            windows |= {taker.name: both, output.name: both}
        join_windows(nest, again, windows)
        parts.append(Part(rank, rows, mine, windows, steps))
    inputs = {buffer.name for buffer in nest.inputs}
    blocks = [
        (stage.name, {read.buffer.name for read in reads} & inputs)
        for stage, reads in zip(nest.stages, nest.reads, strict=True)
    ]
    check_waits(delivery, read, blocks)
    if choices.steps > 1 and any(transfer.before for transfer in delivery.transfers):
        raise OpError(
            f"exchange_every is {choices.steps}, and a transfer has before=; expected 1, or none"
        )
    messages: list[Message] = []
    for name in (buffer.name for buffer in nest.inputs):
        lacking = [
            _without(regions[name], delivery.received(rank, name))
            for rank, regions in enumerate(read)
        ]
        messages += messages_of(name, lacking, [part.owned[name] for part in parts])
    if messages and not choices.infer:
        first = messages[0]
        raise OpError(
            f"rank {first.dest} reads region {first.region} of buffer {first.buffer!r}, which it "
            f"does not own and no transfer brings; send it from rank {first.source}, or let it be "
            "inferred"
        )
    messages.sort(key=lambda m: (m.source, m.dest, m.buffer, m.region))
    marked = tuple(replace(m, segment=_segment(m, parts)) for m in messages)
    exchange = Exchange(len(choices.transfers), marked)
    repeat = {taker.name: output.name for taker, output in again.items()}
    return Distribution(nest, partition, tuple(parts), delivery.transfers, exchange, repeat)


def join_windows(
    nest: LoopNest, again: Mapping[tirx.Buffer, tirx.Buffer], windows: dict[str, Region]
) -> None:
    """Give the outputs that one block computes, and inputs that take them, the same windows."""
    for stage in nest.stages:
        made = [output.name for output in stage.together if output.name in windows]
        takers = [taker.name for taker, output in again.items() if output.name in made]
        if made:
            joint = hull([windows[name] for name in made])
            windows |= dict.fromkeys((*made, *takers), joint)


def _segment(message: Message, parts: Sequence[Part]) -> int:
    """Elements of the contiguous pieces of a message, on that of its ranks where they are less."""
    return min(
        segment_size(message.region, parts[rank].windows[message.buffer])
        for rank in (message.source, message.dest)
    )


def _check_owners(rank: int, owned: Mapping[str, Region], repeat: str, output: str) -> None:
    """Refuse a rank that does not own of an input what it computes for the next step."""
    mine, made = owned[repeat], owned[output]
    if mine != made and (region_size(mine) or region_size(made)):
        raise OpError(
            f"rank {rank} owns {mine} of {repeat!r} and computes {made} of {output!r}, which "
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
