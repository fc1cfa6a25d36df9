# SPDX-License-Identifier: Apache-2.0
"""Common parts of the nests of reductions: states, tasks, parts of the reduced loops, steps.

A :class:`States` is a small buffer for each field, of scope ``global``: that is what TVM 0.27 puts
on the stack, where LLVM turns it into registers as long as all subscripts are constant. The
functions here may only be called between the ``with`` statements of an open ``IRBuilder``.

Where outputs are few, the reduced loops are cut into ``parts`` contiguous parts. Their number comes
from the target and not from the running threads, and their states are combined in order of their
position, so that results are bitwise equal for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.cpu.core.kernel_builder import KernelBuilder
from schedules.cpu.core.tiles import Index, Span
from schedules.cpu.nests.loop_transforms import SERIAL_ELEMENTS
from schedules.tir.extents import Extent, constant, unravel
from schedules.tir.float_bits import nan_by_bits
from schedules.tir.index_math import i64
from schedules.workload.reduce import ReduceWorkload
from schedules.workload.reduce_operator import State, combine, field_dtypes, identity

from .source import Axis, Indices, ReduceSource

REPEATABLE = ("min", "max", "and", "or", "argmin", "argmax")
"""Operators whose result does not change when an element counts twice."""

MOST_UNROLLED = 16
"""Vectors of states that are kept in registers, or nearly so."""


@contextmanager
def vector(lanes: int) -> Iterator[Index]:
    """A vectorised loop over ``lanes`` lanes; none for one lane."""
    if lanes == 1:
        yield i64(0)
    else:
        with T.vectorized(0, i64(lanes)) as lane:
            yield lane


@contextmanager
def count(extent: Index) -> Iterator[Index]:
    """A serial loop, or none where it runs exactly once."""
    if isinstance(extent, int) and extent == 1:
        yield i64(0)
    else:
        with T.serial(0, i64(extent)) as variable:
            yield variable


@contextmanager
def unrolled(extent: int) -> Iterator[Index]:
    """An unrolled loop, or none where it runs exactly once."""
    if extent == 1:
        yield i64(0)
    else:
        with T.unroll(0, i64(extent)) as variable:
            yield variable


class States:
    """An array of states."""

    def __init__(
        self,
        workload: ReduceWorkload,  # Gives the operator and the types.
        size: Index,  # Number of states.
        position_dtype: str,  # Type of the positions of ``argmin`` and ``argmax``.
    ) -> None:
        self.workload = workload
        self.dtypes = (field_dtypes(workload)[0], position_dtype)[: len(field_dtypes(workload))]
        self.fields = [T.sblock_alloc_buffer((i64(size),), dtype) for dtype in self.dtypes]

    def load(self, at: Index) -> State:
        """One state."""
        return tuple(field[at] for field in self.fields)

    def store(self, at: Index, state: State) -> None:
        """Write one state, which must not be read from a place that this overwrites."""
        for field, value in zip(self.fields, state, strict=True):
            T.buffer_store(field, value, [at])

    def update(self, at: Index, state: State) -> None:
        """Combine one state with another."""
        self._replace(at, _combine(self.workload, self.load(at), state))

    def advance(self, number: Index, state: State) -> None:
        """Combine one state with that of an element after all that it has seen."""
        if len(state) == 1:
            self.update(number, state)
            return
        old = self.load(number)
        stays = state[0] <= old[0] if self.workload.operator == "argmax" else state[0] >= old[0]
        stays = _unless_nan(old[0], stays, tirx.const(True, "bool"))
        pairs = zip(old, state, strict=True)
        self._replace(number, tuple(tirx.Select(stays, mine, other) for mine, other in pairs))

    def _replace(self, at: Index, state: State) -> None:
        if len(state) > 1:  # each field depends on both old ones
            state = tuple(T.Bind(value) for value in state)
        self.store(at, state)

    def clear(self, size: int, lanes: int) -> None:
        """Set the first ``size`` states, a multiple of ``lanes``, to the initial state."""
        vectors = size // lanes
        repeat = unrolled if vectors <= MOST_UNROLLED else count
        with repeat(vectors) as part, vector(lanes) as lane:
            self.store(part * lanes + lane, self.nothing())

    def nothing(self) -> State:
        """The initial state, that of no elements."""
        return (identity(self.workload)[0], *map(tirx.max_value, self.dtypes[1:]))

    def merge(self, other: States, size: int, lanes: int) -> None:
        """Combine the first ``size`` states with those of another array, and clear the latter."""
        with unrolled(size // lanes) as part, vector(lanes) as lane:
            self.update(part * lanes + lane, other.load(part * lanes + lane))
        other.clear(size, lanes)

    def fold(self, size: int, lanes: int) -> None:
        """Combine the first ``size`` states, vectors of ``lanes``, into the first vector."""
        vectors = size // lanes
        while vectors > 1:
            half = vectors // 2
            with unrolled(half) as part, vector(lanes) as lane:
                at = part * lanes + lane
                self.update(at, self.load(at + (vectors - half) * lanes))
            vectors -= half

    def fold_lanes(self, lanes: int) -> None:
        """Combine the first ``lanes`` states, a power of two, into the first one."""
        while lanes > 1:
            lanes //= 2
            with vector(lanes) as lane:
                self.update(lane, self.load(lane + lanes))


def _combine(workload: ReduceWorkload, mine: State, other: State) -> State:
    """Combine as :func:`.reduce_operator.combine` does, in operations that vectors have."""
    if workload.operator in ("min", "max"):
        a, b = mine[0], other[0]
        wins = a > b if workload.operator == "max" else a < b  # one instruction, gives b for NaN
        return (_unless_nan(a, tirx.Select(wins, a, b), a),)
    both = combine(workload, mine, other)
    return tuple(map(nan_by_bits, both))


def _unless_nan(tested: tirx.Expr, value: tirx.Expr, otherwise: tirx.Expr) -> tirx.Expr:
    """``otherwise`` where ``tested`` is NaN."""
    dtype = str(tested.ty.dtype)
    if "float" not in dtype:
        return value
    return tirx.Select(tested <= tirx.infinity(dtype), value, otherwise)


@dataclass(frozen=True)
class Split:
    """Distribution of the work."""

    threads: bool  # Whether there is enough work for threads.
    parts: int = 1  # Contiguous parts of the reduced loop ``axis``, each with its own states.
    axis: int = 0  # Position among the reduced loops.


class ReductionNest:
    """A function under construction that computes one reduction."""

    def __init__(
        self,
        source: ReduceSource,
        split: Split,  # Distribution of the work.
    ) -> None:
        self.source, self.split = source, split
        self.builder = KernelBuilder(source.func)
        self.held: tirx.Buffer | None = None

    @contextmanager
    def tasks(self, number: Index, elements: int | None = None) -> Iterator[Index]:
        """A loop over pieces of work, parallel if that pays off, for ``elements`` in all."""
        is_little = elements is not None and elements < SERIAL_ELEMENTS
        loop = T.parallel if self.split.threads and not is_little else T.serial
        with loop(0, i64(number)) as task:
            with T.sblock("task"):
                T.reads()
                T.writes()
                yield task

    def states(self, size: Index) -> States:
        """States for the open block."""
        return States(self.source.registers, size, self.source.position_dtype)

    def hold(self, lanes: int) -> None:
        """Make room for the elements of one vector, in the open block."""
        self.held = T.sblock_alloc_buffer((i64(lanes),), self.source.registers.acc_dtype)

    def step(
        self,
        states: States,  # The array that holds them.
        first: Index,  # The state of lane 0.
        lanes: int,  # Number of lanes; not more than there is room for.
        indices: Callable[[Index], Indices],  # Function from a lane to the indices of its element.
        since: int = 0,  # The first lane that is not masked off.
    ) -> None:
        """Combine a vector of states with a vector of elements."""
        assert self.held is not None, "hold() has not been called"
        # Two loops, since TVM would move a buffer that one loop alone uses into this loop.
        with vector(lanes) as lane:
            value = self.source.element_at(indices(lane), self.builder.flat)
            T.buffer_store(self.held, value, [lane])
        with vector(lanes) as lane:
            value = self.held[lane]
            if since and self.source.workload.operator not in REPEATABLE:
                value = tirx.Select(lane >= i64(since), value, states.nothing()[0])
            position = [self.source.position(indices(lane))] if len(states.fields) > 1 else []
            states.advance(first + lane, (value, *position))

    def write(self, state: Sequence[tirx.Expr], indices: Indices) -> None:
        """Store the output of a complete state."""
        state = self.source.complete(tuple(state))
        value = self.source.result_at(state, indices, self.builder.flat)
        T.buffer_store(self.builder.flat[-1], value, [self.source.output_index(indices)])

    @property
    def partial_states(self) -> int | None:
        """Number of states of all parts; None where it is symbolic."""
        return constant(self.source.outputs * self.split.parts)

    def span(self, position: int, part: Index) -> Span:
        """Bounds of a reduced loop in one part."""
        extent = self.source.reduced[position].extent
        if self.split.parts == 1 or position != self.split.axis:
            return 0, extent
        return share(extent, part, self.split.parts)


def share(extent: Extent, part: Index, parts: int) -> Span:
    """Bounds of one of ``parts`` parts of a loop, as equal as possible."""
    return (
        tirx.floordiv(i64(extent) * part, parts),
        tirx.floordiv(i64(extent) * (part + 1), parts),
    )


def places(axes: Sequence[Axis], index: Index) -> dict[tirx.Var, tirx.Expr]:
    """The variables of loops at a position of the one loop that they form."""
    subscripts = unravel(i64(index), [axis.extent for axis in axes])
    return {axis.var: place for axis, place in zip(axes, subscripts, strict=True)}


def width(span: Span) -> Index:
    """Number of iterations of a loop with these bounds."""
    start, stop = span
    return stop if constant(start) == 0 else stop - start
