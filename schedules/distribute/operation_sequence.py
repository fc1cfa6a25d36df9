# SPDX-License-Identifier: Apache-2.0
"""Operations by which a device computes rows: copies in, kernels and copies out of row chunks.

There are three sequences, each in order: copies in, kernels, copies out. Events tie them, for chunk
``i`` and two slots of memory::

    copies in   in 0   in 1   in 2          in i      after kernel i - 2: it reads the slot
    kernels            k 0    k 1    k 2    kernel i  after in i, and after out i - 2
    copies out                out 0  out 1  out i     after kernel i

So the copies of one chunk run beside the kernel of another, and the memory that the device needs
does not grow with the number of rows. Rows that are computed again and again may stay on the device
instead (``split.py``), and a device that shares the host's memory copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from ..errors import OpError
from .exchange import Region, region_size
from .loop_nest import LoopNest, shape_of
from .partition import balanced
from .regions import regions_computed


@dataclass(frozen=True)
class Chunk:
    """Rows that a device computes at once."""

    rows: Region  # Range of each distributed loop; never empty.
    windows: Mapping[str, Region]
    """Region of each parameter in the device's memory: all that is copied, and one element of
    inputs that are not read, since a kernel takes no empty array."""
    copied: Mapping[str, Region]
    """Regions that are copied: elements of inputs that the rows read, and the rows of the
    outputs."""


@dataclass(frozen=True)
class KeptRows:
    """Copies between two steps of rows that stay on a device."""

    repeat: Mapping[str, str]
    """Inputs, and the outputs that they take in the next step; both have the same window."""
    into: tuple[tuple[str, Region], ...]
    """Parts of inputs that somebody else computes, copied in before each step, or so many steps,
    but the first."""
    out: tuple[tuple[str, Region], ...]
    """Parts of outputs that somebody else reads, copied out after all steps but the last."""
    steps: int = 1  # How many steps follow each other without a copy.

    def bytes(self, itemsizes: Mapping[str, int]) -> tuple[int, int]:
        """Bytes that are copied in and out between two steps."""
        into, out = (
            sum(region_size(region) * itemsizes[name] for name, region in copies)
            for copies in (self.into, self.out)
        )
        return into, out


@dataclass(frozen=True)
class OperationSequence:
    """Chunks of a device's rows, in order."""

    chunks: tuple[Chunk, ...]  # One chunk or more.
    outputs: tuple[str, ...]  # The parameters that are copied out; the others are copied in.
    resident: tuple[str, ...]
    """Inputs that all chunks read, and all the same, such as weights: copied once."""
    slots: int  # Chunks that the device has memory for.
    kept: KeptRows | None = None
    """Copies between steps, if the rows stay on the device; then there is one chunk."""
    in_place: bool = False
    """Whether the device computes in the rank's windows; then there is one chunk, and no copy."""

    def copied_in(self, number: int) -> dict[str, Region]:
        """Regions of inputs that are copied for a chunk; those that stay come with the first."""
        skipped = {*self.outputs, *(self.resident if number else ())}
        copied = {} if self.in_place else self.chunks[number].copied
        return {name: region for name, region in copied.items() if name not in skipped}

    def copied_out(self, number: int) -> dict[str, Region]:
        """Regions of outputs that are copied after a chunk."""
        copied = self.chunks[number].copied
        return {} if self.in_place else {name: copied[name] for name in self.outputs}

    def chunk_bytes(self, number: int, itemsizes: Mapping[str, int]) -> tuple[int, int]:
        """Bytes that are copied in and out for a chunk."""
        copied = self.copied_in(number).items()
        made = self.copied_out(number).items()
        into, out = (
            sum(region_size(region) * itemsizes[name] for name, region in regions)
            for regions in (copied, made)
        )
        return into, out

    def bytes(self, itemsizes: Mapping[str, int]) -> tuple[int, int]:
        """Bytes of all copies in and out; what two chunks read counts twice."""
        found = [self.chunk_bytes(number, itemsizes) for number in range(len(self.chunks))]
        return sum(into for into, _ in found), sum(out for _, out in found)


def operation_sequence(
    nest: LoopNest,
    rows: Region,  # Range of each distributed loop; not empty. The first loop is cut.
    # Number of chunks, which differ by at most one iteration; fewer where there are fewer
    # iterations.
    chunks: int = 1,
    slots: int = 2,  # Chunks that the device has memory for.
) -> OperationSequence:
    """Cut rows of a device into chunks.

    Raises ``OpError`` if there are no rows, no chunk or no slot, or if one output is computed from
    other rows of another one, which then another chunk or the CPU computes, too.
    """
    if chunks < 1 or slots < 1:
        raise OpError(
            f"rows of a device are cut into {chunks} chunks, with memory for {slots}; "
            "expected 1 or more of both"
        )
    if region_size(rows) == 0:
        raise OpError(f"range {rows} of the loops {', '.join(nest.loop_names)} is empty")
    (begin, end), *others = rows
    bounds = balanced(end - begin, min(chunks, end - begin))
    cut = [
        _chunk(nest, ((begin + low, begin + high), *others))
        for low, high in zip(bounds, bounds[1:], strict=False)
    ]
    resident = [
        buffer.name
        for buffer in nest.inputs
        if not any(nest.varying.get(buffer, ((),)))
        and all(buffer.name in chunk.copied for chunk in cut)
    ]
    outputs = tuple(buffer.name for buffer in nest.outputs)
    return OperationSequence(tuple(cut), outputs, tuple(resident), min(slots, len(cut)))


def rows_in_place(
    nest: LoopNest,
    rows: Region,  # Range of each distributed loop; not empty.
    windows: Mapping[str, Region],  # The rank's, of each parameter.
) -> OperationSequence:
    """Rows that a device computes in the host's memory.

    Raises ``OpError`` as of :func:`operation_sequence`.
    """
    sequence = operation_sequence(nest, rows)
    [chunk] = sequence.chunks
    return replace(sequence, chunks=(replace(chunk, windows=windows),), in_place=True)


def sequence_seconds(
    # Seconds of copy in, kernels and copy out of each chunk.
    stages: Sequence[tuple[float, float, float]],
    slots: int,  # Chunks that the device has memory for.
) -> tuple[float, ...]:
    """End of each chunk's copy out, from the begin of the first copy in."""
    kernels: list[float] = []
    ends: list[float] = []
    copied = 0.0
    for number, (into, compute, out) in enumerate(stages):
        last = number - slots
        copied = max(copied, kernels[last] if last >= 0 else 0.0) + into
        before = max(kernels[-1] if kernels else 0.0, ends[last] if last >= 0 else 0.0)
        kernels.append(max(copied, before) + compute)
        ends.append(max(kernels[-1], ends[-1] if ends else 0.0) + out)
    return tuple(ends)


def own_regions(
    nest: LoopNest,
    rows: Region,  # Range of each distributed loop.
) -> dict[tirx.Buffer, Region]:
    """Region of every buffer that rows work on, of the outputs no row more.

    Raises ``OpError`` if one output is computed from other rows of another one.
    """
    wanted = nest.output_regions(rows)
    used = regions_computed(nest, wanted)
    for output, [region] in wanted.items():
        if used.get(output, region) != region:
            raise OpError(
                f"rows {region} of output {output.name!r} need {used[output]}, which other rows of "
                "another output read; beside a device each computes its own rows alone: leave "
                "devices= out"
            )
    return used


def _chunk(nest: LoopNest, rows: Region) -> Chunk:
    used = own_regions(nest, rows)
    windows = {
        buffer.name: used.get(buffer, tuple((0, min(1, n)) for n in shape_of(buffer)))
        for buffer in nest.func.params
    }
    copied = {buffer.name: used[buffer] for buffer in nest.func.params if buffer in used}
    return Chunk(rows, windows, copied)
