# SPDX-License-Identifier: Apache-2.0
"""Description of a distributed program as text: what each rank computes, receives and sends."""

from __future__ import annotations

from collections.abc import Sequence

from schedules.distribute.cost import Network, Processor, combining, overlap_gain_of, work_of
from schedules.distribute.distribute import Distribution
from schedules.distribute.exchange import Message, Region, region_size
from schedules.distribute.time_skewing import seconds_of_steps

from .accelerator.shares import DeviceShare, Shares
from .local_program import KernelPiece


def describe(
    plan: Distribution,
    pieces: Sequence[Sequence[KernelPiece]],
    network: Network,
    processor: Processor,
    overlap: str,
    shares: Shares,
) -> str:
    """Return a table with a line for each rank, for each of its devices, and for each message.

    Bytes, messages and times of a reduction are those of the gather of its parts, too.
    Times are predicted from the figures of ``network``, ``processor`` and the devices; the column
    ``overlap`` tells whether the interior is computed while messages travel, and the time that this
    saves (or costs), ``-`` where a rank has no interior of its own.
    """
    loops = ", ".join(plan.nest.loop_names)
    grid = " x ".join(map(str, plan.partition.grid))
    messages = sum(len(exchange.messages) for exchange in plan.exchanges)
    messages += sum(gather.messages for gather in plan.gathers)
    what = f"{plan.reduction.operator} of loop" if plan.reduction else "loops"
    lines = [
        f"{what} {loops} over {grid} ranks; {plan.bytes} bytes in {messages} messages; "
        f"overlap: {overlap}",
        *_gathered(plan),
        f"{'rank':>4}  {'iterations':<18}{'sends':>12}{'receives':>12}"
        f"{'compute':>11}{'exchange':>11}{'overlap':>15}  kernels",
    ]
    for part in plan.parts:
        lines.append(_line(plan, part.rank, pieces[part.rank], network, processor))
        lines += [_device(plan, share) for share in shares.devices[part.rank]]
        for exchange in plan.exchanges:
            lines += [
                f"      from {message.source}: {message.buffer}[{_text(message.region)}], "
                f"{_bytes(plan, [message])} bytes"
                for message in exchange.received_by(part.rank)
            ]
    return "\n".join(lines)


def kernel_seconds(
    plan: Distribution, rank: int, pieces: Sequence[KernelPiece], processor: Processor
) -> float:
    """Predicted time of a rank's kernel calls, of the steps between two exchanges."""
    if any(piece.steps > 1 for piece in pieces):
        return seconds_of_steps(plan, rank, pieces[0].rows, processor, is_skewed=True)
    nest = plan.nest_of(rank)
    return sum(processor.seconds(work_of(nest, one.rows, plan.itemsizes)) for one in pieces)


def _gathered(plan: Distribution) -> list[str]:
    """Describe the gathering of a reduction's parts."""
    return [
        f"each rank sends its part of {gather.buffer}, {gather.part_bytes} bytes, to each other "
        f"and combines all; counted are {gather.messages} messages, of which MPI may join some"
        for gather in plan.gathers
        if gather.messages
    ]


def _line(
    plan: Distribution,
    rank: int,
    pieces: Sequence[KernelPiece],
    network: Network,
    processor: Processor,
) -> str:
    part = plan.parts[rank]
    sent = [m for exchange in plan.exchanges for m in exchange.sent_by(rank)]
    received = [m for exchange in plan.exchanges for m in exchange.received_by(rank)]
    compute = kernel_seconds(plan, rank, pieces, processor)
    exchange = sum(network.seconds(e, rank, plan.itemsizes) for e in plan.exchanges)
    gathered = sum(gather.bytes_each for gather in plan.gathers)
    compute += sum(processor.seconds(combining(gather)) for gather in plan.gathers)
    exchange += sum(map(network.gather_seconds, plan.gathers))
    kernels = ", ".join(
        f"{piece.kernel}[{_text(piece.rows)}]"
        + (" meanwhile" if piece.is_interior else "")
        + (f" of {piece.steps} steps" if piece.steps > 1 else "")
        for piece in pieces
    )
    gain = overlap_gain_of(plan, rank, network, processor)
    chosen = "yes" if any(piece.is_interior for piece in pieces) else "no"
    gained = "-" if gain is None else f"{chosen}, {_time(gain, '+')}"
    region = part.rows
    if plan.reduction is not None:
        begin, end = plan.reduction.bounds[rank : rank + 2]
        region = ((begin, end),)
    rows = _text(region) if region_size(region) else "none"
    return (
        f"{rank:>4}  {rows:<18}"
        f"{_bytes(plan, sent) + gathered:>12}{_bytes(plan, received) + gathered:>12}"
        f"{_time(compute):>11}{_time(exchange):>11}{gained:>15}  {kernels}"
    )


def _device(plan: Distribution, share: DeviceShare) -> str:
    into, out = share.sequence.bytes(plan.itemsizes)
    name, rows, seconds = share.device.name, _text(share.rows), _time(share.seconds)
    kept = share.sequence.kept
    if kept is not None:
        each_in, each_out = kept.bytes(plan.itemsizes)
        often = "between steps" if kept.steps == 1 else f"every {kept.steps} steps"
        return (
            f"      {name} meanwhile: {rows}, which stay there; {into} bytes in first, {out} out "
            f"last, {each_in} in and {each_out} out {often}; {seconds} a step"
        )
    if share.sequence.in_place:
        return f"      {name} meanwhile: {rows} in the memory of the host, {seconds}"
    count = len(share.sequence.chunks)
    return (
        f"      {name} meanwhile: {rows} in {count} chunk{'s' if count > 1 else ''}, "
        f"{into} bytes in, {out} out, {seconds}"
    )


def _bytes(plan: Distribution, messages: Sequence[Message]) -> int:
    return sum(message.size * plan.itemsizes[message.buffer] for message in messages)


def _text(region: Region) -> str:
    return ", ".join(f"{begin}:{end}" for begin, end in region)


def _time(seconds: float, sign: str = "") -> str:
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:{sign}.1f} us"
    return f"{seconds * 1e3:{sign}.2f} ms"
