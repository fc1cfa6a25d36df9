# SPDX-License-Identifier: Apache-2.0
"""A legalized ``coalesced_reduce`` as expressions of its loops.

The two coalesced loops are unfolded again, into one loop for each run of axes of one kind, because
a vector loop must not recover subscripts by division: ``data[m // 49, n // 7, n % 7]`` with 7 x 7
reduced axes is ``data[m * 49 + n]`` in memory. A run over which a producer reads a broadcast tensor
is cut where that tensor's address stops being linear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from schedules.compute.coalesced_reduce import ATTRIBUTE
from schedules.tir.expression_walk import loads, nodes, substitute, uses
from schedules.tir.index_math import ravel
from schedules.workload.reduce import (
    Extent,
    ReduceWorkload,
    constant,
    extent_of,
    is_one,
    unravel,
)
from schedules.workload.reduce_operator import State, field_dtypes

from ..core.machine import CPUInfo
from ..nests.blocks import Kernel, open_kernel
from ..nests.loop_transforms import inline_blocks

Indices = Mapping[tirx.Var, tirx.Expr]


@dataclass(frozen=True)
class Axis:
    """A loop over one run of axes of the data.

    Parameters
    ----------
    reduced : bool
        Whether it is one of the reduced loops.
    extent : Extent
        Number of iterations.
    var : tirx.Var
        Its variable in the expressions of a :class:`ReduceSource`.
    """

    reduced: bool
    extent: Extent
    var: tirx.Var

    @property
    def size(self) -> int | None:
        """The extent as a number; None where it is symbolic."""
        return constant(self.extent)


@dataclass(frozen=True)
class ReduceSource:
    """A reduction with its producers and its epilogue.

    Parameters
    ----------
    func : tirx.PrimFunc
        The function; its last parameter is the output.
    cpu : CPUInfo
        The machine that the target names.
    workload : ReduceWorkload
        Operator and types.
    axes : tuple[Axis, ...]
        The loops in the order of the data's axes.
    element : tirx.Expr
        First field of one element's state. Loads are from one-dimensional stand-ins, see ``flats``.
    result : tirx.Expr
        One element of the output, by ``state`` and the parallel loops' variables.
    state : tuple[tirx.Var, ...]
        Stands in ``result`` for the fields of the complete state.
    flats : tuple[tirx.Buffer, ...]
        Stand-ins of the parameters.
    strides : tuple[dict[tirx.Var, tirx.Expr | None], ...]
        By load of ``element``, the stride of its address along each variable; None where that is
        not linear.
    bare : frozenset[tirx.Var]
        Variables that ``element`` uses elsewhere than in the addresses of its loads.
    """

    func: tirx.PrimFunc
    cpu: CPUInfo
    workload: ReduceWorkload
    axes: tuple[Axis, ...]
    element: tirx.Expr
    result: tirx.Expr
    state: tuple[tirx.Var, ...]
    flats: tuple[tirx.Buffer, ...]
    strides: tuple[dict[tirx.Var, tirx.Expr | None], ...]
    bare: frozenset[tirx.Var]

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
        return replace(self.workload, acc_dtype=narrow)

    @property
    def position_dtype(self) -> str:
        """Type that holds the positions of ``argmin`` and ``argmax`` while they are compared."""
        reduced = constant(math.prod(axis.extent for axis in self.reduced))
        return "int32" if reduced is not None and reduced < 2**31 else "int64"

    def output_index(self, indices: Indices) -> tirx.Expr:
        """Position of an output in the flat output."""
        return substitute(_place(self.parallel), indices)

    def position(self, indices: Indices) -> tirx.Expr:
        """Position of an element among those that are reduced to one output."""
        return substitute(_place(self.reduced), indices).astype(self.position_dtype)

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


def read_source(func: tirx.PrimFunc, target: Target) -> ReduceSource | None:
    """Read a legalized ``coalesced_reduce``, alone or fused with its neighbours.

    Parameters
    ----------
    func : tirx.PrimFunc
        The function; it is not changed.
    target : Target
        A CPU target.

    Returns
    -------
    ReduceSource | None
        None for functions that hold anything else than one coalesced reduction, element-wise
        producers, and element-wise consumers of the output's shape.
    """
    if not _is_marked(func) or not all(isinstance(p.ty, tirx.BufferType) for p in func.params):
        return None
    kernel = open_kernel(func, target)
    if kernel is None:
        return None
    blocks = {_attribute(kernel.sch, info.block_rv): info for info in kernel.blocks}
    text = next(filter(None, blocks), None)
    if text is None or sum(not info.is_injective() for info in kernel.blocks) != 1:
        return None
    value = blocks[text]
    shape = _data_shape(kernel.sch.get(value.block_rv))
    remaining = inline_blocks(kernel, [value])
    if shape is None or len(remaining) != 3 or remaining[0] is not value:
        return None
    if remaining[1].is_injective():
        return None
    return _Reader(kernel, func, ReduceWorkload.from_json(text), shape).read()


def _is_marked(func: tirx.PrimFunc) -> bool:
    return any(ATTRIBUTE in block.annotations for block in nodes(func.body, s_tir.SBlock))


def _attribute(sch: s_tir.Schedule, block: SBlockRV) -> str:
    return str(sch.get(block).annotations.get(ATTRIBUTE, ""))


def _data_shape(value: s_tir.SBlock) -> list[Extent] | None:
    """Extents of the tensor that the reduction reads, before its producers are inlined."""
    read = loads(value.body)
    if not read or any(not load.source.same_as(read[0].source) for load in read):
        return None
    return list(map(extent_of, read[0].source.shape))


class _Reader:
    """Finds the loops of a reduction and rewrites its expressions for them."""

    def __init__(
        self,
        kernel: Kernel,
        func: tirx.PrimFunc,
        workload: ReduceWorkload,
        shape: Sequence[Extent],
    ) -> None:
        self.kernel, self.func, self.workload, self.shape = kernel, func, workload, shape
        self.blocks = [kernel.sch.get(info.block_rv) for info in kernel.blocks]
        params = kernel.sch.mod["main"].params
        self.flats = {
            param: tirx.decl_buffer((math.prod(param.shape, start=1),), param.dtype, param.name)
            for param in params
        }
        self.analyzer = sym.Analyzer()

    def read(self) -> ReduceSource | None:
        """The source, with the longest loops whose innermost one has linear addresses."""
        runs = _merge(self.shape, self.workload.axes)
        merged = self._source(runs)
        if merged is None or _is_linear(merged):
            return merged
        cut = (self._source(candidate) for candidate in self._cut(runs))
        return next((source for source in cut if source and _is_linear(source)), merged)

    def _cut(self, runs: list[list[int]]) -> list[list[list[int]]]:
        """The innermost run cut into an outer and an inner part, the longest inner part first."""
        *outer, last = runs or [[]]
        return [[*outer, last[:k], last[k:]] for k in range(1, len(last))]

    def _source(self, runs: list[list[int]]) -> ReduceSource | None:
        self.analyzer = sym.Analyzer()
        axes = tuple(self._axis(run, number) for number, run in enumerate(runs))
        if not any(axis.reduced for axis in axes):
            axes = (*axes, Axis(True, 1, tirx.Var("r", "int64")))
        value, _, finish = self.blocks
        parallel = [axis for axis in axes if not axis.reduced]
        reduced = [axis for axis in axes if axis.reduced]
        store = _only_store(value)
        if store is None or len(store.indices) != 2:
            return None
        flat = zip(store.indices, (_place(parallel), _place(reduced)), strict=True)
        indices = {index: place for index, place in flat if isinstance(index, tirx.Var)}
        plain = tvm_ffi.structural_map(store.value, (tirx.NE, _truth_of_bool))
        element = self._flatten(substitute(plain, indices))
        state = tuple(tirx.Var("state", dtype) for dtype in field_dtypes(self.workload))
        result = self._result(finish, _place(parallel), state)
        if element is None or result is None:
            return None
        return ReduceSource(
            func=self.func,
            cpu=self.kernel.cpu,
            workload=self.workload,
            axes=axes,
            element=element,
            result=result,
            state=state,
            flats=tuple(self.flats.values()),
            strides=tuple(self._strides(load, axes) for load in loads(element)),
            bare=_bare_variables(element, axes),
        )

    def _axis(self, run: Sequence[int], number: int) -> Axis:
        reduced = run[0] in self.workload.axes
        var = tirx.Var(f"{'r' if reduced else 'p'}{number}", "int64")
        extent = math.prod(self.shape[axis] for axis in run)
        self.analyzer.bind(var, ir.Range(0, extent))
        return Axis(reduced, extent, var)

    def _flatten(self, expr: tirx.Expr) -> tirx.Expr | None:
        """Let all loads read stand-ins; None if one reads anything else than a parameter."""
        if any(load.source not in self.flats for load in loads(expr)):
            return None

        def flat(load: ir.TensorLoad) -> tirx.Expr:
            offset = ravel(load.indices, load.source.shape)
            return self.flats[load.source][self.analyzer.simplify(offset)]

        return tvm_ffi.structural_map(expr, (ir.TensorLoad, flat))

    def _result(
        self, finish: s_tir.SBlock, output: tirx.Expr, state: Sequence[tirx.Var]
    ) -> tirx.Expr | None:
        """The epilogue; None unless it makes element m of the output from state m."""
        store = _only_store(finish)
        if store is None or not store.buffer.same_as(list(self.flats)[-1]):
            return None
        places = unravel(output, store.buffer.shape)
        indices = {}
        for index, place in zip(store.indices, places, strict=True):
            if isinstance(index, tirx.Var):
                indices[index] = place
            elif constant(index) != 0:
                return None
        writes = self.blocks[1].writes
        fields = {part.source: field for part, field in zip(writes, state, strict=True)}
        expr = substitute(store.value, indices)
        own = [load for load in loads(expr) if load.source in fields]
        if any(not self.analyzer.can_prove_equal(load.indices[0], output) for load in own):
            return None
        return self._flatten(
            tvm_ffi.structural_map(
                expr, (ir.TensorLoad, lambda load: fields.get(load.source, load))
            )
        )

    def _strides(
        self, load: ir.TensorLoad, axes: Sequence[Axis]
    ) -> dict[tirx.Var, tirx.Expr | None]:
        def stride(var: tirx.Var) -> tirx.Expr | None:
            if not uses(load.indices[0], var):
                return tirx.const(0, "int64")
            found = sym.detect_linear_equation(load.indices[0], [var])
            return self.analyzer.simplify(found[0]) if found else None

        return {axis.var: stride(axis.var) for axis in axes}


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


def _only_store(block: s_tir.SBlock) -> tirx.BufferStore | None:
    return block.body if isinstance(block.body, tirx.BufferStore) else None


def _place(axes: Sequence[Axis]) -> tirx.Expr:
    return ravel([axis.var for axis in axes], [axis.extent for axis in axes])
