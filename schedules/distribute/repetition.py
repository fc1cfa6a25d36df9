# SPDX-License-Identifier: Apache-2.0
"""Functions that are applied again and again to their own output, such as steps of a stencil.

Several steps can share an exchange: it then brings a halo that is as wide as they need together,
and each step but the last computes some of it once more (deep halos, or communication avoiding;
Demmel et al., "Avoiding communication in sparse matrix computations", IPDPS 2008).
"""

from __future__ import annotations

from tvm import tirx

from ..errors import OpError
from .exchange import Region, hull, union
from .loop_nest import LoopNest, shape_of
from .regions import regions_computed, regions_needed


def repeated_input(nest: LoopNest, name: str) -> tirx.Buffer:
    """The input that takes the output in the next step.

    Raises
    ------
    OpError
        If there is none of that name, or if it has another shape or type than the output.
    """
    found = [buffer for buffer in nest.inputs if buffer.name == name]
    if not found:
        names = ", ".join(buffer.name for buffer in nest.inputs)
        raise OpError(f"repeat names {name!r}; the inputs are {names}")
    here, out = found[0], nest.output
    if here.dtype != out.dtype or shape_of(here) != shape_of(out):
        raise OpError(
            f"input {name!r} of shape {shape_of(here)} and type {here.dtype} cannot take the "
            f"output, of shape {shape_of(out)} and type {out.dtype}, in the next step"
        )
    return found[0]


def rows_of_steps(
    nest: LoopNest, buffer: tirx.Buffer, rows: Region, steps: int
) -> tuple[Region, ...]:
    """Ranges of the distributed loops that steps between two exchanges compute, the first first.

    Each computes what the next one reads; the last computes ``rows``.
    """
    found = [rows]
    for _ in range(steps - 1):
        read = regions_computed(nest, nest.output_region(found[0])).get(buffer)
        if read is None:
            found.insert(0, tuple((begin, begin) for begin, _ in rows))
        else:
            found.insert(0, tuple(read[axis] for axis in nest.loops))
    return tuple(found)


def needed_by_steps(
    nest: LoopNest, buffer: tirx.Buffer | None, rows: Region, steps: int
) -> dict[tirx.Buffer, list[Region]]:
    """Elements of each input that steps need from before the first one."""
    wanted = [nest.output_region(rows)]
    found: dict[tirx.Buffer, list[Region]] = {}
    for _ in range(steps):
        step: dict[tirx.Buffer, list[Region]] = {}
        for region in wanted:
            for name, regions in regions_needed(nest, region).items():
                step[name] = union([*step.get(name, []), *regions])
        for name, regions in step.items():
            found[name] = union([*found.get(name, []), *regions])
        if buffer is not None:  # what an earlier step computes need not be there
            found[buffer] = wanted = step.get(buffer, [])
    return found


def windows_of_steps(nest: LoopNest, steps: tuple[Region, ...]) -> dict[tirx.Buffer, Region]:
    """Regions of each buffer that steps work on."""
    found: dict[tirx.Buffer, Region] = {}
    for rows in steps:
        for buffer, region in regions_computed(nest, nest.output_region(rows)).items():
            found[buffer] = hull([region, found[buffer]]) if buffer in found else region
    return found
