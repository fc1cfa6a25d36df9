# SPDX-License-Identifier: Apache-2.0
"""Code of a thread that computes neighbouring points of an iteration space."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.expression_walk import is_if_then_else, substitute
from schedules.tir.extents import Extent, constant, unravel
from schedules.tir.index_math import i64
from schedules.tir.statements import when

from ..core.vector_loads import FlatViews, hold, load_vector, store_vector
from .coalescing import Lanes, classify
from .element_program import Read, Value
from .iteration_domain import IterationSpace, Store

Names = Mapping[tirx.Var, tirx.Expr]
Fetch = Callable[[Read, Names], "tirx.Expr | None"]


@dataclass(frozen=True)
class Views(FlatViews):
    """Tensors by which the accesses of a space are loaded and stored."""

    def load(self, access: Read, position: tirx.Expr, names: Names) -> tirx.Expr:
        """Read one element."""
        view = self.row(access.buffer)
        if view is None:
            return access.buffer[tuple(substitute(i, names) for i in access.indices)]
        return _value(view[position], access)

    def store(self, access: Store, position: tirx.Expr, names: Names, value: tirx.Expr) -> None:
        """Write one element."""
        view = self.row(access.buffer)
        if view is None:
            T.buffer_store(access.buffer, value, [substitute(i, names) for i in access.indices])
        else:
            T.buffer_store(view, value.astype(view.dtype), [position])


class PointWriter:
    """Emits the steps of a vector of points."""

    def __init__(
        self,
        lanes: Lanes,  # The points and their accesses.
        views: Views,
        places: Sequence[Sequence[tirx.Expr]],  # Subscripts of each lane's point.
        first: tirx.Expr | None = None,  # Number of the first point, if the points are numbered.
        # Function from a read to its replacement, such as a read of shared memory; None to keep it.
        fetch: Fetch | None = None,
    ):
        self.lanes = lanes
        self.views = views
        self.first = first
        self.fetch = fetch
        self._names: list[dict[tirx.Var, tirx.Expr]] = [
            dict(zip(lanes.space.axes, place, strict=True)) for place in places
        ]
        self._padded: dict[tirx.Var, list[tirx.Expr]] = {}

    @classmethod
    def at(cls, lanes: Lanes, views: Views, start: tirx.Expr) -> PointWriter:
        """The writer of the vector with the number ``start``."""
        first = start * i64(lanes.vector)
        return cls(lanes, views, _places(lanes, start), first)

    def give(self, var: tirx.Var, values: Sequence[tirx.Expr]) -> None:
        """Set the value of a variable in each lane."""
        for names, value in zip(self._names, values, strict=True):
            names[var] = value

    def write(self, condition: tirx.Expr | None = None) -> None:
        """Emit all steps and stores; the stores under a condition, if there is one."""
        self.steps()
        with when(condition):
            for number, store in enumerate(self.lanes.space.stores):
                self._store(number, store)

    def steps(self) -> None:
        """Emit all steps.

        What replaces elements beyond a tensor is in the registers before a vector is loaded.
        """
        paddings = paddings_of(self.lanes.space)
        for step in self.lanes.space.steps:
            if isinstance(step, Value) and step.var in self._padded:
                self.give(step.var, self._padded[step.var])
            elif isinstance(step, Value):
                self._value(step)
            else:
                self._read(step, paddings.get(step.var))

    def value(self, expression: tirx.Expr, lane: int) -> tirx.Expr:
        """An expression of the steps' variables in one lane."""
        return substitute(expression, self._names[lane])

    def _value(self, step: Value) -> None:
        """Define a value: in place where it is used once, else in a register.

        TVM would inline a mere binding into every use.
        """
        values = [substitute(step.expression, names) for names in self._names]
        if not step.is_partial and self.lanes.space.uses_of(step.var) < 2:
            self.give(step.var, values)
            return
        count = self.lanes.vector if step.var in self.lanes.varying else 1
        register = T.alloc_buffer((count,), step.var.ty.dtype, scope="local")
        for k, names in enumerate(self._names[:count]):
            with when(*(substitute(guard, names) for guard in step.guards)):
                T.buffer_store(register, values[k], [k])
        self.give(step.var, [register[k % count] for k in range(self.lanes.vector)])

    def _read(self, step: Read, padding: Value | None) -> None:
        kind = self.lanes.kinds[step.var]
        if self.fetch is not None:
            replaced = [self.fetch(step, names) for names in self._names]
            found = [value for value in replaced if value is not None]
            if found:
                self.give(step.var, found)
                return
        view = self.views.row(step.buffer)
        if kind == "vector" and view is not None:
            self.give(step.var, self._load_vector(step, view, padding))
            return
        if kind == "uniform":
            value = self.views.load(step, self._position(step.var, step, 0), self._names[0])
            self.give(step.var, [_once(step, value)] * self.lanes.vector)
            return
        values = []
        for lane, names in enumerate(self._names):
            value = self.views.load(step, self._position(step.var, step, lane), names)
            values.append(_once(step, value))
        self.give(step.var, values)

    def _position(self, name: object, access: Read | Store, lane: int) -> tirx.Expr:
        """Row-major position of an access in one lane."""
        space, names = self.lanes.space, self._names[lane]
        is_contiguous = name in self.lanes.contiguous and not self.lanes.is_aligned
        linear = space.linear(access) if is_contiguous else None
        if linear is None or self.first is None:
            return substitute(space.position(access), names)
        # It is the number of the point plus a constant: no division is needed.
        return self.first + i64(lane) + substitute(linear[1], names)

    def _load_vector(self, step: Read, view: tirx.Buffer, padding: Value | None) -> list[tirx.Expr]:
        vector = self.lanes.vector
        register = T.alloc_buffer((vector,), view.dtype, scope="local")
        if padding is not None and view.dtype == step.buffer.dtype:
            for k in range(vector):
                T.buffer_store(register, padding.expression.args[2], [k])
            self._padded[padding.var] = [register[k] for k in range(vector)]
        with when(*(substitute(guard, self._names[0]) for guard in step.guards)):
            index = T.bind(self._position(step.var, step, 0))
            load_vector(register, view, index)
        return [_value(register[k], step) for k in range(vector)]

    def _store(self, number: int, store: Store) -> None:
        vector = self.lanes.vector
        values = [substitute(store.value, names) for names in self._names]
        view = self.views.row(store.buffer)
        if self.lanes.kinds[number] != "vector" or view is None or vector == 1:
            for lane, (value, names) in enumerate(zip(values, self._names, strict=True)):
                self.views.store(store, self._position(number, store, lane), names, value)
            return
        register = hold(values, view.dtype)
        store_vector(register, view, T.bind(self._position(number, store, 0)))


def paddings_of(space: IterationSpace) -> dict[tirx.Var, Value]:
    """The values that are a read where it exists, and else a number, by the read's variable."""
    reads = {step.var: step for step in space.steps if isinstance(step, Read)}
    paddings = {}
    for step in space.steps:
        if not isinstance(step, Value) or not is_if_then_else(step.expression):
            continue
        condition, inside, outside = step.expression.args
        read = reads.get(inside) if isinstance(inside, tirx.Var) else None
        is_number = isinstance(outside, tirx.IntImm | tirx.FloatImm)
        if read is None or not is_number or space.uses_of(read.var) > 1:
            continue
        if tvm_ffi.structural_equal(list(read.guards), [*step.guards, condition]):
            paddings[read.var] = step
    return paddings


def write_points(lanes: Lanes, views: Views, start: tirx.Expr) -> None:
    """Emit the vector with the number ``start`` where it exists, and the rest at the end."""
    space, vector = lanes.space, lanes.vector
    size = i64(space.size)
    if lanes.is_aligned or vector == 1:
        with when(start * i64(vector) < size):
            PointWriter.at(lanes, views, start).write()
        return
    first = T.bind(start * i64(vector))
    with when(first + i64(vector) <= size):
        PointWriter.at(lanes, views, start).write()
    known = constant(size)
    if known is not None and known % vector == 0:
        return
    single = classify(space, 1)
    with when(first < size, size < first + i64(vector)):
        with T.serial(i64(0), i64(vector - 1)) as k:
            with when(first + k < size):
                PointWriter.at(single, views, first + k).write()


def _value(loaded: tirx.Expr, step: Read) -> tirx.Expr:
    """A loaded value in the type of the tensor."""
    is_bool = str(step.buffer.dtype) == "bool"
    return tirx.NE(loaded, tirx.const(0, "uint8")) if is_bool else loaded


def _once(step: Read, value: tirx.Expr) -> tirx.Expr:
    """Load a value once, where it certainly exists; TVM cannot bind bfloat16 everywhere."""
    return value if step.guards or str(value.ty.dtype) == "bfloat16" else T.bind(value)


def _places(lanes: Lanes, start: tirx.Expr) -> list[list[tirx.Expr]]:
    """Subscripts of each lane of a vector."""
    space, vector = lanes.space, lanes.vector
    if not space.axes:
        return [[] for _ in range(vector)]
    if not lanes.is_aligned:
        points = [start * i64(vector) + i64(k) for k in range(vector)]
        return [_bound(unravel(point, space.extents, is_natural=True)) for point in points]
    last = constant(space.extents[-1])
    assert last is not None, "vectors are aligned to constant extents"
    extents: list[Extent] = [*space.extents[:-1], last // vector]
    *outer, inner = _bound(unravel(start, extents, is_natural=True))
    return [[*outer, inner * i64(vector) + i64(k)] for k in range(vector)]


def _bound(places: Sequence[tirx.Expr]) -> list[tirx.Expr]:
    return [place if constant(place) is not None else T.bind(place) for place in places]
