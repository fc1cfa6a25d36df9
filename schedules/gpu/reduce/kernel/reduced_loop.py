# SPDX-License-Identifier: Apache-2.0
"""A thread's share of the reduced loop: vectors of elements, several loaded at once.

In the form R-P-R, whose reduced axes are no neighbours, an address follows from the quotient and
the remainder of the position and the inner extent. A thread divides once, where its share begins;
then it adds its stride to the digits of the position, in 32 bits, with a carry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Range
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from schedules.gpu.core.vector_loads import Narrow, Value, VectorLoads, store_lanes
from schedules.tir.extents import constant, size_of, unravel
from schedules.tir.index_math import INT32_END, ceildiv, i64, narrowed, simplified
from schedules.tir.statements import when
from schedules.workload.reduce_operator import state_of_one

from ..plan.group import ElementOutput, ReductionStage
from . import state_buffers
from .context import ReduceContext
from .state_buffers import Buffers


class SteppedPosition:
    """The digits of a thread's position, in vectors, the outermost first."""

    def __init__(
        self,
        extents: list[int],  # Extents of the digits.
        vector: int,  # Elements of a vector in the reduced loop.
    ):
        self._extents = extents
        self._vector = vector
        self._digits = [T.alloc_buffer((1,), "int32", scope="local") for _ in extents]
        self._analyzer = Analyzer()

    @classmethod
    def open(cls, ctx: ReduceContext) -> SteppedPosition | None:
        """The digits of the group's reduced loop; None if nothing has to be divided."""
        loops = ctx.group.reductions[0].loops
        vector = 1 if ctx.is_y else ctx.config.vector
        size = constant(size_of(loops.shape))
        if size is None or size >= INT32_END:
            return None
        extents = [int(extent) for kind, extent in loops.runs if kind == "R"]
        if len(extents) < 2 or extents[-1] % vector:
            return None
        return cls([*extents[:-1], extents[-1] // vector], vector)

    def start(self, n: tirx.Expr) -> None:
        """Divide the position of the first vector."""
        for digit, index in zip(self._digits, self._split(n // i64(self._vector)), strict=True):
            T.buffer_store(digit, index.astype("int32"), [0])

    def bind(self) -> tirx.Expr:
        """The position at this moment, whose subscripts need no division."""
        position: tirx.Expr = i64(0)
        for digit, extent in zip(self._digits, self._extents, strict=True):
            index = T.bind(digit[0].astype("int64"))
            self._analyzer.bind(index, Range.from_min_extent(i64(0), i64(extent)))
            position = position * i64(extent) + index
        return position * i64(self._vector)

    def advance(self, stride: int) -> None:
        """Add a stride, a multiple of the vector."""
        steps = [int(step) for step in self._split(tirx.const(stride // self._vector, "int64"))]
        carry = tirx.const(0, "int32")
        for number in range(len(steps) - 1, 0, -1):
            digit, step, extent = self._digits[number], steps[number], self._extents[number]
            moved = T.bind(digit[0] + tirx.const(step, "int32") + carry)
            end = tirx.const(extent, "int32")
            T.buffer_store(digit, tirx.Select(moved >= end, moved - end, moved), [0])
            carry = tirx.Select(moved >= end, tirx.const(1, "int32"), tirx.const(0, "int32"))
        first = self._digits[0]
        T.buffer_store(first, first[0] + tirx.const(steps[0], "int32") + carry, [0])

    def narrow(self, index: tirx.Expr) -> tirx.Expr:
        """An index that depends on the position, in 32 bits."""
        return narrowed(self._analyzer.simplify(index), self._analyzer)

    def _split(self, vectors: tirx.Expr) -> list[tirx.Expr]:
        return [self._analyzer.simplify(index) for index in unravel(vectors, self._extents)]


_PEELED = 2  # reductions of one pass, beyond which the registers of a turn before the loop spill

PutInto = Callable[[tirx.Expr, int], tirx.Expr]  # Takes the value of a lane, and its number.


@dataclass(frozen=True)
class LoadedVector:
    """Values of neighbouring elements, after their loads."""

    n: tirx.Expr
    stepped: tirx.Expr
    """``n`` and ``stepped``: position of lane 0 in the reduced loop; the same by the digits of a
    :class:`SteppedPosition`, if there is one."""
    lane: Callable[[int], list[tirx.Expr]]  # Function from a lane to its values.
    size: int  # Number of lanes.
    narrow: Narrow = lambda index: index
    """Function that narrows an int64 index which depends on ``stepped``."""
    number: int = 0  # Number of the vector among those that a thread keeps.


Visit = Callable[[LoadedVector], None]


def as_it_is(value: tirx.Expr, _: int) -> tirx.Expr:
    """The value of a lane, into which nothing has to be put."""
    return value


def values_of(stage: ReductionStage, elements: Sequence[ElementOutput]) -> list[Value]:
    """Values of a pass over the data: those to reduce, then those to store."""
    reduced = [reduction.value for reduction in stage.reductions]
    return [*reduced, *(element.value for element in elements)]


def combine_vector(
    ctx: ReduceContext,
    stage: ReductionStage,
    states: Buffers,
    count: int,
    put_into: PutInto = as_it_is,
) -> Visit:
    """Function that combines the first values of each lane, after ``put_into``, into the states.

    There are ``count`` states of each reduction.
    """

    def visit(vector: LoadedVector) -> None:
        for k in range(vector.size):
            position = vector.n if ctx.is_y else vector.n + i64(k)
            values = [put_into(value, k) for value in vector.lane(k)[: len(stage.reductions)]]
            lifted = [
                state_of_one(workload, value, position)
                for workload, value in zip(stage.workloads, values, strict=True)
            ]
            state_buffers.append(stage.workloads, states, k % count, lifted)

    return visit


def visit_share(
    ctx: ReduceContext,
    values: Sequence[Value],
    visit: Visit,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Load the values at this thread's share of the reduced loop, and visit every vector.

    ``meanwhile`` is emitted between the first loads and their use, before them where that would
    take too many registers, or at the end where a share may be shorter than a turn of the loop.
    """
    config = ctx.config
    begin, count = _share(ctx)
    step = config.stride * config.unroll
    iterations = simplified(count // i64(step))
    loads = _loads(ctx, values, config.vector)
    stepped = SteppedPosition.open(ctx) if constant(iterations) != 0 else None
    if stepped is not None:
        stepped.start(_position(ctx, begin, loads))

    def turn(start: tirx.Expr, loaded: Callable[[], None] | None = None) -> None:
        starts = [start + i64(u * config.stride) for u in range(config.unroll)]
        positions = [T.bind(_position(ctx, s, loads)) for s in starts]
        _visit_all(ctx, loads, positions, visit, stepped, loaded)

    is_small = len(values) <= _PEELED
    is_long = _least_share(ctx) >= step
    peeled = meanwhile is not None and is_small and is_long
    if peeled:
        turn(begin, meanwhile)
    elif meanwhile is not None and is_long:
        meanwhile()
    first = begin + i64(step) if peeled else begin
    left = simplified(iterations - i64(1)) if peeled else iterations
    if constant(left) != 0:
        with T.serial(i64(0), left) as iteration:
            turn(first + iteration * i64(step))
    done = simplified(iterations * i64(step))
    if constant(simplified(count - done)) != 0:
        _tail(ctx, loads, begin + done, begin + count, visit)
    if meanwhile is not None and not is_long:
        meanwhile()


def _tail(
    ctx: ReduceContext, loads: VectorLoads, start: tirx.Expr, end: tirx.Expr, visit: Visit
) -> None:
    """The rest of the share, less than one step of the main loop, guarded."""
    config, reduced = ctx.config, constant(ctx.group.reduced)
    if not ctx.is_y and (reduced is None or reduced % config.vector != 0):
        loads = _loads(ctx, loads.values, 1)
        with T.serial(i64(0), ceildiv(simplified(end - start), config.lanes)) as iteration:
            _visit_guarded(ctx, loads, start + iteration * i64(config.lanes), end, visit)
        return
    # No loop, so that the compiler issues all loads at once.
    rest = constant(simplified(ceildiv(end - start, config.stride)))
    for number in range(config.unroll if rest is None else rest):
        _visit_guarded(ctx, loads, start + i64(number * config.stride), end, visit)


def _visit_guarded(
    ctx: ReduceContext, loads: VectorLoads, start: tirx.Expr, end: tirx.Expr, visit: Visit
) -> None:
    n = T.bind(_position(ctx, start, loads))
    with when(n < end):
        _visit_all(ctx, loads, [n], visit)


def _loads(ctx: ReduceContext, values: Sequence[Value], vector: int) -> VectorLoads:
    """Loads of vectors of elements; what is stored and reduced is read once for both."""
    group = ctx.group
    return VectorLoads(values, ctx.is_y, vector, group.results, keep=bool(group.elements))


def _least_share(ctx: ReduceContext) -> int:
    """Length of the shortest share of a block; zero where it is not known."""
    reduced, config = constant(ctx.group.reduced), ctx.config
    if reduced is None:
        return 0
    # Shares are whole strides, but for the last one, which may lack a part of one.
    return -(-reduced // config.stride) // config.splits * config.stride - -reduced % config.stride


def _share(ctx: ReduceContext) -> tuple[tirx.Expr, tirx.Expr]:
    """Begin and length of the block's part of the reduced loop.

    Shares are whole strides, and differ by one stride at most; the last one ends with the loop.
    """
    reduced, config = i64(ctx.group.reduced), ctx.config
    if config.splits == 1:
        return i64(0), reduced
    strides = ceildiv(ctx.group.reduced, config.stride)
    least = simplified(strides // i64(config.splits))
    longer = simplified(strides % i64(config.splits))  # number of blocks that take one more
    if constant(longer) == 0 and constant(simplified(reduced % i64(config.stride))) == 0:
        length = simplified(least * i64(config.stride))
        return ctx.split * length, length

    def first(block: tirx.Expr) -> tirx.Expr:
        # No condition is used: TVM would derive its bounds anew wherever the result is used.
        return (block * least + tirx.min(block, longer)) * i64(config.stride)

    begin = T.bind(first(ctx.split))
    end = T.bind(tirx.min(reduced, first(ctx.split + i64(1))))
    return begin, tirx.max(end - begin, i64(0))


def _position(ctx: ReduceContext, start: tirx.Expr, loads: VectorLoads) -> tirx.Expr:
    """Position of the thread's vector in the reduced loop."""
    return start + (ctx.row if ctx.is_y else ctx.lane * i64(loads.vector))


def _visit_all(
    ctx: ReduceContext,
    loads: VectorLoads,
    positions: list[tirx.Expr],
    visit: Visit,
    stepped: SteppedPosition | None = None,
    loaded: Callable[[], None] | None = None,
) -> None:
    """Load a vector at each position, emit ``loaded``, then visit all of them."""
    m, count = ctx.safe_output(), loads.vector
    vectors = []
    for n in positions:
        if stepped is None:
            vectors.append(LoadedVector(n, n, loads.fetch(m, n, ctx.flat), count))
        else:
            at = stepped.bind()
            lane = loads.fetch(m, at, ctx.flat, narrow=stepped.narrow)
            vectors.append(LoadedVector(n, at, lane, count, stepped.narrow))
            stepped.advance(ctx.config.stride)
    if loaded is not None:
        loaded()
    for vector in vectors:
        visit(vector)


def store_elements(
    ctx: ReduceContext,
    elements: Sequence[ElementOutput],  # What is stored.
    m: tirx.Expr,  # The row of lane 0.
    put_into: PutInto = as_it_is,  # Function that puts known results into the value of a lane.
    condition: tirx.Expr | None = None,  # When the thread stores anything; None for always.
) -> Visit:
    """Function that stores the elements of a vector: its values are the last ones of each lane."""

    def visit(vector: LoadedVector) -> None:
        lanes = [vector.lane(k)[-len(elements) :] for k in range(vector.size)]
        with when(condition):
            for number, element in enumerate(elements):
                values = [put_into(lane[number], k) for k, lane in enumerate(lanes)]
                _store(ctx, element, m, vector, values)

    return visit if elements else lambda _: None


def visit_twice(first: Visit, second: Visit) -> Visit:
    """Function that visits a vector twice."""

    def visit(vector: LoadedVector) -> None:
        first(vector)
        second(vector)

    return visit


def _store(
    ctx: ReduceContext,
    element: ElementOutput,
    m: tirx.Expr,
    vector: LoadedVector,
    values: Sequence[tirx.Expr],
) -> None:
    """Store a vector of elements."""
    view, at = ctx.flat(element.output), (m, vector.stepped)
    if view is not None:
        store_lanes(values, view, element.place, at, ctx.is_y, vector.narrow)
        return
    for k, value in enumerate(values):
        lane = (m + i64(k), at[1]) if ctx.is_y else (m, at[1] + i64(k))
        ctx.write(element.output, element.place(*lane), value)
