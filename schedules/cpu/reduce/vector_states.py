# SPDX-License-Identifier: Apache-2.0
"""States of a reduction in vector registers, written into a function under construction.

A :class:`States` is a small buffer for each field, of scope ``global``: that is what TVM 0.27 puts
on the stack, where LLVM turns it into registers as long as all subscripts are constant. The
functions here may only be called between the ``with`` statements of an open ``IRBuilder``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.index_math import i64
from schedules.workload.reduce import ReduceWorkload
from schedules.workload.reduce_operator import State, combine, field_dtypes, identity

from ...tir.keep_nan import nan_by_bits
from ..core.tiles import Index

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
    """An array of states.

    Parameters
    ----------
    workload : ReduceWorkload
        Gives the operator and the types.
    size : Index
        Number of states.
    position_dtype : str
        Type of the positions of ``argmin`` and ``argmax``.
    """

    def __init__(self, workload: ReduceWorkload, size: Index, position_dtype: str) -> None:
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

    def advance(self, at: Index, state: State) -> None:
        """Combine one state with that of an element after all that it has seen."""
        if len(state) == 1:
            self.update(at, state)
            return
        old = self.load(at)
        stays = state[0] <= old[0] if self.workload.operator == "argmax" else state[0] >= old[0]
        stays = _unless_nan(old[0], stays, tirx.const(True, "bool"))
        pairs = zip(old, state, strict=True)
        self._replace(at, tuple(tirx.Select(stays, mine, other) for mine, other in pairs))

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
    """As :func:`schedules.workload.reduce_operator.combine`, in operations that vectors have."""
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
