# SPDX-License-Identifier: Apache-2.0
"""Rows of a repeated function that stay on a device from one step to the next.

All of them are copied in before the first step, and out after the last. In between only those are
copied that somebody else computes or reads: another rank, the CPU, or another device of the rank.
Where ranks exchange every few steps, so do the CPU and devices of a rank: a device then computes in
each step, by one kernel, all rows of any of them. What it lacks for some is not read by the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..distribute import Distribution, join_windows
from ..exchange import Region, difference, hull, intersection, region_size, union
from .operation_sequence import KeptRows, OperationSequence, operation_sequence, own_regions


def kept_rows(
    plan: Distribution, rank: int, rows: Region, others: Sequence[Region]
) -> OperationSequence:
    """The sequence of rows that stay on a device.

    Parameters
    ----------
    plan : Distribution
        Parts and messages of all ranks, of a function with ``repeat``.
    rank : int
        The rank that has the device.
    rows : Region
        Rows of the device; not empty.
    others : Sequence[Region]
        Rows of the rank's CPU and of its other devices; perhaps empty.

    Raises
    ------
    OpError
        As of :func:`operation_sequence`.
    """
    sequence = operation_sequence(plan.nest, _rows_of_steps(plan, rank, rows), 1)
    [chunk] = sequence.chunks
    mine = {buffer.name: one for buffer, [one] in plan.nest.output_regions(rows).items()}
    chunk = replace(chunk, copied={**chunk.copied, **mine})
    windows = dict(chunk.windows)
    into: list[tuple[str, Region]] = []
    out: list[tuple[str, Region]] = []
    for taker, output in plan.repeat.items():
        made, read = chunk.copied[output], chunk.copied.get(taker)
        both = hull([windows[output], read]) if read else windows[output]
        windows |= {taker: both, output: both}
        if read:
            into += [(taker, region) for region in difference(read, made)]
        wanted = [*_sent(plan, rank, taker), *_reads(plan, rank, taker, others)]
        out += [(output, one) for one in union([intersection(made, one) for one in wanted])]
    join_windows(plan.nest, plan.takers, windows)
    kept = KeptRows(plan.repeat, tuple(into), tuple(out), plan.deep)
    return replace(sequence, chunks=(replace(chunk, windows=windows),), kept=kept)


def halo_bytes(
    sequence: OperationSequence, repeat: Mapping[str, str], itemsizes: Mapping[str, int]
) -> int:
    """Bytes that rows read of the step before and do not compute themselves."""
    [chunk] = sequence.chunks
    return sum(
        region_size(region) * itemsizes[taker]
        for taker, output in repeat.items()
        if taker in chunk.copied
        for region in difference(chunk.copied[taker], chunk.copied[output])
    )


def _sent(plan: Distribution, rank: int, buffer: str) -> list[Region]:
    """Regions of an input that a rank sends before a step."""
    exchanges = [*(transfer.exchange for transfer in plan.before), plan.exchange]
    return [one.region for e in exchanges for one in e.sent_by(rank) if one.buffer == buffer]


def _reads(plan: Distribution, rank: int, buffer: str, others: Sequence[Region]) -> list[Region]:
    """Part of an input that the steps of several ranges of rows read."""
    return [
        region
        for rows in others
        if region_size(rows)
        for read, region in own_regions(plan.nest, _rows_of_steps(plan, rank, rows)).items()
        if read.name == buffer
    ]


def _rows_of_steps(plan: Distribution, rank: int, rows: Region) -> Region:
    """All that is computed between two exchanges, so that the last step has some rows."""
    return hull([computed for computed in plan.steps_of(rank, rows) if region_size(computed)])
