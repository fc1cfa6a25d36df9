# SPDX-License-Identifier: Apache-2.0
"""Regions of the buffers that a range of a function's output needs.

The blocks are walked backwards: what is needed of a block's output gives the ranges of its
variables, and TVM's region analysis what it reads with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tvm import ir, s_tir, sym, tirx

from ..errors import OpError
from ..tir.block_expressions import Stage, read_stages
from ..tir.expression_walk import is_if_then_else, loads, nodes, op_name, variables
from ..tir.index_math import simplified
from ..workload.reduce import constant
from .exchange import Region, hull, intersection, region_size, union

Domain = Mapping[ir.Var, ir.Range]

_MOST_POINTS = 1 << 24  # of an index that is enumerated


@dataclass(frozen=True)
class Read:
    """One load of a block, with the conditions under which it happens.

    Parameters
    ----------
    buffer : tirx.Buffer
        What is read.
    indices : tuple[tirx.Expr, ...]
        The index in each dimension, in terms of the block's variables.
    conditions : tuple[tirx.Expr, ...]
        Conditions that hold where it is evaluated; others may be missing.
    """

    buffer: tirx.Buffer
    indices: tuple[tirx.Expr, ...]
    conditions: tuple[tirx.Expr, ...]


@dataclass(frozen=True)
class LoopNest:
    """A function that computes one output by stages, some of whose loops are distributed.

    Parameters
    ----------
    func : tirx.PrimFunc
        The function, not yet scheduled.
    stages : tuple[Stage, ...]
        Its blocks; a block comes after those that it reads, the last computes the output.
    loops : tuple[int, ...]
        The distributed loops, as axes of the output.
    """

    func: tirx.PrimFunc
    stages: tuple[Stage, ...]
    loops: tuple[int, ...]

    @property
    def output(self) -> tirx.Buffer:
        """The parameter that the function writes."""
        return self.stages[-1].output

    @property
    def inputs(self) -> list[tirx.Buffer]:
        """The other parameters, in order."""
        return [buffer for buffer in self.func.params if not buffer.same_as(self.output)]

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the distributed loops."""
        shape = shape_of(self.output)
        return tuple(shape[axis] for axis in self.loops)

    @property
    def loop_names(self) -> tuple[str, ...]:
        """Names of the distributed loops."""
        return tuple(self.stages[-1].loops[axis] for axis in self.loops)

    @cached_property
    def reads(self) -> tuple[tuple[Read, ...], ...]:
        """The loads of each stage, without those of its own output."""
        return tuple(_reads(stage) for stage in self.stages)

    @cached_property
    def varying(self) -> dict[tirx.Buffer, tuple[frozenset[int], ...]]:
        """The loops, numbered as in ``loops``, that move what is used of a buffer's dimension.

        Given for each dimension; empty where every part uses the same.
        """
        found = {stage.output: [set[int]() for _ in stage.axes] for stage in self.stages}
        for number, axis in enumerate(self.loops):
            found[self.output][axis].add(number)
        for stage, reads in zip(reversed(self.stages), reversed(self.reads), strict=True):
            moved = dict(zip((a.var for a in stage.axes), found[stage.output], strict=True))
            for read in reads:
                dims = found.setdefault(read.buffer, [set() for _ in read.indices])
                for dim, index in zip(dims, read.indices, strict=True):
                    dim.update(*(moved[v] for v in variables(index) if v in moved))
        return {buffer: tuple(map(frozenset, dims)) for buffer, dims in found.items()}

    def output_region(self, rows: Region) -> Region:
        """The output's elements of a range of each distributed loop."""
        region = [(0, extent) for extent in shape_of(self.output)]
        for axis, ends in zip(self.loops, rows, strict=True):
            region[axis] = ends
        return tuple(region)


def shape_of(buffer: tirx.Buffer) -> tuple[int, ...]:
    """The constant extents of a buffer."""
    return tuple(int(extent) for extent in buffer.shape)


def read_loop_nest(
    source: tirx.PrimFunc | s_tir.Schedule, loops: Sequence[str | int | s_tir.schedule.LoopRV]
) -> LoopNest:
    """Read a function that is to be distributed.

    Parameters
    ----------
    source : tirx.PrimFunc or s_tir.Schedule
        The function, or a schedule of which it is the ``main``; loops are whole.
    loops : Sequence[str or int or LoopRV]
        Spatial loops of the block that computes the output: names, axes of the output, or loops of
        the schedule.

    Raises
    ------
    OpError
        If the function has another form, if a loop is none of its output's or a reduction, if an
        extent is symbolic, or if a block reads what it writes, or at an index that is loaded.
    """
    func = source.mod["main"] if isinstance(source, s_tir.Schedule) else source
    stages = read_stages(func)
    if stages is None:
        raise OpError(
            "a function is distributed before its loops are split: each block must compute every "
            "element of one buffer, by one store, in a loop for each of its variables"
        )
    _check_output(func, stages)
    nest = LoopNest(func, tuple(stages), ())
    _check_extents(nest)
    for stage in nest.stages:
        _check_dependence(stage)
    axes = tuple(_axis(source, stages[-1], loop) for loop in loops)
    if len(set(axes)) < len(axes):
        raise OpError(f"loops {list(loops)} name one loop twice")
    nest = LoopNest(func, tuple(stages), axes)
    _check_gathers(nest)
    return nest


def _check_output(func: tirx.PrimFunc, stages: list[Stage]) -> None:
    """Check that the last stage alone computes a parameter."""
    outputs = [s for s in stages if any(s.output.same_as(param) for param in func.params)]
    if len(outputs) != 1 or outputs[0] is not stages[-1]:
        names = ", ".join(stage.output.name for stage in outputs) or "none"
        raise OpError(
            f"the blocks write the parameters {names}; expected one output, of the last block: "
            "distribute a function for each output"
        )


def _check_extents(nest: LoopNest) -> None:
    buffers = [stage.output for stage in nest.stages] + nest.inputs
    for buffer in buffers:
        if any(constant(extent) is None for extent in buffer.shape):
            raise OpError(
                f"buffer {buffer.name!r} has the symbolic shape {list(buffer.shape)}; "
                "bind its extents before the function is distributed"
            )
    names = [buffer.name for buffer in nest.func.params]
    if len(set(names)) < len(names):
        raise OpError(f"parameters {names} have one name twice; name each buffer")


def _check_dependence(stage: Stage) -> None:
    """Refuse blocks that read what they write, other than the sum of a reduction."""
    for load in loads(stage.value):
        if not load.source.same_as(stage.output):
            continue
        pairs = zip(load.indices, stage.axes, strict=True)
        if stage.init is None or any(not _is_axis(index, axis) for index, axis in pairs):
            raise OpError(
                f"block {stage.name!r} reads {stage.output.name!r}, which it writes: an iteration "
                "depends on another one, so that its loops cannot be distributed"
            )


def _is_axis(index: tirx.Expr, axis: tirx.IterVar) -> bool:
    return axis.var.same_as(index) or (constant(axis.dom.extent) == 1 and constant(index) == 0)


def _check_gathers(nest: LoopNest) -> None:
    """Refuse a loaded index in a dimension of which parts use different elements."""
    for stage, reads in zip(nest.stages, nest.reads, strict=True):
        for read in reads:
            dims = zip(read.indices, nest.varying[read.buffer], strict=True)
            for index, loops in dims:
                if loops and loads(index):
                    raise OpError(
                        f"block {stage.name!r} reads buffer {read.buffer.name!r} at the index "
                        f"{index}, which is loaded from memory: what a part needs of it cannot be "
                        "known before it runs; distribute a loop that the index does not depend on"
                    )


def _axis(
    source: tirx.PrimFunc | s_tir.Schedule, stage: Stage, loop: str | int | s_tir.schedule.LoopRV
) -> int:
    """The axis of the output that a loop counts."""
    spatial = stage.loops[: len(stage.axes)]
    if isinstance(loop, int):
        if not 0 <= loop < len(spatial):
            raise OpError(f"loop {loop} is no axis of {stage.output.name!r}; it has {len(spatial)}")
        return loop
    name = loop if isinstance(loop, str) else str(source.get(loop).loop_var.name)
    if name in stage.loops[len(stage.axes) :]:
        raise OpError(
            f"loop {name!r} of block {stage.name!r} is a reduction; parts of it would have to be "
            f"combined over ranks: distribute one of {', '.join(filter(None, spatial))}"
        )
    if name not in spatial:
        raise OpError(
            f"block {stage.name!r}, which computes the output, has no loop {name!r}; "
            f"it has {', '.join(filter(None, spatial))}"
        )
    return spatial.index(name)


def _reads(stage: Stage) -> tuple[Read, ...]:
    found: list[Read] = []
    for expression in (stage.value, stage.init):
        if expression is not None:
            _collect(expression, (), found)
    return tuple(read for read in found if not read.buffer.same_as(stage.output))


def _collect(
    expression: tirx.Expr, conditions: tuple[tirx.Expr, ...], found: list[Read]
) -> None:
    """Add the loads of an expression; those of a branch have its condition."""
    if is_if_then_else(expression):
        condition, first, second = expression.args
        _collect(condition, conditions, found)
        _collect(first, (*conditions, condition), found)
        _collect(second, (*conditions, simplified(tirx.Not(condition))), found)
        return
    if isinstance(expression, ir.TensorLoad):
        found.append(Read(expression.source, tuple(expression.indices), conditions))
    for child in _children(expression):
        _collect(child, conditions, found)


def _children(expression: tirx.Expr) -> list[tirx.Expr]:
    if isinstance(expression, ir.TensorLoad):
        return list(expression.indices)
    if isinstance(expression, ir.Call):
        return [arg for arg in expression.args if isinstance(arg, ir.Expr)]
    fields = ("a", "b", "value", "condition", "true_value", "false_value", "body")
    children = [getattr(expression, name, None) for name in fields]
    return [child for child in children if isinstance(child, ir.Expr)]


def regions_needed(nest: LoopNest, region: Region) -> dict[tirx.Buffer, list[Region]]:
    """The elements of every buffer that a region of the output needs.

    Parameters
    ----------
    nest : LoopNest
        The function.
    region : Region
        What is wanted of its output.

    Returns
    -------
    dict[tirx.Buffer, list[Region]]
        Disjoint regions, in which every element is needed where the indices of a read do not
        depend on each other; no entry where nothing is needed.

    Raises
    ------
    OpError
        If what a block reads of a buffer cannot be bounded.
    """
    return _walk(nest, region, lambda stage, regions: regions)


def regions_computed(nest: LoopNest, region: Region) -> dict[tirx.Buffer, Region]:
    """The region of every buffer that a part which computes a region of the output works on.

    As :func:`regions_needed`, but each block computes one region, without gaps, and all of the
    dimensions in which all parts use the same; so its reads can be more than what is needed.
    """
    found = _walk(nest, region, lambda stage, regions: [_region(nest, stage.output, regions)])
    return {buffer: _region(nest, buffer, regions) for buffer, regions in found.items()}


def _region(nest: LoopNest, buffer: tirx.Buffer, regions: Sequence[Region]) -> Region:
    """One region that contains all of some, with whole dimensions where parts do not differ."""
    dims = zip(hull(regions), shape_of(buffer), nest.varying[buffer], strict=True)
    return tuple(ends if loops else (0, extent) for ends, extent, loops in dims)


def _walk(
    nest: LoopNest, region: Region, computed: Callable[[Stage, list[Region]], list[Region]]
) -> dict[tirx.Buffer, list[Region]]:
    needed: dict[tirx.Buffer, list[Region]] = {}
    if region_size(region):
        needed[nest.output] = [region]
    for stage, reads in zip(reversed(nest.stages), reversed(nest.reads), strict=True):
        if stage.output not in needed:
            continue
        needed[stage.output] = computed(stage, needed[stage.output])
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
    known = [c for c in _conjuncts(read.conditions) if _is_integer(c, domain)]
    if any(_never(condition, domain) for condition in known):
        return []
    sets = [
        _values(stage, read, index, extent, domain, known)
        for index, extent in zip(read.indices, shape, strict=True)
    ]
    whole = tuple((0, extent) for extent in shape)
    return [intersection(tuple(box), whole) for box in itertools.product(*sets)]


def _values(
    stage: Stage,
    read: Read,
    index: tirx.Expr,
    extent: int,
    domain: Domain,
    conditions: list[tirx.Expr],
) -> list[tuple[int, int]]:
    """The values of an index, as intervals."""
    if loads(index):
        return [(0, extent)]  # of a dimension that no part moves, see _check_gathers
    used = variables(index)
    about = [c for c in conditions if variables(c) <= used]
    predicate = _all(about)
    point = [ir.Range.from_min_extent(index, tirx.const(1, str(index.ty.dtype)))]
    exact = sym.estimate_region_strict_bound(point, domain, predicate)
    found = _ends(exact)
    if found is not None:
        return [found]
    listed = _enumerate(index, domain, about)
    if listed is not None:
        return listed
    found = _ends(sym.estimate_region_upper_bound(point, domain, predicate))
    if found is None:
        raise OpError(
            f"block {stage.name!r} reads buffer {read.buffer.name!r} at the index {index}, which "
            "cannot be bounded: what a part needs of it is unknown; distribute another loop"
        )
    return [found]


def _ends(sets: Sequence[sym.IntSet] | None) -> tuple[int, int] | None:
    """Begin and end of an interval with constant ends."""
    if not sets or not isinstance(sets[0], sym.IntervalSet):
        return None
    low, high = (constant(simplified(e)) for e in (sets[0].min_value, sets[0].max_value))
    return None if low is None or high is None else (low, high + 1)


def _conjuncts(conditions: Sequence[tirx.Expr]) -> list[tirx.Expr]:
    found: list[tirx.Expr] = []
    for condition in conditions:
        if isinstance(condition, tirx.And) or op_name(condition) == "prim.logical_and":
            found += _conjuncts(_children(condition))
        elif op_name(condition) == "prim.likely":
            found += _conjuncts(condition.args)
        else:
            found.append(condition)
    return found


_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)


def _is_integer(condition: tirx.Expr, domain: Domain) -> bool:
    """Whether a condition compares integers of the block's variables alone."""
    return (
        isinstance(condition, _COMPARISONS)
        and str(condition.a.ty.dtype).startswith("int")
        and not loads(condition)
        and variables(condition) <= set(domain)
        and not any(op_name(node) for node in nodes(condition, ir.Call))
    )


def _never(condition: tirx.Expr, domain: Domain) -> bool:
    analyzer = sym.Analyzer()
    for var, extent in domain.items():
        analyzer.bind(var, extent)
    return constant(analyzer.simplify(condition)) == 0


def _all(conditions: Sequence[tirx.Expr]) -> tirx.Expr:
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
    ends = [(constant(domain[v].min), constant(domain[v].extent)) for v in used]
    if any(low is None or extent is None for low, extent in ends):
        return None
    if np.prod([extent for _, extent in ends], dtype=float) > _MOST_POINTS:
        return None
    axes = [np.arange(low, low + extent) for low, extent in ends]
    grid = dict(zip(used, np.meshgrid(*axes, indexing="ij", sparse=True), strict=True))
    values = _evaluate(index, grid)
    checks = [_evaluate(condition, grid) for condition in conditions]
    if values is None or any(check is None for check in checks):
        return None
    values = np.broadcast_to(values, tuple(extent for _, extent in ends))
    for check in checks:
        values = np.where(check, values, np.iinfo(np.int64).min)
    points = np.unique(values)
    points = points[points > np.iinfo(np.int64).min]
    if not points.size:
        return []
    starts = np.flatnonzero(np.diff(points, prepend=points[0] - 2) > 1)
    stops = [*starts[1:], points.size]
    return [(int(points[a]), int(points[b - 1]) + 1) for a, b in zip(starts, stops, strict=True)]


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
