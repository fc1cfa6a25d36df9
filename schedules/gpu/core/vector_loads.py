# SPDX-License-Identifier: Apache-2.0
"""Wide loads for expressions whose reads run along neighbouring elements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tvm_ffi
from tvm import DataType, ir, tirx
from tvm.ir import Range
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from schedules.tir.expression_walk import is_if_then_else, loads, nodes, substitute, uses
from schedules.tir.extents import constant
from schedules.tir.index_math import INT32_END, i64, ravel, volume

from .lane_run import LaneRun
from .machine import GPUInfo
from .machine_costs import COSTS

Value = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
Flat = Callable[[tirx.Buffer], tirx.Buffer | None]
Narrow = Callable[[tirx.Expr], tirx.Expr]
Views = TypeVar("Views", bound="FlatViews")


@dataclass(frozen=True)
class Register:
    """Loaded value of a read.

    Parameters
    ----------
    load : ir.TensorLoad
        The read for lane 0.
    buffer : tirx.Buffer
        One element, or one for each lane.
    is_vector : bool
        Whether it is one for each lane.
    """

    load: ir.TensorLoad
    buffer: tirx.Buffer
    is_vector: bool

    def at(self, lane: int) -> tirx.Expr:
        """The element of a lane."""
        return _of_type(self.load, self.buffer[lane if self.is_vector else 0])


class VectorLoads:
    """Reads of each ``value(m, n)`` for a vector of neighbouring ``m`` or ``n``.

    A read whose address grows by one element a lane becomes one load of ``vector`` elements into
    registers, one whose address stays the same becomes a scalar, all others stay as they are.

    Parameters
    ----------
    values : Sequence[Callable]
        Each from two int64 indices to the expression there.
    along_m : bool
        Whether lanes are neighbours in ``m``, else in ``n``.
    vector : int
        Number of lanes, a power of two; the index of lane 0 is a multiple of it.
    results : Collection[tirx.Var]
        Variables that are not known yet where the loads are emitted.
    keep : bool
        Whether values read by only one lane also go to registers, because they are reused.
    """

    def __init__(
        self,
        values: Sequence[Value],
        along_m: bool,
        vector: int,
        results: Collection[tirx.Var] = (),
        keep: bool = False,
    ):
        self.values = values
        self.along_m = along_m
        self.vector = vector
        self.results = results
        self.keep = keep
        self._m, self._n = (tirx.Var(name, "int64") for name in ("m", "n"))
        self.kinds, self._places = self._classify()

    def fetch(
        self,
        m: tirx.Expr,
        n: tirx.Expr,
        flat: Flat,
        known: list[Register] | None = None,
        narrow: Narrow | None = None,
    ) -> Callable[[int], list[tirx.Expr]]:
        """Emit the loads of one vector.

        Parameters
        ----------
        m, n : tirx.Expr
            Position of lane 0.
        flat : Callable
            Function from a parameter to its one-dimensional view, or None if it has none.
        known : list[Register] | None
            Registers loaded at this position before; the new ones are appended.
        narrow : Callable | None
            Function that makes an int64 index into a view cheaper; None leaves the indices to TVM.

        Returns
        -------
        Callable
            From a lane to its expressions on the loaded registers.
        """
        registers = [] if known is None else known
        chosen: list[Register | None] = []
        reads = zip(loads(*self._at(m, n)), self.kinds, self._places, strict=True)
        for load, kind, place in reads:
            register = next((entry for entry in registers if _same(entry.load, load)), None)
            if register is None and kind != "each":
                index = self._index(load, place, m, n)
                index = index if narrow is None else narrow(index)
                register = self._load(load, kind, flat, index)
                if register is not None:
                    registers.append(register)
            chosen.append(register)

        def lane(k: int) -> list[tirx.Expr]:
            expressions = self._at(m, n, tirx.const(k, "int64"))
            pairs = list(zip(loads(*expressions), chosen, strict=True))

            def replace(load: ir.TensorLoad) -> tirx.Expr:
                for original, register in pairs:
                    if register is not None and _same(original, load):
                        return register.at(k)
                view = flat(load.source) if narrow is not None else None
                if narrow is None or view is None:
                    return load
                return _of_type(load, view[narrow(_position(load))])

            return [
                tvm_ffi.structural_map(expression, (ir.TensorLoad, replace))
                for expression in expressions
            ]

        return lane

    def _at(self, m: tirx.Expr, n: tirx.Expr, lane: tirx.Expr | None = None) -> list[tirx.Expr]:
        if lane is not None:
            m, n = (m + lane, n) if self.along_m else (m, n + lane)
        return [value(m, n) for value in self.values]

    def _classify(self) -> tuple[list[str], list[tirx.Expr | None]]:
        """Kind of each read: ``vector``, ``uniform`` or ``each``; and a simpler position.

        That is a function of ``m`` and ``n``, None where the subscripts are as simple.
        """
        run = LaneRun(self.vector)
        m, n = run.place(self.along_m)
        first, moved = loads(*self._at(m, n)), loads(*self._at(m, n, run.lane))
        guarded = _guarded_loads(self._at(m, n))
        kinds: list[str] = []
        places: list[tirx.Expr | None] = []
        end = (m + run.lane, n) if self.along_m else (m, n + run.lane)
        for a, b, simple in zip(first, moved, self._simple_places(), strict=True):
            has_division = bool(nodes(simple, tirx.FloorDiv, tirx.FloorMod))
            place = None if has_division else simple
            fixed = not any(loads(index) or uses(index, *self.results) for index in a.indices)
            if not fixed or any(a.same_as(load) for load in guarded):
                kind = "each"
            elif self.vector == 1:
                kind = "uniform" if self.keep else "each"
            else:
                kind = run.kind(self._index(a, place, m, n), self._index(b, place, *end))
                if kind == "each" and has_division:
                    place = simple
                    kind = run.kind(self._index(a, place, m, n), self._index(b, place, *end))
            kinds.append(kind)
            places.append(place)
        return kinds, places

    def _index(
        self, load: ir.TensorLoad, place: tirx.Expr | None, m: tirx.Expr, n: tirx.Expr
    ) -> tirx.Expr:
        """Position of a read at ``(m, n)``, by its ``place`` if there is one."""
        return _position(load) if place is None else substitute(place, {self._m: m, self._n: n})

    def _simple_places(self) -> list[tirx.Expr]:
        """Position of each read at ``m`` and ``n``, simplified.

        Neighbouring axes are merged here. Of a vector they are not: its subscripts are divided one
        by one by extents with a common factor, after which TVM no longer sees that they are
        consecutive.
        """
        analyzer = _analyzer_of(self._m, self._n)
        return [analyzer.simplify(_position(load)) for load in loads(*self._at(self._m, self._n))]

    def _load(
        self, load: ir.TensorLoad, kind: str, flat: Flat, index: tirx.Expr
    ) -> Register | None:
        source = flat(load.source)
        if source is None:
            return None
        lanes = self.vector if kind == "vector" else 1
        register = T.alloc_buffer((lanes,), source.dtype, scope="local")
        if lanes == 1:
            T.buffer_store(register, source[index], [0])
            return Register(load, register, False)
        load_vector(register, source, index)
        return Register(load, register, True)


def store_lanes(
    values: Sequence[tirx.Expr],
    view: tirx.Buffer,
    place: Value,
    at: tuple[tirx.Expr, tirx.Expr],
    along_m: bool,
    narrow: Narrow,
) -> None:
    """Store values of neighbouring ``m`` or ``n``, as one vector if they are neighbours in memory.

    Parameters
    ----------
    values : Sequence[tirx.Expr]
        Values of all lanes, of which there are a power of two.
    view : tirx.Buffer
        Destination, as one row.
    place : Callable
        Position at ``(m, n)``, both int64.
    at : tuple[tirx.Expr, tirx.Expr]
        ``m`` and ``n`` of lane 0.
    along_m : bool
        Whether lanes are neighbours in ``m``, else in ``n``.
    narrow : Callable
        Function that makes an int64 position cheaper.
    """
    m, n = (tirx.Var(name, "int64") for name in ("m", "n"))
    simple = _analyzer_of(m, n).simplify(place(m, n))

    def merged(at_m: tirx.Expr, at_n: tirx.Expr) -> tirx.Expr:
        return substitute(simple, {m: at_m, n: at_n})

    def lane(position: Value, first: tuple[tirx.Expr, tirx.Expr], k: tirx.Expr) -> tirx.Expr:
        return position(first[0] + k, first[1]) if along_m else position(first[0], first[1] + k)

    has_division = bool(nodes(simple, tirx.FloorDiv, tirx.FloorMod))
    run = LaneRun(len(values))
    for position in (place, merged) if has_division else (merged,):
        first = run.place(along_m)
        kind = run.kind(position(*first), lane(position, first, run.lane))
        if len(values) > 1 and kind == "vector":
            store_vector(hold(values, view.dtype), view, narrow(position(*at)))
            return
    for k, value in enumerate(values):
        T.buffer_store(view, value.astype(view.dtype), [narrow(lane(position, at, i64(k)))])


def _analyzer_of(*indices: tirx.Var) -> Analyzer:
    """Analyzer that knows that indices are not negative."""
    analyzer = Analyzer()
    for index in indices:
        analyzer.bind(index, Range.from_min_extent(i64(0), i64(1 << 40)))
    return analyzer


def flat_view(buffer: tirx.Buffer) -> tirx.Buffer:
    """A parameter as one row, to be declared inside the launch; bool, without vectors, as bytes.

    Its extent is an int32 where that has room for it: TVM gives indices the type of the extent.
    """
    dtype = "uint8" if str(buffer.dtype) == "bool" else buffer.dtype
    size = volume(buffer.shape)
    known = constant(size)
    if known is not None and known < INT32_END:
        size = tirx.const(known, "int32")
    return T.decl_buffer((size,), dtype, data=buffer.data)


@dataclass(frozen=True)
class FlatViews:
    """Parameters as one row each, by which vectors are loaded and stored."""

    rows: tuple[tuple[tirx.Buffer, tirx.Buffer], ...]

    @classmethod
    def declare(cls: type[Views], func: tirx.PrimFunc, gpu: GPUInfo) -> Views:
        """Declare them, inside the kernel; TVM loses those of a type that the GPU lacks."""
        kept = [
            param
            for param in func.params
            if isinstance(param.ty, tirx.BufferType)
            and (gpu.has_bfloat16 or str(param.dtype) != "bfloat16")
        ]
        return cls(tuple((param, flat_view(param)) for param in kept))

    def row(self, buffer: tirx.Buffer) -> tirx.Buffer | None:
        """A parameter as one row; None if it has no view."""
        return next((view for known, view in self.rows if known.same_as(buffer)), None)


def load_vector(register: tirx.Buffer, source: tirx.Buffer, place: tirx.Expr) -> None:
    """Load neighbouring elements of a flat view by as few instructions as there can be."""
    for start, width in _parts(int(register.shape[0]), source):
        with T.vectorized(0, width) as k:
            element = source[place + (k + start).astype(place.ty.dtype)]
            T.buffer_store(register, element, [k + start])


def hold(values: Sequence[tirx.Expr], dtype: str) -> tirx.Buffer:
    """Put values of some type into registers."""
    register = T.alloc_buffer((len(values),), dtype, scope="local")
    for k, value in enumerate(values):
        T.buffer_store(register, value.astype(dtype), [k])
    return register


def store_vector(register: tirx.Buffer, target: tirx.Buffer, place: tirx.Expr) -> None:
    """Store neighbouring elements of a flat view by as few instructions as there can be."""
    for start, width in _parts(int(register.shape[0]), target):
        with T.vectorized(0, width) as k:
            at = place + (k + start).astype(place.ty.dtype)
            T.buffer_store(target, register[k + start], [at])


def _parts(lanes: int, buffer: tirx.Buffer) -> list[tuple[int, int]]:
    """Begin and width of the instructions for ``lanes`` elements."""
    width = min(lanes, COSTS.widest_load * 8 // DataType(str(buffer.dtype)).bits)
    return [(start, width) for start in range(0, lanes, width)]


def _guarded_loads(expressions: Sequence[tirx.Expr]) -> list[ir.TensorLoad]:
    """The reads that must not happen for every element."""
    calls = (call for expression in expressions for call in nodes(expression, ir.Call))
    return loads(*filter(is_if_then_else, calls))


def _position(load: ir.TensorLoad) -> tirx.Expr:
    return ravel(load.indices, load.source.shape)


def _of_type(load: ir.TensorLoad, element: tirx.Expr) -> tirx.Expr:
    """An element of a view as the read of the parameter gives it."""
    return element != 0 if str(load.ty.dtype) == "bool" else element


def _same(a: ir.TensorLoad, b: ir.TensorLoad) -> bool:
    return a.same_as(b) or tvm_ffi.structural_equal(a, b)
