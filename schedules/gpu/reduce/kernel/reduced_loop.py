# SPDX-License-Identifier: Apache-2.0
"""A thread's share of the reduced loop: vectors of elements, several loaded at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.core.vector_loads import Narrow, Value, VectorLoads
from schedules.tir.branch import when
from schedules.tir.extents import constant
from schedules.tir.index_math import ceildiv, i64, simplified
from schedules.workload.reduce_operator import state_of_one

from ..plan.group import ElementOutput, ReductionStage
from . import state_buffers
from .context import ReduceContext
from .state_buffers import Buffers
from .stepped_position import SteppedPosition

_PEELED = 2  # reductions of one pass, beyond which the registers of a turn before the loop spill

PutInto = Callable[[tirx.Expr, int], tirx.Expr]  # from the value of a lane, and its number


@dataclass(frozen=True)
class LoadedVector:
    """Values of neighbouring elements, after their loads.

    Parameters
    ----------
    n, stepped : tirx.Expr
        Position of lane 0 in the reduced loop; the same by the digits of a
        :class:`~.stepped_position.SteppedPosition`, if there is one.
    lane : Callable
        From a lane to its values.
    size : int
        Number of lanes.
    narrow : Callable
        From an int64 index that depends on ``stepped`` to a cheaper one.
    number : int
        Number of the vector among those that a thread keeps.
    """

    n: tirx.Expr
    stepped: tirx.Expr
    lane: Callable[[int], list[tirx.Expr]]
    size: int
    narrow: Narrow = lambda index: index
    number: int = 0


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
        # Without a condition, of which TVM would derive bounds anew wherever the result is used.
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
