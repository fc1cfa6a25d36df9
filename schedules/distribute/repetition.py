# SPDX-License-Identifier: Apache-2.0
"""Functions that are applied again and again to their own outputs, such as steps of a stencil.

Several steps can share an exchange: it then brings a halo that is as wide as they need together,
and each step but the last computes some of it once more (deep halos, or communication avoiding;
Demmel et al., "Avoiding communication in sparse matrix computations", IPDPS 2008).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import tirx

from ..errors import OpError
from .exchange import Region, hull, union
from .loop_nest import LoopNest, shape_of
from .regions import regions_computed, regions_needed


def repeated_inputs(
    nest: LoopNest, repeat: str | Mapping[str, str] | None
) -> dict[tirx.Buffer, tirx.Buffer]:
    """The inputs that take outputs in the next step, and these outputs.

    Parameters
    ----------
    nest : LoopNest
        The function.
    repeat : str or Mapping[str, str] or None
        Name of the input that takes the only output, or of inputs, each with that of an output.

    Raises
    ------
    OpError
        If there is no such input or output, if one has another shape or type than the other, or if
        an output is taken twice.
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
    found = {}
    for name, taken in pairs.items():
        here = _named(nest.inputs, name, "inputs")
        out = _named(nest.outputs, taken, "outputs")
        if here.dtype != out.dtype or shape_of(here) != shape_of(out):
            raise OpError(
                f"input {name!r} of shape {shape_of(here)} and type {here.dtype} cannot take the "
                f"output, of shape {shape_of(out)} and type {out.dtype}, in the next step"
            )
        found[here] = out
    return found


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
    found = [rows]
    for _ in range(steps - 1):
        computed = regions_computed(nest, nest.output_regions(found[0]))
        read = [
            tuple(computed[buffer][axis] for axis in axes[output])
            for buffer, output in again.items()
            if buffer in computed
        ]
        found.insert(0, hull(read) if read else tuple((begin, begin) for begin, _ in rows))
    return tuple(found)


def needed_by_steps(
    nest: LoopNest, again: Mapping[tirx.Buffer, tirx.Buffer], steps: tuple[Region, ...]
) -> dict[tirx.Buffer, list[Region]]:
    """Elements of each input that steps, each of a range, need from before the first one.

    The last round of a run may begin at any of the steps, so this is what any of them reads.
    """
    wanted = nest.output_regions(steps[-1])
    found: dict[tirx.Buffer, list[Region]] = {}
    for computed in reversed(steps):
        if nest.may_trap:  # in rows, too, that the next step does not read
            wanted = nest.output_regions(computed)
        step = regions_needed(nest, wanted)
        for buffer, regions in step.items():
            found[buffer] = union([*found.get(buffer, []), *regions])
        wanted = {output: step.get(buffer, []) for buffer, output in again.items()}
    return found


def windows_of_steps(nest: LoopNest, steps: tuple[Region, ...]) -> dict[tirx.Buffer, Region]:
    """Regions of each buffer that steps work on."""
    found: dict[tirx.Buffer, Region] = {}
    for rows in steps:
        for buffer, region in regions_computed(nest, nest.output_regions(rows)).items():
            found[buffer] = hull([region, found[buffer]]) if buffer in found else region
    return found
