# SPDX-License-Identifier: Apache-2.0
"""One reduction as expressions of its loops, and its reading in a function.

The two loops of a legalized ``coalesced_reduce`` are unfolded again, into one loop for each run of
axes of one kind, because a vector loop must not recover subscripts by division:
``data[m // 49, n // 7, n % 7]`` with 7 x 7 reduced axes is ``data[m * 49 + n]`` in memory. A run
over which a producer reads a broadcast tensor is cut where that tensor's address stops being
linear. The loops of other reductions, of TVM's own operators, are merged likewise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import ir, s_tir, sym, tirx

from schedules import attributes
from schedules.cpu.core.kernel_builder import buffers
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.nests.blocks import BlockFacts, Kernel, open_kernel
from schedules.cpu.nests.loop_transforms import (
    facts_of_inlined,
    inline_blocks,
    merge_groups,
    open_inlined,
)
from schedules.cpu.nests.reduction_nests import is_side_by_side
from schedules.schedule_rule import KernelFacts
from schedules.tir.expression_walk import loads, substitute, uses
from schedules.tir.extents import Extent, constant, extent_of, is_one, unravel
from schedules.tir.index_math import as_type, ravel, volume
from schedules.workload.reduce import ReduceWorkload, accumulation_dtype
from schedules.workload.reduce_operator import State, field_dtypes

Indices = Mapping[tirx.Var, tirx.Expr]


@dataclass(frozen=True)
class Axis:
    """A loop over one run of axes of the data."""

    reduced: bool  # Whether it is one of the reduced loops.
    extent: Extent  # Number of iterations.
    var: tirx.Var  # Its variable in the expressions of a :class:`ReduceSource`.

    @property
    def size(self) -> int | None:
        """The extent as a number; None where it is symbolic."""
        return constant(self.extent)


@dataclass(frozen=True)
class ReduceSource:
    """A reduction with its producers and its epilogue."""

    func: tirx.PrimFunc  # The function; its last parameter is the output.
    cpu: CPUInfo  # The machine that the target names.
    workload: ReduceWorkload  # Operator and types.
    axes: tuple[Axis, ...]  # The loops in the order of the data's axes.
    element: tirx.Expr
    """First field of one element's state. Loads are from one-dimensional stand-ins, see
    ``flats``."""
    result: tirx.Expr  # One element of the output, by ``state`` and the parallel loops' variables.
    state: tuple[tirx.Var, ...]  # Stands in ``result`` for the fields of the complete state.
    flats: tuple[tirx.Buffer, ...]  # Stand-ins of the parameters.
    strides: tuple[dict[tirx.Var, tirx.Expr | None], ...]
    """Strides of the address of each load of ``element`` along each variable; None where the
    address is not linear."""
    bare: frozenset[tirx.Var]
    """Variables that ``element`` uses elsewhere than in the addresses of its loads."""

    @property
    def parallel(self) -> tuple[Axis, ...]:
        """Loops over outputs."""
        return tuple(axis for axis in self.axes if not axis.reduced)

    @property
    def reduced(self) -> tuple[Axis, ...]:
        """Loops over the reduced elements."""
        return tuple(axis for axis in self.axes if axis.reduced)

    @property
    def outputs(self) -> Extent:
        """``M``."""
        return math.prod(axis.extent for axis in self.parallel)

    @property
    def elements(self) -> int | None:
        """Number of reduced elements in all; None where that is symbolic."""
        return constant(math.prod(axis.extent for axis in self.axes))

    @property
    def registers(self) -> ReduceWorkload:
        """The same reduction on the narrowest accumulators that hold its states."""
        narrow = {"int8": "int8", "uint8": "uint8", "bool": "uint8"}.get(self.workload.dtype)
        if narrow is None or self.workload.operator not in ("min", "max", "and", "or"):
            return self.workload
        operator = self.workload.operator
        if self.workload.dtype == "bool":  # LLVM makes masks of logic on bytes
            operator = {"and": "min", "or": "max"}.get(operator, operator)
        return replace(self.workload, operator=operator, acc_dtype=narrow)

    @property
    def position_dtype(self) -> str:
        """Type that holds the positions of ``argmin`` and ``argmax`` while they are compared."""
        reduced = constant(math.prod(axis.extent for axis in self.reduced))
        return "int32" if reduced is not None and reduced < 2**31 else "int64"

    def output_index(self, indices: Indices) -> tirx.Expr:
        """Position of an output in the flat output."""
        return substitute(place_of(self.parallel), indices)

    def position(self, indices: Indices) -> tirx.Expr:
        """Position of an element among those that are reduced to one output."""
        return substitute(place_of(self.reduced), indices).astype(self.position_dtype)

    def element_at(self, indices: Indices, buffers: Sequence[tirx.Buffer]) -> tirx.Expr:
        """First field of the state of one element, read from flat views of the parameters."""
        value = self.element.astype(self.registers.acc_dtype)
        return self._read(substitute(value, indices), buffers)

    def complete(self, state: State) -> State:
        """The state of all elements in the types of the reduction.

        Where every element equals the initial state, none of them has replaced it: then the first
        one is the extreme one.
        """
        value, *position = state
        none = tirx.max_value(self.position_dtype)
        first = tirx.const(0, self.position_dtype)
        places = [tirx.Select(tirx.EQ(at, none), first, at).astype("int64") for at in position]
        return (value.astype(self.workload.acc_dtype), *places)

    def result_at(
        self, state: State, indices: Indices, buffers: Sequence[tirx.Buffer]
    ) -> tirx.Expr:
        """The element of the output for a complete state."""
        fields = dict(zip(self.state, state, strict=True))
        return self._read(substitute(self.result, {**indices, **fields}), buffers)

    def _read(self, expr: tirx.Expr, buffers: Sequence[tirx.Buffer]) -> tirx.Expr:
        views = dict(zip(self.flats, buffers, strict=True))

        def read(load: ir.TensorLoad) -> tirx.Expr:
            view = views.get(load.source)
            return load if view is None else view[load.indices[0]]

        return tvm_ffi.structural_map(expr, (ir.TensorLoad, read))


def place_of(axes: Sequence[Axis]) -> tirx.Expr:
    """Position in the one loop that some loops form, in row-major order."""
    return ravel([axis.var for axis in axes], [axis.extent for axis in axes])


def read_source(facts: KernelFacts) -> ReduceSource | None:
    """Read a function that holds one reduction: a legalized ``coalesced_reduce``, or any other.

    Returns None for functions that hold anything other than one reduction, element-wise producers,
    and element-wise consumers of the output's shape.
    """
    kernel = open_kernel(facts)
    if kernel is None or sum(not info.is_injective() for info in kernel.blocks) != 1:
        return None
    marked = [info for info in kernel.blocks if _attribute(kernel.sch.get(info.block_rv))]
    shape = _data_shape(kernel.sch.get(marked[0].block_rv)) if marked else []
    if marked:
        inline_blocks(kernel, marked)
    else:
        kernel = open_inlined(facts) or kernel
    place, remaining = len(marked), kernel.blocks
    if remaining[:place] != marked or not place < len(remaining) <= place + 2:
        return None
    if remaining[place].is_injective() or shape is None:
        return None
    if marked:
        return _CoalescedReader(kernel, facts.func, shape).read()
    return _plain_source(kernel, facts.func, facts_of_inlined(facts)[0])


def _attribute(block: s_tir.SBlock) -> str:
    return str(block.annotations.get(attributes.REDUCE, ""))


class _SourceReader:
    """Rewrites the expressions of a reduction for its loops.

    Attributes
    ----------
    stages : list[s_tir.SBlock]
        The reduction, and the block that computes the output from it, if there is one.
    """

    def __init__(
        self, kernel: Kernel, func: tirx.PrimFunc, workload: ReduceWorkload, stages: Sequence
    ) -> None:
        self.kernel, self.func, self.workload, self.stages = kernel, func, workload, stages
        self.flats = {
            param: tirx.decl_buffer((math.prod(param.shape, start=1),), param.dtype, param.name)
            for param in buffers(kernel.sch.mod["main"])
        }
        self.analyzer = sym.Analyzer()

    def axes(self, runs: Sequence[tuple[bool, Extent]]) -> tuple[Axis, ...]:
        """The loops, by whether they are reduced, and their extents."""
        self.analyzer = sym.Analyzer()
        axes = []
        for number, (reduced, extent) in enumerate(runs):
            var = tirx.Var(f"{'r' if reduced else 'p'}{number}", "int64")
            self.analyzer.bind(var, ir.Range(0, extent))
            axes.append(Axis(reduced, extent, var))
        if not any(axis.reduced for axis in axes):
            axes.append(Axis(True, 1, tirx.Var("r", "int64")))
        return tuple(axes)

    def source(self, axes: tuple[Axis, ...], element: tirx.Expr) -> ReduceSource | None:
        """The reduction of an element that is given by the variables of the loops."""
        flat = self._flatten(element)
        state = tuple(tirx.Var("state", dtype) for dtype in field_dtypes(self.workload))
        result = self._result(place_of([axis for axis in axes if not axis.reduced]), state)
        if flat is None or result is None:
            return None
        return ReduceSource(
            func=self.func,
            cpu=self.kernel.cpu,
            workload=self.workload,
            axes=axes,
            element=flat,
            result=result,
            state=state,
            flats=tuple(self.flats.values()),
            strides=tuple(self._strides(load, axes) for load in loads(flat)),
            bare=_bare_variables(flat, axes),
        )

    def _flatten(self, expr: tirx.Expr) -> tirx.Expr | None:
        """Let all loads read stand-ins; None if one reads anything other than a parameter."""
        if any(load.source not in self.flats for load in loads(expr)):
            return None

        def flat(load: ir.TensorLoad) -> tirx.Expr:
            return self.flats[load.source][self.position(load.source, load.indices)]

        return tvm_ffi.structural_map(expr, (ir.TensorLoad, flat))

    def _result(self, output: tirx.Expr, state: Sequence[tirx.Var]) -> tirx.Expr | None:
        """The epilogue; None unless it makes element m of the output from state m."""
        written = [region.source for region in self.stages[0].writes]
        fields = {
            buffer: field.astype(buffer.dtype) for buffer, field in zip(written, state, strict=True)
        }
        last = list(self.flats)[-1]
        if len(self.stages) == 1:
            return fields.get(last)
        store = _only_store(self.stages[1])
        if store is None or not store.buffer.same_as(last):
            return None
        if not self.analyzer.can_prove_equal(volume(last.shape), volume(written[0].shape)):
            return None
        places = unravel(output, last.shape)
        indices = {}
        for index, place in zip(store.indices, places, strict=True):
            if isinstance(index, tirx.Var):
                indices[index] = as_type(place, str(index.ty.dtype))
            elif constant(index) != 0:
                return None
        expr = substitute(store.value, indices)
        own = [load for load in loads(expr) if load.source in fields]
        places = [self.position(load.source, load.indices) for load in own]
        if not all(self.analyzer.can_prove_equal(place, output) for place in places):
            return None
        return self._flatten(
            tvm_ffi.structural_map(
                expr, (ir.TensorLoad, lambda load: fields.get(load.source, load))
            )
        )

    def position(self, buffer: ir.Var, indices: Sequence[tirx.Expr]) -> tirx.Expr:
        """Row-major position of an element, simplified as int64."""
        simple = self.analyzer.simplify(ravel(indices, buffer.shape))
        return self.analyzer.simplify(tvm_ffi.structural_map(simple, (tirx.Cast, _undo_narrowing)))

    def _strides(
        self, load: ir.TensorLoad, axes: Sequence[Axis]
    ) -> dict[tirx.Var, tirx.Expr | None]:
        def stride(var: tirx.Var) -> tirx.Expr | None:
            if not uses(load.indices[0], var):
                return tirx.const(0, "int64")
            found = sym.detect_linear_equation(load.indices[0], [var])
            return self.analyzer.simplify(found[0]) if found else None

        return {axis.var: stride(axis.var) for axis in axes}


class _CoalescedReader(_SourceReader):
    """Reads a legalized ``coalesced_reduce``, and unfolds its two loops."""

    def __init__(self, kernel: Kernel, func: tirx.PrimFunc, shape: Sequence[Extent]) -> None:
        self.value, *stages = [kernel.sch.get(info.block_rv) for info in kernel.blocks]
        self.shape = shape
        super().__init__(kernel, func, ReduceWorkload.from_json(_attribute(self.value)), stages)

    def read(self) -> ReduceSource | None:
        """The source, with the longest loops whose innermost one has linear addresses."""
        runs = _merge(self.shape, self.workload.axes)
        merged = self._unfolded(runs)
        if merged is None or _is_linear(merged):
            return merged
        *outer, last = runs or [[]]
        cuts = ([*outer, last[:k], last[k:]] for k in range(1, len(last)))
        cut = (self._unfolded(candidate) for candidate in cuts)
        return next((source for source in cut if source and _is_linear(source)), merged)

    def _unfolded(self, runs: Sequence[Sequence[int]]) -> ReduceSource | None:
        store = _only_store(self.value)
        if store is None or len(store.indices) != 2:
            return None
        reduced = self.workload.axes
        extents = [math.prod(self.shape[axis] for axis in run) for run in runs]
        axes = self.axes([(run[0] in reduced, e) for run, e in zip(runs, extents, strict=True)])
        both = [place_of([axis for axis in axes if axis.reduced == kind]) for kind in (False, True)]
        flat = zip(store.indices, both, strict=True)
        indices = {index: place for index, place in flat if isinstance(index, tirx.Var)}
        plain = tvm_ffi.structural_map(store.value, (tirx.NE, _truth_of_bool))
        return self.source(axes, substitute(plain, indices))


def _data_shape(value: s_tir.SBlock) -> list[Extent] | None:
    """Extents of the tensor that the reduction reads, before its producers are inlined."""
    read = loads(value.body)
    if not read or any(not load.source.same_as(read[0].source) for load in read):
        return None
    return list(map(extent_of, read[0].source.shape))


def _plain_source(
    kernel: Kernel, func: tirx.PrimFunc, facts: BlockFacts | None
) -> ReduceSource | None:
    """Read any other reduction by one operator, over loops that every access traverses as one."""
    block = kernel.sch.get(kernel.blocks[0].block_rv)
    if facts is None or not facts.loads or facts.guards or set(facts.kinds) - set("SR"):
        return None
    found = _operator_of(block)
    if found is None:
        return None
    operator, element = found
    dtype = str(block.writes[0].source.dtype)
    workload = ReduceWorkload(operator, (), False, dtype, accumulation_dtype(operator, dtype))
    stages = [kernel.sch.get(info.block_rv) for info in kernel.blocks]
    reader = _SourceReader(kernel, func, workload, stages)
    outputs, reduced = (merge_groups(facts, facts.positions(kind)) for kind in "SR")
    groups = [*outputs, *reduced]
    if outputs and is_side_by_side(facts):
        groups = [*outputs[:-1], *reduced, outputs[-1]]
    extents = [extent_of(var.dom.extent) for var in block.iter_vars]
    axes = reader.axes(
        [(facts.kinds[run[0]] == "R", math.prod(extents[k] for k in run)) for run in groups]
    )
    places = {var: as_type(0, str(var.ty.dtype)) for var in facts.vars}
    for run, axis in zip(groups, axes, strict=False):
        subscripts = unravel(axis.var, [extents[k] for k in run])
        for k, place in zip(run, subscripts, strict=True):
            places[facts.vars[k]] = as_type(place, str(facts.vars[k].ty.dtype))
    output = place_of([axis for axis in axes if not axis.reduced])
    indices = [substitute(index, places) for index in facts.store.indices]
    position = reader.position(facts.store.buffer, indices)
    if not reader.analyzer.can_prove_equal(position, output):
        return None
    return reader.source(axes, substitute(element, places))


_OPERATORS = {tirx.Add: "sum", tirx.Mul: "prod", tirx.Max: "max", tirx.Min: "min"}


def _operator_of(block: s_tir.SBlock) -> tuple[str, tirx.Expr] | None:
    """The operator of a reduction and what it reduces; None for others than those of TVM.

    TVM's extremes of floats begin with a finite number; here they begin with an infinity.
    """
    store = _only_store(block)
    if store is None or not isinstance(block.init, tirx.BufferStore):
        return None
    operator = _OPERATORS.get(type(store.value))
    if operator is None or not _is_start(operator, block.init.value):
        return None
    left, right = store.value.a, store.value.b
    if _is_state(left, store):
        return operator, right
    return (operator, left) if _is_state(right, store) else None


def _is_state(expr: tirx.Expr, store: tirx.BufferStore) -> bool:
    """Return whether an expression reads what a statement overwrites."""
    return (
        isinstance(expr, ir.TensorLoad)
        and expr.source.same_as(store.buffer)
        and tvm_ffi.structural_equal(expr.indices, store.indices)
    )


def _is_start(operator: str, value: tirx.Expr) -> bool:
    """Return whether a reduction that begins with ``value`` gives that of its elements."""
    dtype = str(value.ty.dtype)
    if operator in ("sum", "prod"):
        starts = [tirx.const(int(operator == "prod"), dtype)]
    else:
        starts = [tirx.min_value(dtype) if operator == "max" else tirx.max_value(dtype)]
        if "float" in dtype:
            infinity = tirx.infinity(dtype)
            starts.append(-infinity if operator == "max" else infinity)
    return any(tvm_ffi.structural_equal(value, start) for start in starts)


def _merge(shape: Sequence[Extent], reduced: Sequence[int]) -> list[list[int]]:
    """Group neighbouring axes of one kind, without those of extent 1."""
    runs: list[list[int]] = []
    for axis in (axis for axis, extent in enumerate(shape) if not is_one(extent)):
        if runs and (runs[-1][0] in reduced) == (axis in reduced):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return runs


def _is_linear(source: ReduceSource) -> bool:
    """Return whether a vector along the innermost loop of either kind has linear addresses."""
    ends = [axes[-1].var for axes in (source.parallel, source.reduced) if axes]
    return all(strides[var] is not None for strides in source.strides for var in ends)


def _bare_variables(element: tirx.Expr, axes: Sequence[Axis]) -> frozenset[tirx.Var]:
    zero = tirx.const(0, "int64")
    rest = tvm_ffi.structural_map(element, (ir.TensorLoad, lambda load: load.source[zero]))
    return frozenset(axis.var for axis in axes if uses(rest, axis.var))


def _truth_of_bool(expr: tirx.NE) -> tirx.Expr:
    """``x`` for ``x != False``, which TVM 0.27 compares as floats where it is a vector."""
    is_truth = str(expr.a.ty.dtype) == "bool" and constant(expr.b) == 0
    return expr.a if is_truth else expr


def _undo_narrowing(cast: tirx.Cast) -> tirx.Expr:
    """``x`` for ``int64(int32(x))``, where ``x`` is an int64 that int32 holds."""
    inner = cast.value
    is_round = isinstance(inner, tirx.Cast) and inner.value.ty.dtype == cast.ty.dtype
    return inner.value if is_round else cast


def _only_store(block: s_tir.SBlock) -> tirx.BufferStore | None:
    return block.body if isinstance(block.body, tirx.BufferStore) else None
