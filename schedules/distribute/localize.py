# SPDX-License-Identifier: Apache-2.0
"""One function for all parts of a loop that have the same extents.

The function of a part counts its rows from 0, and computes each block only as far as the part needs
it. Where the part begins is known at run time::

    for i, j in T.grid(256, 1022):            # the whole function: T.grid(1022, 1022)
        with T.sblock("C"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi + (lo_i - first_C_0), vj] = A[vi + (lo_i - first_A_0), vj] + ...

``lo_i`` is the part's first iteration of the loop ``i``, ``first_A_0`` the row of the whole buffer
``A`` that is row 0 of the window handed in. Conditions, such as those of padding, see rows of the
whole buffer. So one kernel serves the interior, the borders, and every rank with such a part.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from schedules.tir.float_bits import nan_by_bits

from ..errors import OpError
from ..tir.block_expressions import Stage
from ..tir.expression_walk import substitute
from ..tir.index_math import as_type, simplified
from .exchange import Region, intersection, region_size
from .loop_nest import LoopNest, Read, read_loop_nest, shape_of
from .regions import Domain, domain_of, regions_computed

_INT32_END = 1 << 31


@dataclass(frozen=True)
class LocalShape:
    """All that the function of a part depends on; equal for parts that share it."""

    stages: tuple[tuple[tuple[int, int], ...] | None, ...]
    """Axes of the output of each stage: their extent, and by how much they begin above the least
    index that the readers' indices give (more than 0 at a border, where it is clipped). None for a
    stage that the part does not need."""
    windows: tuple[tuple[int, ...], ...]  # Shape of the window of each parameter.


@dataclass(frozen=True)
class LocalFunction:
    """Function of a part."""

    shape: LocalShape  # What it depends on.
    func: tirx.PrimFunc
    """Takes the windows in the order of the whole function's parameters, then the scalars; not yet
    scheduled."""


def localize(
    nest: LoopNest,  # The whole function.
    rows: Region,  # Begin and end of each distributed loop; not empty.
    # What is at hand of each parameter; contains all that the range needs.
    windows: Mapping[str, Region],
) -> LocalFunction:
    """Make the function that computes a range of the distributed loops.

    Raises ``OpError`` if the range is empty, or if a window lacks what the range needs.
    """
    if region_size(rows) == 0:
        raise OpError(f"range {rows} of the loops {', '.join(nest.loop_names)} is empty")
    los = _scalars_of_loops(nest)
    bases, shape = _bases(nest, rows, windows, los)
    firsts = {
        buffer: tuple(
            tirx.Var(f"first_{buffer.name}_{dim}", _dtype(nest)) if loops else None
            for dim, loops in enumerate(nest.varying.get(buffer, ()))
        )
        for buffer in nest.func.params
    }
    leaders = {
        output: next((each for each in stage.together if each in firsts), output)
        for stage in nest.stages
        for output in stage.together
    }
    frame = _Frame(los, bases, firsts, leaders)
    return LocalFunction(shape, _write(nest.func.params, nest.stages, shape, frame))


def whole_function(
    # Its parameters, of constant extents; other buffers are allocated.
    params: Sequence[tirx.Buffer],
    stages: Sequence[Stage],
) -> tirx.PrimFunc:
    """Write the function of some stages; a stage comes after those that it reads."""
    extents = tuple(tuple((extent, 0) for extent in shape_of(stage.output)) for stage in stages)
    bases = {stage.output: tuple(_zeros(stage.output)) for stage in stages}
    shape = LocalShape(extents, tuple(map(shape_of, params)))
    return _write(params, stages, shape, _Frame((), bases, {}, {}))


def scalar_arguments(
    nest: LoopNest, rows: Region, windows: Mapping[str, Region]
) -> tuple[int, ...]:
    """Values of the scalars that a local function takes after its windows."""
    firsts = [
        windows[buffer.name][dim][0]
        for buffer in nest.func.params
        for dim, loops in enumerate(nest.varying.get(buffer, ()))
        if loops
    ]
    return (*(begin for begin, _ in rows), *firsts)


@dataclass(frozen=True)
class _Frame:
    """Scalars of a local function, and where each of its intermediate buffers begins.

    What one block computes lies alike, as its leader: of several stores TVM wants equal indices.
    """

    los: tuple[tirx.Var, ...]
    bases: Mapping[tirx.Buffer, tuple[tirx.Expr, ...]]
    firsts: Mapping[tirx.Buffer, tuple[tirx.Var | None, ...]]
    leaders: Mapping[tirx.Buffer, tirx.Buffer]

    @property
    def scalars(self) -> list[tirx.Var]:
        """All scalars in the order of :func:`scalar_arguments`."""
        return [*self.los, *(v for firsts in self.firsts.values() for v in firsts if v is not None)]


def _dtype(nest: LoopNest) -> str:
    """Type of the scalars: that of the output's variables."""
    dtype = str(nest.stages[-1].axes[0].var.ty.dtype)
    for buffer in (*nest.func.params, *(stage.output for stage in nest.stages)):
        if dtype == "int32" and region_size(tuple((0, e) for e in shape_of(buffer))) >= _INT32_END:
            raise OpError(
                f"buffer {buffer.name!r} has 2**31 elements or more, and its function counts in "
                "int32; give the extents as int64"
            )
    return dtype


def _scalars_of_loops(nest: LoopNest) -> tuple[tirx.Var, ...]:
    return tuple(tirx.Var(f"lo_{name}", _dtype(nest)) for name in nest.loop_names)


def _bases(
    nest: LoopNest, rows: Region, windows: Mapping[str, Region], los: Sequence[tirx.Var]
) -> tuple[dict[tirx.Buffer, tuple[tirx.Expr, ...]], LocalShape]:
    """First index of what is computed of each stage, in terms of the scalars, and the shape."""
    computed = regions_computed(nest, nest.output_regions(rows))
    _check_windows(nest, computed, windows)
    at_rows = {lo: tirx.const(b, str(lo.ty.dtype)) for lo, (b, _) in zip(los, rows, strict=True)}
    least = {output: _zeros(output) for output in nest.outputs}
    for output, axes in zip(nest.outputs, nest.loops, strict=True):
        for axis, lo in zip(axes, los, strict=True):
            least[output][axis] = lo
    bases: dict[tirx.Buffer, tuple[tirx.Expr, ...]] = {}
    shapes: list[tuple[tuple[int, int], ...] | None] = []
    for stage, reads in zip(reversed(nest.stages), reversed(nest.reads), strict=True):
        part = computed.get(stage.output)
        if part is None:
            bases[stage.output] = tuple(_zeros(stage.output))
            shapes.append(None)
            continue
        least[stage.output] = _least_of(least, stage)
        starts = [int(simplified(substitute(e, at_rows))) for e in least[stage.output]]
        clips = [begin - start for (begin, _), start in zip(part, starts, strict=True)]
        extents = [end - begin for begin, end in part]
        shapes.append(tuple(zip(extents, clips, strict=True)))
        pairs = zip(least[stage.output], clips, strict=True)
        base = [simplified(first + clip) if clip else first for first, clip in pairs]
        bases[stage.output] = tuple(base)
        ends = [(b, simplified(b + extent)) for b, extent in zip(base, extents, strict=True)]
        domain = domain_of(stage, ends)
        for read in reads:
            if any(read.buffer.same_as(other.output) for other in nest.stages):
                _lower(nest, least, read, domain)
    extents_of = {b.name: tuple(e - s for s, e in windows[b.name]) for b in nest.func.params}
    return bases, LocalShape(tuple(reversed(shapes)), tuple(extents_of.values()))


def _least_of(least: Mapping[tirx.Buffer, Sequence[tirx.Expr]], stage: Stage) -> list[tirx.Expr]:
    """Least indices at which what a block computes is read: of several buffers the same."""
    known = [least[output] for output in stage.outputs if output in least]
    if len(known) == 1:
        return list(known[0])
    return [simplified(functools.reduce(tirx.min, firsts)) for firsts in zip(*known, strict=True)]


def _lower(
    nest: LoopNest, least: dict[tirx.Buffer, list[tirx.Expr]], read: Read, domain: Domain
) -> None:
    """Lower the least indices of a buffer to those of a read; 0 in what parts do not move."""
    known = least.get(read.buffer)
    found = _zeros(read.buffer)
    for dim, (index, loops) in enumerate(zip(read.indices, nest.varying[read.buffer], strict=True)):
        if loops:
            first = _first_value(index, domain)
            found[dim] = first if known is None else simplified(tirx.min(known[dim], first))
    least[read.buffer] = found


def _first_value(index: tirx.Expr, domain: Domain) -> tirx.Expr:
    """The least value of an index, in terms of the scalars."""
    point = [ir.Range.from_min_extent(index, tirx.const(1, str(index.ty.dtype)))]
    return simplified(sym.estimate_region_upper_bound(point, domain, True)[0].min_value)


def _zeros(buffer: tirx.Buffer) -> list[tirx.Expr]:
    return [tirx.const(0, str(extent.ty.dtype)) for extent in buffer.shape]


def _check_windows(
    nest: LoopNest, computed: Mapping[tirx.Buffer, Region], windows: Mapping[str, Region]
) -> None:
    for buffer in nest.func.params:
        region, window = computed.get(buffer), windows[buffer.name]
        if region is not None and intersection(region, window) != region:
            raise OpError(
                f"region {region} of buffer {buffer.name!r} is used, and the window at hand is "
                f"{window}; make the window wider"
            )


def _write(
    buffers: Sequence[tirx.Buffer], stages: Sequence[Stage], shape: LocalShape, frame: _Frame
) -> tirx.PrimFunc:
    """Write the function of a part, whose parameters hold windows of some buffers."""
    params = {
        buffer: tirx.decl_buffer(extents, buffer.dtype, buffer.name)
        for buffer, extents in zip(buffers, _typed(buffers, shape.windows), strict=True)
    }
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            for name, argument in (
                *((b.name, p) for b, p in params.items()),
                *((v.name, v) for v in frame.scalars),
            ):
                T.arg(name, argument)
            T.func_attr({"tirx.noalias": True})
            with T.sblock("root"):
                T.reads()
                T.writes()
                local = dict(params)
                for stage, axes in zip(stages, shape.stages, strict=True):
                    leader = frame.leaders.get(stage.output)
                    if stage.output not in local and axes is not None:
                        extents = params[leader].shape if leader in params else None
                        local[stage.output] = _allocate(stage, extents or _extents(stage, axes))
                for stage, axes in zip(stages, shape.stages, strict=True):
                    if axes is not None and stage.output.same_as(stage.outputs[0]):
                        block = [each for each in stages if each.output in stage.outputs]
                        _write_block(block, [extent for extent, _ in axes], frame, local)
    return builder.get().without_attr("global_symbol")


def _typed(
    buffers: Sequence[tirx.Buffer], windows: Sequence[tuple[int, ...]]
) -> list[tuple[tirx.Expr, ...]]:
    """Shapes of windows in the types of the whole buffers' extents; no extent is 0."""
    return [
        tuple(tirx.const(max(1, n), str(e.ty.dtype)) for n, e in zip(w, b.shape, strict=True))
        for w, b in zip(windows, buffers, strict=True)
    ]


def _extents(stage: Stage, axes: Sequence[tuple[int, int]]) -> list[tirx.Expr]:
    """Shape of what is computed of a stage."""
    dtypes = [str(extent.ty.dtype) for extent in stage.output.shape]
    return [tirx.const(n, dtype) for (n, _), dtype in zip(axes, dtypes, strict=True)]


def _allocate(stage: Stage, shape: Sequence[tirx.Expr]) -> tirx.Buffer:
    buffer = T.sblock_alloc_buffer(shape, stage.output.dtype)
    IRBuilder.name(stage.output.name, buffer)
    return buffer


def _write_block(
    stages: Sequence[Stage],
    extents: Sequence[int],
    frame: _Frame,
    buffers: Mapping[tirx.Buffer, tirx.Buffer],
) -> None:
    """Write the loops and the block of a stage, or of all those of one block."""
    stage = stages[0]
    sizes = [tirx.const(n, _type(axis)) for n, axis in zip(extents, stage.axes, strict=True)]
    sizes += [axis.dom.extent for axis in stage.reduced]
    with T.grid(*sizes) as loops:
        loops = [loops] if isinstance(loops, ir.Var) else list(loops)
        for loop, name in zip(loops, stage.loops, strict=True):
            if name:
                IRBuilder.name(name, loop)
        with T.sblock(stage.name):
            spatial = [
                _named(axis, T.axis.spatial(n, loop))
                for n, axis, loop in zip(sizes, stage.axes, loops, strict=False)
            ]
            reduced = [
                _named(axis, T.axis.reduce(axis.dom.extent, loop))
                for axis, loop in zip(stage.reduced, loops[len(spatial) :], strict=True)
            ]
            places = zip(stage.axes, spatial, frame.bases[stage.output], strict=True)
            values: dict[ir.Var, tirx.Expr] = {axis.var: v + base for axis, v, base in places}
            values |= {axis.var: v for axis, v in zip(stage.reduced, reduced, strict=True)}
            local = _Rewriter(values, frame, buffers)
            if stage.init is not None:
                with T.init():
                    for member in stages:
                        local.store(member, local.expression(member.init))
            stored = [local.expression(member.value) for member in stages]
            if len(stages) > 1:  # Every stage reads what was there before the first store.
                stored = [T.bind(nan_by_bits(value)) for value in stored]
            for member, value in zip(stages, stored, strict=True):
                local.store(member, value)


def _type(axis: tirx.IterVar) -> str:
    return str(axis.var.ty.dtype)


def _named(axis: tirx.IterVar, var: tirx.Var) -> tirx.Var:
    IRBuilder.name(axis.var.name, var)
    return var


@dataclass(frozen=True)
class _Rewriter:
    """Rewrites expressions of a block of the whole function for the function of a part."""

    values: Mapping[ir.Var, tirx.Expr]
    frame: _Frame
    buffers: Mapping[tirx.Buffer, tirx.Buffer]

    def expression(self, expression: tirx.Expr) -> tirx.Expr:
        """An expression with its loads from local buffers."""
        return substitute(
            tvm_ffi.structural_map(expression, (ir.TensorLoad, self._load)), self.values
        )

    def indices(self, buffer: tirx.Buffer, indices: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        """Indices into the local buffer in place of those into the whole one."""
        buffer = self.frame.leaders.get(buffer, buffer)
        origin: Sequence[tirx.Expr | None] | None = self.frame.firsts.get(buffer)
        if not origin:
            origin = self.frame.bases.get(buffer, (None,) * len(indices))
        local = []
        for index, first in zip(indices, origin, strict=True):
            at = substitute(index, self.values)
            local.append(simplified(at if first is None else at - as_type(first, str(at.ty.dtype))))
        return local

    def store(self, stage: Stage, value: tirx.Expr) -> None:
        """Write the store of a value of a stage."""
        at = self.indices(stage.output, [axis.var for axis in stage.axes])
        T.buffer_store(self.buffers[stage.output], value, at)

    def _load(self, load: ir.TensorLoad) -> tirx.Expr:
        if load.source not in self.buffers:  # No iteration of the part takes this branch.
            return tirx.const(0, str(load.ty.dtype))
        return self.buffers[load.source][tuple(self.indices(load.source, load.indices))]


@dataclass(frozen=True)
class Piece:
    """Range of a loop by itself."""

    rows: tuple[int, int]  # Begin and end of the loop.
    function: LocalFunction
    """Its function, not yet scheduled. It takes the whole function's parameters, of which it writes
    its own range, then ``scalars``."""
    scalars: tuple[int, ...]  # Values of the function's scalars for this range.


def separate_at(
    source: tirx.PrimFunc | s_tir.Schedule,
    loop: str | int | s_tir.schedule.LoopRV,
    points: Sequence[int],
) -> tuple[Piece, ...]:
    """Cut a loop at some points.

    Parameters
    ----------
    source : tirx.PrimFunc or s_tir.Schedule
        The function, or a schedule of which it is the ``main``, before its loops are split.
    loop : str, int or LoopRV
        A loop of the block that computes the output.
    points : Sequence[int]
        Where to cut: ascending, each inside the loop.

    Returns
    -------
    tuple[Piece, ...]
        In order; pieces of the same extents have equal functions.

    Raises
    ------
    OpError
        If a point is outside the loop, or the points do not ascend.
    """
    nest = read_loop_nest(source, [loop])
    extent = nest.extents[0]
    points = list(points) if isinstance(points, Iterable) else [points]
    bounds = [0, *points, extent]
    if not all(isinstance(point, Integral) for point in points) or any(
        begin >= end for begin, end in zip(bounds, bounds[1:], strict=False)
    ):
        raise OpError(
            f"points {points} do not cut the loop {nest.loop_names[0]!r}: expected "
            f"ascending integers from 1 to {extent - 1}"
        )
    windows: dict[str, Region] = {
        buffer.name: tuple((0, n) for n in shape_of(buffer)) for buffer in nest.func.params
    }
    pieces = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        rows = ((begin, end),)
        function = localize(nest, rows, windows)
        pieces.append(Piece((begin, end), function, scalar_arguments(nest, rows, windows)))
    return tuple(pieces)
