# SPDX-License-Identifier: Apache-2.0
"""Shares of a rank's rows: what its CPU computes, and what each of its devices."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from schedules.distribute.cost import Processor
from schedules.distribute.distribute import Distribution
from schedules.distribute.exchange import Region, region_size
from schedules.distribute.localize import localize, scalar_arguments
from schedules.distribute.operation_sequence import (
    OperationSequence,
    operation_sequence,
    own_regions,
    rows_in_place,
)
from schedules.distribute.split import (
    MeasuredSplit,
    SecondsOfRows,
    check_split,
    choose_chunks,
    cpu_seconds,
    device_seconds,
    kept_rows,
    predicted_seconds,
    split_rows,
)

from ...errors import OpError
from .device import ResolvedDevice
from .device_functions import DeviceFunctions
from .driver import DeviceCall, DeviceCode

RankSplit: TypeAlias = "Literal['auto', 'model'] | Sequence[int] | MeasuredSplit"
"""Rows of the CPU and of each device, or by which figures they are chosen."""
Split: TypeAlias = "RankSplit | Mapping[int, Sequence[int]]"
"""Split of every rank, or of some ranks."""


@dataclass(frozen=True)
class DeviceShare:
    """Rows of a rank that one of its devices computes."""

    device: ResolvedDevice  # The device.
    rows: Region  # Range of each distributed loop.
    sequence: OperationSequence  # The rows in chunks.
    calls: tuple[tuple[DeviceCall, ...], ...]  # The launches of each chunk.
    code: DeviceCode  # Their kernels.
    seconds: float  # Predicted time.

    def identity(self) -> str:
        """Text of what must be the same on all ranks."""
        chunks = [chunk.rows for chunk in self.sequence.chunks]
        where = self.sequence.kept or self.sequence.in_place
        return f"{self.device.name} {self.device.target} {chunks} {where}"


@dataclass(frozen=True)
class Shares:
    """Shares of all ranks."""

    cpu: tuple[Region, ...]  # Rows of each rank's CPU; perhaps none.
    devices: tuple[tuple[DeviceShare, ...], ...]  # Devices that have rows.
    named: tuple[tuple[ResolvedDevice, ...], ...]  # All of its devices.


def plan_shares(
    plan: Distribution,  # Parts of all ranks.
    devices: Sequence[Sequence[ResolvedDevice]],  # Devices of each rank.
    split: Split,  # Split as in :func:`tvm_fusion.distributed.compile`.
    processor: Processor,  # Figures of the CPU.
    # How many steps on the CPU of each rank pass over the memory together.
    together: Sequence[int],
) -> Shares:
    """Split the rows of each rank, and compile what its devices compute.

    The first distributed loop is split: the CPU has its first iterations, then come the devices in
    their order.

    Raises ``OpError`` if a given split does not fit the rows of a rank, or a schedule binds
    nothing.
    """
    cut = [
        _cut(plan, rank, devices[rank], _of_rank(split, rank, plan.ranks), processor, steps)
        for rank, steps in enumerate(together)
    ]
    functions: dict[Hashable, DeviceFunctions] = {}
    planned: list[list[tuple[ResolvedDevice, Region, OperationSequence, list[str]]]] = []
    for rank, (_, *regions) in enumerate(cut):
        planned.append([])
        for device, rows in zip(devices[rank], regions, strict=True):
            if region_size(rows) == 0:
                continue
            ours = functions.setdefault(device.kernels, DeviceFunctions(device))
            others = [other for other in cut[rank] if other is not rows]
            sequence = _sequence(plan, rank, device, rows, others)
            names = [
                ours.add(localize(plan.nest, chunk.rows, chunk.windows))
                for chunk in sequence.chunks
            ]
            planned[-1].append((device, rows, sequence, names))
    code = {key: ours.compile() for key, ours in functions.items()}
    shares = [
        tuple(_share(plan, *one, code[one[0].kernels]) for one in of_rank) for of_rank in planned
    ]
    named = tuple(tuple(of_rank) for of_rank in devices)
    return Shares(tuple(regions[0] for regions in cut), tuple(shares), named)


def _of_rank(split: Split, rank: int, ranks: int) -> RankSplit:
    if isinstance(split, str) and split not in ("auto", "model"):
        raise OpError(
            f"split is {split!r}; expected 'auto', 'model' or rows of the CPU and each device"
        )
    if isinstance(split, Mapping):
        strange = sorted(set(split) - set(range(ranks)))
        if strange:
            raise OpError(f"a split is given for rank {strange[0]}; ranks are 0 to {ranks - 1}")
        return split.get(rank, "auto")
    return split


def _cut(
    plan: Distribution,
    rank: int,
    devices: Sequence[ResolvedDevice],
    split: RankSplit,
    processor: Processor,
    together: int,
) -> list[Region]:
    """Rows of a rank's CPU, then of each of its devices."""
    part = plan.parts[rank]
    (begin, end), *others = part.rows
    if not isinstance(split, str | MeasuredSplit):
        counts = check_split(split, end - begin, ["the CPU", *(device.name for device in devices)])
    elif part.is_empty or not devices:
        counts = (end - begin, *(0 for _ in devices))
    else:
        seconds = _seconds(plan, part.rows, devices, split, processor, together)
        counts = split_rows(end - begin, seconds)
        assert sum(counts) == end - begin, "every row has somebody who computes it"
    parts: list[Region] = []
    for count in counts:
        parts.append(((begin, begin + count), *others))
        begin += count
    if any(counts[1:]) and counts[0]:
        own_regions(plan.nest, parts[0])  # what devices compute the CPU must not write
    return parts


def _seconds(
    plan: Distribution,
    rows: Region,
    devices: Sequence[ResolvedDevice],
    split: Literal["auto", "model"] | MeasuredSplit,
    processor: Processor,
    together: int,
) -> list[SecondsOfRows]:
    """Predicted times of a step of numbers of rows, on the CPU and on each device."""
    if isinstance(split, MeasuredSplit):
        if len(split.devices) != len(devices):
            raise OpError(
                f"{len(split.devices)} devices were measured for the split; expected "
                f"{len(devices)}: {', '.join(device.name for device in devices)}"
            )
        return [split.cpu, *split.devices]
    return [
        cpu_seconds(plan.nest, rows, plan.itemsizes, processor, together),
        *(
            device_seconds(
                plan.nest,
                rows,
                plan.itemsizes,
                device.accelerator,
                1 if device.in_place else device.chunks,
                repeat=None if device.chunks else plan.repeat,
            )
            if device.has_cores
            else lambda count: math.inf if count else 0.0
            for device in devices
        ),
    ]


def _sequence(
    plan: Distribution, rank: int, device: ResolvedDevice, rows: Region, others: Sequence[Region]
) -> OperationSequence:
    if device.in_place and plan.deep == 1:
        return rows_in_place(plan.nest, rows, plan.parts[rank].windows)
    if plan.repeat and device.chunks is None:
        return kept_rows(plan, rank, rows, others)
    chunks = device.chunks or choose_chunks(plan.nest, rows, plan.itemsizes, device.accelerator)
    return operation_sequence(plan.nest, rows, chunks)


def _share(
    plan: Distribution,
    device: ResolvedDevice,
    rows: Region,
    sequence: OperationSequence,
    names: Sequence[str],
    code: DeviceCode,
) -> DeviceShare:
    calls = [
        code.calls(name, scalar_arguments(plan.nest, chunk.rows, chunk.windows))
        for name, chunk in zip(names, sequence.chunks, strict=True)
    ]
    seconds = predicted_seconds(plan.nest, sequence, plan.itemsizes, device.accelerator)
    return DeviceShare(device, rows, sequence, tuple(calls), code, seconds)
