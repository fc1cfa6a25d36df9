# SPDX-License-Identifier: Apache-2.0
"""Regions of the buffers that a range of a function's outputs needs.

The blocks are walked backwards: what is needed of a block's output gives the ranges of its
variables, and these the values of the indices at which it reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from tvm import ir, tirx

from ..errors import OpError
from ..tir.block_expressions import Stage
from ..tir.expression_walk import loads
from .exchange import Region, hull, intersection, region_size, union
from .index_values import Domain, index_values, known_conditions, never_holds
from .loop_nest import LoopNest, Read, shape_of


def regions_needed(
    nest: LoopNest, wanted: Mapping[tirx.Buffer, Sequence[Region]]
) -> dict[tirx.Buffer, list[Region]]:
    """The elements of every buffer that regions of outputs need.

    Parameters
    ----------
    nest : LoopNest
        The function.
    wanted : Mapping[tirx.Buffer, Sequence[Region]]
        What is wanted of outputs; :meth:`.LoopNest.output_regions` of a range of loops.

    Returns
    -------
    dict[tirx.Buffer, list[Region]]
        Disjoint regions, in which every element is needed where the indices of a read do not
        depend on each other; no entry where nothing is needed. Of a function that
        :attr:`.LoopNest.may_trap` all that a part reads, see :func:`regions_computed`.

    Raises
    ------
    OpError
        If what a block reads of a buffer cannot be bounded.
    """
    if nest.may_trap:
        return _walk(nest, wanted, lambda stage, regions: [_region(nest, stage.output, regions)])
    return _walk(nest, wanted, lambda stage, regions: regions)


def regions_computed(
    nest: LoopNest, wanted: Mapping[tirx.Buffer, Sequence[Region]]
) -> dict[tirx.Buffer, Region]:
    """The region of every buffer that a part which computes regions of outputs works on.

    As :func:`regions_needed`, but each block computes one region, without gaps, and all of the
    dimensions in which all parts use the same; so its reads can be more than what is needed.
    """
    found = _walk(nest, wanted, lambda stage, regions: [_region(nest, stage.output, regions)])
    return {buffer: _region(nest, buffer, regions) for buffer, regions in found.items()}


def _region(nest: LoopNest, buffer: tirx.Buffer, regions: Sequence[Region]) -> Region:
    """One region that contains all of some, with whole dimensions where parts do not differ."""
    dims = zip(hull(regions), shape_of(buffer), nest.varying[buffer], strict=True)
    return tuple(ends if loops else (0, extent) for ends, extent, loops in dims)


def _walk(
    nest: LoopNest,
    wanted: Mapping[tirx.Buffer, Sequence[Region]],
    computed: Callable[[Stage, list[Region]], list[Region]],
) -> dict[tirx.Buffer, list[Region]]:
    needed: dict[tirx.Buffer, list[Region]] = {}
    for output, regions in wanted.items():
        if filled := [region for region in regions if region_size(region)]:
            needed[output] = filled
    for stage, reads in zip(reversed(nest.stages), reversed(nest.reads), strict=True):
        here = needed.get(stage.output, [])
        if stage.together:
            here = union([one for output in stage.together for one in needed.get(output, [])])
        if not here:  # by no block, or by none in this part
            continue
        needed[stage.output] = computed(stage, here)
        for part in needed[stage.output]:
            domain = domain_of(stage, part)
            for read in reads:
                found = needed.get(read.buffer, [])
                needed[read.buffer] = union([*found, *_boxes(stage, read, domain)])
    return {buffer: regions for buffer, regions in needed.items() if regions}


def domain_of(stage: Stage, part: Sequence[tuple[int | tirx.Expr, int | tirx.Expr]]) -> Domain:
    """Ranges of a block's variables that compute a region of its output; ends are exclusive."""
    domain = {
        axis.var: ir.Range(_like(axis, begin), _like(axis, end))
        for axis, (begin, end) in zip(stage.axes, part, strict=True)
    }
    return domain | {axis.var: axis.dom for axis in stage.reduced}


def _like(axis: tirx.IterVar, value: int | tirx.Expr) -> tirx.Expr:
    return tirx.const(value, str(axis.var.ty.dtype)) if isinstance(value, int) else value


def _boxes(stage: Stage, read: Read, domain: Domain) -> list[Region]:
    """The regions that a load reads, clipped to its buffer."""
    shape = shape_of(read.buffer)
    known = known_conditions(read.conditions, domain)
    if any(never_holds(condition, domain) for condition in known):
        return []
    sets: list[list[tuple[int, int]]] = []
    for index, extent in zip(read.indices, shape, strict=True):
        # A loaded index is in a dimension of which all parts use all.
        found = [(0, extent)] if loads(index) else index_values(index, domain, known)
        if found is None:
            raise OpError(
                f"block {stage.name!r} reads buffer {read.buffer.name!r} at the index {index}, "
                "which cannot be bounded: what a part needs of it is unknown; distribute another "
                "loop"
            )
        sets.append(found)
    whole = tuple((0, extent) for extent in shape)
    return [intersection(tuple(box), whole) for box in itertools.product(*sets)]
