# SPDX-License-Identifier: Apache-2.0
"""Regions of the buffers that a range of a function's outputs needs.

The blocks are walked backwards: what is needed of a block's output gives the ranges of its
variables, and these the values of the indices at which it reads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tvm import ir, sym, tirx

from schedules.errors import OpError
from schedules.tir.block_expressions import Stage
from schedules.tir.expression_walk import loads, nodes, op_name, variables
from schedules.tir.extents import constant
from schedules.tir.index_math import simplified

from .exchange import Region, hull, intersection, region_size, union
from .loop_nest import LoopNest, Read, operands, shape_of

Domain = Mapping[ir.Var, ir.Range]

_MOST_POINTS = 1 << 24  # Points of an index that is enumerated.


def index_values(
    index: tirx.Expr,  # Integer expression of the domain's variables, without loads.
    domain: Domain,  # Their ranges, with constant ends.
    conditions: Sequence[tirx.Expr],  # Conditions that hold, see :func:`known_conditions`.
) -> list[tuple[int, int]] | None:
    """The values of an index, as intervals with exclusive ends.

    TVM's region analysis tells where they have no gap; else they are listed. Where neither can be
    done, the interval from the least to the greatest is returned.

    They ascend; None if the index cannot be bounded.
    """
    about = [c for c in conditions if variables(c) <= variables(index)]
    predicate = _conjunction(about)
    point = [ir.Range.from_min_extent(index, tirx.const(1, str(index.ty.dtype)))]
    bounds = _ends(sym.estimate_region_strict_bound(point, domain, predicate))
    if bounds is not None:
        return [bounds]
    listed = _enumerate(index, domain, about)
    if listed is not None:
        return listed
    bounds = _ends(sym.estimate_region_upper_bound(point, domain, predicate))
    return None if bounds is None else [bounds]


def known_conditions(conditions: Sequence[tirx.Expr], domain: Domain) -> list[tirx.Expr]:
    """The comparisons of integers of a domain's variables that all have to hold."""
    return [c for c in _conjuncts(conditions) if _is_integer(c, domain)]


def never_holds(condition: tirx.Expr, domain: Domain) -> bool:
    """True if a condition is false over a whole domain."""
    analyzer = sym.Analyzer()
    for var, extent in domain.items():
        analyzer.bind(var, extent)
    return constant(analyzer.simplify(condition)) == 0


def _ends(sets: Sequence[sym.IntSet] | None) -> tuple[int, int] | None:
    """Begin and end of an interval with constant ends."""
    if not sets or not isinstance(sets[0], sym.IntervalSet):
        return None
    low, high = (constant(simplified(e)) for e in (sets[0].min_value, sets[0].max_value))
    return None if low is None or high is None else (low, high + 1)


def _conjuncts(conditions: Sequence[tirx.Expr]) -> list[tirx.Expr]:
    conjuncts: list[tirx.Expr] = []
    for condition in conditions:
        if isinstance(condition, tirx.And) or op_name(condition) == "prim.logical_and":
            conjuncts += _conjuncts(operands(condition))
        elif op_name(condition) == "prim.likely":
            conjuncts += _conjuncts(condition.args)
        else:
            conjuncts.append(condition)
    return conjuncts


_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)


def _is_integer(condition: tirx.Expr, domain: Domain) -> bool:
    """True if a condition compares integers of the block's variables alone."""
    return (
        isinstance(condition, _COMPARISONS)
        and str(condition.a.ty.dtype).startswith("int")
        and not loads(condition)
        and variables(condition) <= set(domain)
        and not any(op_name(node) for node in nodes(condition, ir.Call))
    )


def _conjunction(conditions: Sequence[tirx.Expr]) -> tirx.Expr:
    result = tirx.const(True, "bool")
    for condition in conditions:
        result = tirx.And(result, condition)
    return result


_NUMPY: dict[type, Callable[..., np.ndarray]] = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.LT: np.less,
    tirx.LE: np.less_equal,
    tirx.GT: np.greater,
    tirx.GE: np.greater_equal,
    tirx.EQ: np.equal,
    tirx.NE: np.not_equal,
}


def _enumerate(
    index: tirx.Expr, domain: Domain, conditions: Sequence[tirx.Expr]
) -> list[tuple[int, int]] | None:
    """All values of an index, where they are not too many; None if it has other operators."""
    used = sorted(variables(index), key=lambda var: var.name)
    axes = [points for points in (_points(domain[var]) for var in used) if points is not None]
    counts = [axis.size for axis in axes]
    if len(axes) < len(used) or math.prod(counts) > _MOST_POINTS:
        return None
    grid = dict(zip(used, np.meshgrid(*axes, indexing="ij", sparse=True), strict=True))
    results = [_evaluate(expression, grid) for expression in (index, *conditions)]
    if any(result is None for result in results):
        return None
    values, *checks = (np.broadcast_to(result, counts) for result in results)  # type: ignore[arg-type]
    points = np.unique(values[np.logical_and.reduce([np.ones(counts, bool), *checks])])
    if not points.size:
        return []
    starts = np.flatnonzero(np.diff(points, prepend=points[0] - 2) > 1)
    stops = [*starts[1:], points.size]
    return [(int(points[a]), int(points[b - 1]) + 1) for a, b in zip(starts, stops, strict=True)]


def _points(extent: ir.Range) -> np.ndarray | None:
    low, count = constant(extent.min), constant(extent.extent)
    return None if low is None or count is None else np.arange(low, low + count)


def _evaluate(expression: tirx.Expr, grid: Mapping[ir.Var, np.ndarray]) -> np.ndarray | None:
    """An integer expression for all values of its variables; None if it has other operators."""
    if isinstance(expression, tirx.IntImm):
        return np.array(int(expression), dtype=np.int64)
    if isinstance(expression, ir.Var):
        return grid[expression]
    if isinstance(expression, tirx.Cast) and "int" in str(expression.value.ty.dtype):
        return _evaluate(expression.value, grid)
    function = _NUMPY.get(type(expression))
    if function is None:
        return None
    a, b = _evaluate(expression.a, grid), _evaluate(expression.b, grid)
    return None if a is None or b is None else function(a, b)


def regions_needed(
    nest: LoopNest,
    # Regions of outputs; :meth:`.LoopNest.output_regions` gives those of a range of loops.
    outputs: Mapping[tirx.Buffer, Sequence[Region]],
) -> dict[tirx.Buffer, list[Region]]:
    """The elements of every buffer that regions of outputs need.

    Returns disjoint regions, in which every element is needed where the indices of a read do not
    depend on each other; no entry where nothing is needed. Of a function that
    :attr:`.LoopNest.may_trap` all that a part reads, see :func:`regions_computed`. Raises
    ``OpError`` if what a block reads of a buffer cannot be bounded.
    """
    if nest.may_trap:
        return _walk(nest, outputs, lambda stage, regions: [_region(nest, stage.output, regions)])
    return _walk(nest, outputs, lambda stage, regions: regions)


def regions_computed(
    nest: LoopNest, outputs: Mapping[tirx.Buffer, Sequence[Region]]
) -> dict[tirx.Buffer, Region]:
    """The region of every buffer that a part which computes regions of outputs works on.

    As :func:`regions_needed`, but each block computes one region, without gaps, and all of the
    dimensions in which all parts use the same; so its reads can be more than what is needed.
    """
    found = _walk(nest, outputs, lambda stage, regions: [_region(nest, stage.output, regions)])
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
        if not here:  # No block, or none in this part, stores it.
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
        ranges = [(0, extent)] if loads(index) else index_values(index, domain, known)
        if ranges is None:
            raise OpError(
                f"block {stage.name!r} reads buffer {read.buffer.name!r} at the index {index}, "
                "which cannot be bounded: what a part needs of it is unknown; distribute another "
                "loop"
            )
        sets.append(ranges)
    whole = tuple((0, extent) for extent in shape)
    return [intersection(tuple(box), whole) for box in itertools.product(*sets)]
