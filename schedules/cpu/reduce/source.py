# SPDX-License-Identifier: Apache-2.0
"""One reduction as expressions of its loops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import ir, tirx

from schedules.tir.expression_walk import substitute
from schedules.tir.extents import Extent, constant
from schedules.tir.index_math import ravel
from schedules.workload.reduce import ReduceWorkload
from schedules.workload.reduce_operator import State

from ..core.machine import CPUInfo

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
