# SPDX-License-Identifier: Apache-2.0
"""Functions that can be distributed: their stages, what these read, and the distributed loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tvm import ir, s_tir, tirx

from ..errors import OpError
from ..tir.block_expressions import Stage, read_stages
from ..tir.expression_walk import is_if_then_else, loads, nodes, variables
from ..tir.extents import constant
from ..tir.index_math import simplified
from .exchange import Region


@dataclass(frozen=True)
class Read:
    """One load of a block, with the conditions under which it happens."""

    buffer: tirx.Buffer  # What is read.
    indices: tuple[tirx.Expr, ...]
    """The index in each dimension, in terms of the block's variables."""
    conditions: tuple[tirx.Expr, ...]
    """Conditions that hold where it is evaluated; others may be missing."""


@dataclass(frozen=True)
class LoopNest:
    """A function that computes outputs by stages, some of whose loops are distributed."""

    func: tirx.PrimFunc  # The function, not yet scheduled.
    stages: tuple[Stage, ...]
    """Its blocks, a stage for each buffer that they compute; a block comes after those that it
    reads."""
    loops: tuple[tuple[int, ...], ...]  # Distributed loops of each output, as its axes.

    @cached_property
    def outputs(self) -> list[tirx.Buffer]:
        """The parameters that the function writes, in order."""
        written = {stage.output for stage in self.stages}
        return [buffer for buffer in self.func.params if buffer in written]

    @cached_property
    def inputs(self) -> list[tirx.Buffer]:
        """The other parameters, in order."""
        return [buffer for buffer in self.func.params if buffer not in self.outputs]

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the distributed loops, the same for all outputs."""
        shape = shape_of(self.outputs[0])
        return tuple(shape[axis] for axis in self.loops[0])

    @property
    def loop_names(self) -> tuple[str, ...]:
        """Names of the distributed loops, in the block of the first output."""
        return tuple(stage_of(self, self.outputs[0]).loops[axis] for axis in self.loops[0])

    @cached_property
    def reads(self) -> tuple[tuple[Read, ...], ...]:
        """The loads of each stage, without those of its block's outputs."""
        return tuple(_reads(stage) for stage in self.stages)

    @cached_property
    def varying(self) -> dict[tirx.Buffer, tuple[frozenset[int], ...]]:
        """The loops, numbered as in ``loops``, that move what is used of a buffer's dimension.

        Given for each dimension; empty where every part uses the same.
        """
        numbers = {stage.output: [set[int]() for _ in stage.axes] for stage in self.stages}
        for output, axes in zip(self.outputs, self.loops, strict=True):
            for number, axis in enumerate(axes):
                numbers[output][axis].add(number)
        for stage, reads in zip(reversed(self.stages), reversed(self.reads), strict=True):
            for same in zip(*(numbers[output] for output in stage.together), strict=True):
                for dim in same:  # computed at the same places
                    dim.update(*same)
            moved = dict(zip((a.var for a in stage.axes), numbers[stage.output], strict=True))
            for read in reads:
                dims = numbers.setdefault(read.buffer, [set() for _ in read.indices])
                for dim, index in zip(dims, read.indices, strict=True):
                    dim.update(*(moved[v] for v in variables(index) if v in moved))
        return {buffer: tuple(map(frozenset, dims)) for buffer, dims in numbers.items()}

    @cached_property
    def may_trap(self) -> bool:
        """True if values of a buffer may end the process: as divisors of integers, or as indices.

        Such a function must not be computed, even where nobody reads it, from memory that nobody
        has filled.
        """
        values = [stage.value for stage in self.stages]
        indices = [index for load in loads(*values) for index in load.indices]
        divisors = [divisor for value in values for divisor in _divisors(value)]
        return bool(loads(*indices, *divisors))

    def output_regions(self, rows: Region) -> dict[tirx.Buffer, list[Region]]:
        """Region of each output: its elements of a range of each distributed loop."""
        regions: dict[tirx.Buffer, list[Region]] = {}
        for output, axes in zip(self.outputs, self.loops, strict=True):
            region = [(0, extent) for extent in shape_of(output)]
            for axis, ends in zip(axes, rows, strict=True):
                region[axis] = ends
            regions[output] = [tuple(region)]
        return regions


def stage_of(nest: LoopNest, output: tirx.Buffer) -> Stage:
    """The stage that computes a buffer."""
    [stage] = [stage for stage in nest.stages if stage.output.same_as(output)]
    return stage


def shape_of(buffer: tirx.Buffer) -> tuple[int, ...]:
    """The constant extents of a buffer."""
    return tuple(int(extent) for extent in buffer.shape)


def read_loop_nest(
    # The function, or a schedule of which it is the ``main``; loops are whole.
    source: tirx.PrimFunc | s_tir.Schedule,
    # Spatial loops of the blocks that compute outputs: names, axes of the outputs, or loops of the
    # schedule. Each is a loop of every output, by its name or axis, with the same extent.
    loops: Sequence[str | int | s_tir.schedule.LoopRV],
) -> LoopNest:
    """Read a function that is to be distributed.

    Raises ``OpError`` if the function has another form, if a loop is none of an output's or a
    reduction, if an extent is symbolic or differs between outputs, or if a block reads what it or a
    later one writes, or at an index that is loaded.
    """
    func = source.mod["main"] if isinstance(source, s_tir.Schedule) else source
    if not isinstance(func, tirx.PrimFunc):
        raise OpError(
            f"a {type(func).__name__} is to be distributed; expected a function of TensorIR, or a "
            "schedule whose main it is"
        )
    stages = read_stages(func, several=True)
    if stages is None:
        raise OpError(
            "a function is distributed before its loops are split: each block must compute every "
            "element of a buffer, or of several, by one store each, in a loop for each of its "
            "variables"
        )
    nest = LoopNest(func, tuple(stages), ())
    if not nest.outputs:
        raise OpError("no block writes a parameter; expected at least one output")
    _check_extents(nest)
    for stage in nest.stages:
        _check_dependence(stage)
    _check_order(nest)
    nest = LoopNest(
        func, nest.stages, tuple(_axes(source, nest, out, loops) for out in nest.outputs)
    )
    _check_loops(nest)
    _check_gathers(nest)
    return nest


def _check_order(nest: LoopNest) -> None:
    """Refuse blocks that read what a later one writes."""
    written = {stage.output for stage in nest.stages}
    for stage, reads in zip(nest.stages, nest.reads, strict=True):
        written.discard(stage.output)
        for read in reads:
            if read.buffer in written:
                raise OpError(
                    f"block {stage.name!r} reads {read.buffer.name!r} before a later block writes "
                    "it; give what it held before as an input of its own"
                )


def _check_loops(nest: LoopNest) -> None:
    """Refuse outputs whose distributed loops have different extents."""
    for output, axes in zip(nest.outputs, nest.loops, strict=True):
        extents = tuple(shape_of(output)[axis] for axis in axes)
        if extents != nest.extents:
            raise OpError(
                f"the loops {', '.join(nest.loop_names)} have the extents {list(nest.extents)} of "
                f"output {nest.outputs[0].name!r} and {list(extents)} of {output.name!r}; expected "
                "the same: distribute a function for each output"
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
        if load.source not in stage.outputs:
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


def _axes(
    source: tirx.PrimFunc | s_tir.Schedule,
    nest: LoopNest,
    output: tirx.Buffer,
    loops: Sequence[str | int | s_tir.schedule.LoopRV],
) -> tuple[int, ...]:
    """The axes of an output that loops count."""
    axes = tuple(_axis(source, stage_of(nest, output), loop) for loop in loops)
    if len(set(axes)) < len(axes):
        raise OpError(f"loops {list(loops)} name one loop twice")
    return axes


def _axis(
    source: tirx.PrimFunc | s_tir.Schedule, stage: Stage, loop: str | int | s_tir.schedule.LoopRV
) -> int:
    """The axis of a stage's output that a loop counts."""
    spatial = stage.loops[: len(stage.axes)]
    if isinstance(loop, int) and not isinstance(loop, bool):
        if not 0 <= loop < len(spatial):
            raise OpError(
                f"loop {loop} is not an axis of {stage.output.name!r}; it has {len(spatial)}"
            )
        return loop
    name = name_of(source, loop)
    if name in stage.loops[len(stage.axes) :]:
        raise OpError(
            f"loop {name!r} of block {stage.name!r} is a reduction, which can only be "
            f"distributed, and alone; name one of {', '.join(filter(None, spatial))}"
        )
    if name not in spatial:
        raise OpError(
            f"block {stage.name!r}, which computes an output, has no loop {name!r}; "
            f"it has {', '.join(filter(None, spatial))}"
        )
    return spatial.index(name)


def name_of(source: tirx.PrimFunc | s_tir.Schedule, loop: str | s_tir.schedule.LoopRV) -> str:
    """Name of a loop, which may be one of the schedule that is the source.

    Raises ``OpError`` if it is something else.
    """
    if isinstance(loop, str):
        return loop
    if isinstance(loop, s_tir.schedule.LoopRV) and isinstance(source, s_tir.Schedule):
        return str(source.get(loop).loop_var.name)
    raise OpError(
        f"a loop is {loop!r}; expected its name, an axis of the output, or a loop of the schedule "
        "that is distributed"
    )


def _reads(stage: Stage) -> tuple[Read, ...]:
    found: list[Read] = []
    for expression in (stage.value, stage.init):
        if expression is not None:
            _collect(expression, (), found)
    return tuple(read for read in found if read.buffer not in stage.outputs)


def _collect(expression: tirx.Expr, conditions: tuple[tirx.Expr, ...], reads: list[Read]) -> None:
    """Add the loads of an expression; those of a branch have its condition."""
    if is_if_then_else(expression):
        condition, first, second = expression.args
        _collect(condition, conditions, reads)
        _collect(first, (*conditions, condition), reads)
        _collect(second, (*conditions, simplified(tirx.Not(condition))), reads)
        return
    if isinstance(expression, ir.TensorLoad):
        reads.append(Read(expression.source, tuple(expression.indices), conditions))
    for child in operands(expression):
        _collect(child, conditions, reads)


def _divisors(expression: tirx.Expr) -> list[tirx.Expr]:
    """Divisors of the integer divisions of an expression."""
    divisions = nodes(expression, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
    return [one.b for one in divisions if str(one.ty.dtype).startswith(("int", "uint"))]


def operands(expression: tirx.Expr) -> list[tirx.Expr]:
    """The expressions that an expression is made of."""
    if isinstance(expression, ir.TensorLoad):
        return list(expression.indices)
    if isinstance(expression, ir.Call):
        return [arg for arg in expression.args if isinstance(arg, ir.Expr)]
    fields = ("a", "b", "value", "condition", "true_value", "false_value", "body")
    children = [getattr(expression, name, None) for name in fields]
    return [child for child in children if isinstance(child, ir.Expr)]
