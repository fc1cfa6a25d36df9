# SPDX-License-Identifier: Apache-2.0
"""Parts of the inputs that ranks own.

The first dimension of an input that a distributed loop moves is cut where two neighbours read the
same: in the middle. So a stencil's input is cut like its output, and neighbours send each other the
same number of rows.

Functions may be applied again and again to their own outputs, such as steps of a stencil. Several
steps can share an exchange: it then brings a halo that is as wide as they need together, and each
step but the last computes some of it once more (deep halos, or communication avoiding; Demmel et
al., "Avoiding communication in sparse matrix computations", IPDPS 2008).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tvm import tirx

from ..errors import OpError
from .exchange import Region, hull, union
from .loop_nest import LoopNest, shape_of
from .partition import Partition, bounds_of, integers
from .regions import regions_computed, regions_needed

Cuts: TypeAlias = dict[int, tuple[int, tuple[tuple[int, int], ...]]]
"""Dimension of an input that a loop moves, and the dimension's parts, by loop."""


class Owners:
    """The parts of the inputs that ranks own."""

    def __init__(
        self, nest: LoopNest, partition: Partition, bounds: dict[str, Sequence[int]]
    ) -> None:
        self.nest = nest
        self.partition = partition
        self.cuts: dict[str, Cuts] = {}
        unknown = set(bounds) - {buffer.name for buffer in nest.inputs}
        if unknown:
            names = ", ".join(buffer.name for buffer in nest.inputs)
            raise OpError(f"owners are given of {sorted(unknown)[0]!r}; the inputs are {names}")
        for buffer in nest.inputs:
            self.cuts[buffer.name] = self._cuts(buffer, bounds.get(buffer.name))

    def of_rank(self, rank: int) -> dict[str, Region]:
        """Regions of each input that a rank owns."""
        place = self.partition.place(rank)
        regions: dict[str, Region] = {}
        for buffer in self.nest.inputs:
            region = [(0, extent) for extent in shape_of(buffer)]
            for number, (dim, ends) in self.cuts[buffer.name].items():
                region[dim] = ends[place[number]]
            regions[buffer.name] = tuple(region)
        return regions

    def _cuts(self, buffer: tirx.Buffer, bounds: Sequence[int] | None) -> Cuts:
        """Dimension and parts of an input by the loop that moves the dimension."""
        moved = self.nest.varying.get(buffer, ())
        cuts: Cuts = {}
        taken: set[int] = set()
        for number in range(len(self.nest.extents)):
            free = [d for d, loops in enumerate(moved) if number in loops and d not in taken]
            if free:
                taken.add(free[0])
                extent = shape_of(buffer)[free[0]]
                cuts[number] = (free[0], self._parts(buffer, number, free[0], extent, bounds))
        if bounds is not None and not cuts:
            raise OpError(
                f"owners are given of {buffer.name!r}, of which every part reads all: it is not cut"
            )
        return cuts

    def _parts(
        self,
        buffer: tirx.Buffer,
        number: int,
        dim: int,
        extent: int,
        given: Sequence[int] | None,
    ) -> tuple[tuple[int, int], ...]:
        """Parts of a dimension, cut in the middle of what both neighbours read."""
        bounds = self.partition.bounds[number]
        if given is not None:
            return self._parts_of_sizes(buffer, number, dim, extent, given)
        pairs = zip(bounds, bounds[1:], strict=False)
        reads = [self._read(buffer, number, dim, ends) for ends in pairs]
        filled = sorted((ends, k) for k, ends in enumerate(reads) if ends is not None)
        cuts = [0]
        for (before, _), (after, _) in zip(filled, filled[1:], strict=False):
            middle = (before[1] + after[0] + 1) // 2
            cuts.append(min(max(middle, cuts[-1]), extent))
        order = [k for _, k in filled]
        parts = dict(zip(order, zip(cuts, [*cuts[1:], extent], strict=True), strict=False))
        empty = 0
        found = []
        for k in range(len(reads)):
            found.append(parts.get(k, (empty, empty)))
            empty = found[-1][1]
        return tuple(found)

    def _parts_of_sizes(
        self, buffer: tirx.Buffer, number: int, dim: int, extent: int, sizes: Sequence[int]
    ) -> tuple[tuple[int, int], ...]:
        sizes = integers(sizes, f"owners of {buffer.name!r}")
        parts = self.partition.grid[number]
        if len(self.nest.extents) > 1 or len(sizes) != parts:
            raise OpError(
                f"owners of {buffer.name!r} are given as {list(sizes)}; "
                f"expected a size for each of the {parts} parts of one distributed loop"
            )
        if sum(sizes) > extent:
            raise OpError(
                f"owners of {buffer.name!r} are given as {list(sizes)}, which sum up to "
                f"{sum(sizes)}; its dimension {dim} has {extent}"
            )
        bounds = bounds_of(sum(sizes), sizes, f"dimension {dim} of {buffer.name!r}")
        return tuple(zip(bounds, bounds[1:], strict=False))

    def _read(
        self, buffer: tirx.Buffer, number: int, dim: int, ends: tuple[int, int]
    ) -> tuple[int, int] | None:
        """Range that a part of a loop reads of a dimension, whatever the other loops."""
        rows = [(0, extent) for extent in self.nest.extents]
        rows[number] = ends
        needed = regions_needed(self.nest, self.nest.output_regions(tuple(rows)))
        regions = needed.get(buffer)
        return hull(regions)[dim] if regions else None


def repeated_inputs(
    nest: LoopNest,
    # Name of the input that takes the only output, or of inputs, each with that of an output.
    repeat: str | Mapping[str, str] | None,
) -> dict[tirx.Buffer, tirx.Buffer]:
    """The inputs that take outputs in the next step, and these outputs.

    Raises ``OpError`` if there is no such input or output, if one has another shape or type than
    the other, or if an output is taken twice.
    """
    if isinstance(repeat, str) and len(nest.outputs) > 1:
        names = ", ".join(buffer.name for buffer in nest.outputs)
        raise OpError(
            f"repeat names {repeat!r}, and the function has the outputs {names}; say which of them "
            f"it takes in the next step: repeat={{{repeat!r}: {nest.outputs[0].name!r}}}"
        )
    if not isinstance(repeat, str | Mapping | None):
        raise OpError(f"repeat is {repeat!r}; expected an input, or inputs and their outputs")
    pairs = {repeat: nest.outputs[0].name} if isinstance(repeat, str) else dict(repeat or {})
    if len(set(pairs.values())) < len(pairs):
        raise OpError(f"repeat is {pairs}: two inputs cannot take one output")
    repeated = {}
    for name, taken in pairs.items():
        here = _named(nest.inputs, name, "inputs")
        out = _named(nest.outputs, taken, "outputs")
        if here.dtype != out.dtype or shape_of(here) != shape_of(out):
            raise OpError(
                f"input {name!r} of shape {shape_of(here)} and type {here.dtype} cannot take the "
                f"output, of shape {shape_of(out)} and type {out.dtype}, in the next step"
            )
        repeated[here] = out
    return repeated


def _named(buffers: Sequence[tirx.Buffer], name: str, what: str) -> tirx.Buffer:
    for buffer in buffers:
        if buffer.name == name:
            return buffer
    names = ", ".join(buffer.name for buffer in buffers)
    raise OpError(f"repeat names {name!r}; the {what} are {names}")


def rows_of_steps(
    nest: LoopNest, again: Mapping[tirx.Buffer, tirx.Buffer], rows: Region, steps: int
) -> tuple[Region, ...]:
    """Ranges of the distributed loops that steps between two exchanges compute, the first first.

    Each computes what the next one reads; the last computes ``rows``.
    """
    axes = dict(zip(nest.outputs, nest.loops, strict=True))
    ranges = [rows]
    for _ in range(steps - 1):
        computed = regions_computed(nest, nest.output_regions(ranges[0]))
        read = [
            tuple(computed[buffer][axis] for axis in axes[output])
            for buffer, output in again.items()
            if buffer in computed
        ]
        ranges.insert(0, hull(read) if read else tuple((begin, begin) for begin, _ in rows))
    return tuple(ranges)


def needed_by_steps(
    nest: LoopNest, again: Mapping[tirx.Buffer, tirx.Buffer], steps: tuple[Region, ...]
) -> dict[tirx.Buffer, list[Region]]:
    """Elements of each input that steps, each of a range, need from before the first one.

    The last round of a run may begin at any of the steps, so this is what any of them reads.
    """
    outputs = nest.output_regions(steps[-1])
    needed: dict[tirx.Buffer, list[Region]] = {}
    for computed in reversed(steps):
        if nest.may_trap:  # Rows that the next step does not read may trap, too.
            outputs = nest.output_regions(computed)
        step = regions_needed(nest, outputs)
        for buffer, regions in step.items():
            needed[buffer] = union([*needed.get(buffer, []), *regions])
        outputs = {output: step.get(buffer, []) for buffer, output in again.items()}
    return needed


def windows_of_steps(nest: LoopNest, steps: tuple[Region, ...]) -> dict[tirx.Buffer, Region]:
    """Regions of each buffer that steps work on."""
    found: dict[tirx.Buffer, Region] = {}
    for rows in steps:
        for buffer, region in regions_computed(nest, nest.output_regions(rows)).items():
            found[buffer] = hull([region, found[buffer]]) if buffer in found else region
    return found
