# SPDX-License-Identifier: Apache-2.0
"""Common parts of the nests of coalesced reductions: tasks, parts of the reduced loops, steps.

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

from schedules.tir.extents import Extent, constant, unravel
from schedules.tir.index_math import i64

from ..core.kernel_builder import KernelBuilder
from ..core.tiles import Index, Span
from ..nests.loop_transforms import SERIAL_ELEMENTS
from .source import Axis, Indices, ReduceSource
from .vector_states import REPEATABLE, States, vector


@dataclass(frozen=True)
class Split:
    """Distribution of the work.

    Parameters
    ----------
    threads : bool
        Whether there is enough work for threads.
    parts : int
        Contiguous parts of the reduced loop ``axis``, each with its own states.
    axis : int
        Position among the reduced loops.
    """

    threads: bool
    parts: int = 1
    axis: int = 0


class ReductionNest:
    """A function under construction that computes one reduction.

    Parameters
    ----------
    source : ReduceSource
        The reduction.
    split : Split
        Distribution of the work.
    """

    def __init__(self, source: ReduceSource, split: Split) -> None:
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
        states: States,
        first: Index,
        lanes: int,
        indices: Callable[[Index], Indices],
        since: int = 0,
    ) -> None:
        """Combine a vector of states with a vector of elements.

        Parameters
        ----------
        states : States
            The array that holds them.
        first : Index
            The state of lane 0.
        lanes : int
            Number of lanes; not more than there is room for.
        indices : Callable
            From a lane to the indices of its element.
        since : int
            The first lane that is not masked off.
        """
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
