# SPDX-License-Identifier: Apache-2.0
"""GPU kernel of a group of coalesced reductions, for both ``cuda`` and ``opencl``.

In a chain a block processes its rows from the first reduction to the last; so does a cluster, each
block having a share of a row that is too long for one::

    for tile in blockIdx.x, row, lane in threadIdx.x:
        for each stage:
            states = identities
            for n in the row, vectors of elements:
                states = combine(states, values(m, n, results))
                elements[m, n] = f(m, n, results)         # those that are known by then
            states = combine over the row, for all of its threads, over the cluster if there is one
            results = finish(states); epilogues
        for n in the row, vectors of elements:
            elements[m, n] = f(m, n, results)             # the others

Where columns are summed, too, the threads of a row process a whole group of rows one after another,
each with its columns' sums in registers, and store them at the end.

A thread whose share of the row is small keeps its loads in registers, and its loops are unrolled.
Otherwise each stage reads the row again, from the cache.

Sisters, with or without epilogues::

    for tile in blockIdx.y, split in blockIdx.x:          # blockIdx.x alone if nothing is split
        for row, lane in threadIdx.x:
            states = identities
            for n in this split's share, unroll x vector elements at once:
                states = combine(states, values(m, n))    # loads first, 16 bytes each
                elements[m, n] = f(m, n)                  # if there are any
            states = combine over the block               # shuffles, shared memory
            finish                               # one_block, cluster, atomic or last_block

"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.core.intrinsics import current_stream
from schedules.gpu.core.kernel_function import resident_blocks, unless_empty, write_kernels
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS
from schedules.gpu.core.vector_loads import Register, Value, VectorLoads, store_lanes
from schedules.tir.extents import constant
from schedules.tir.index_math import ceildiv, i64
from schedules.tir.statements import when

from ..plan.config import ReduceConfig, blocks_at_once
from ..plan.group import ElementOutput, ReduceGroup, ReductionStage
from . import finishing, state_buffers
from .atomic_update import initialise_output
from .combine import (
    ClusterExchange,
    combine_lanes,
    combine_rows,
    share_lanes,
    share_leaders,
    share_rows,
)
from .context import ReduceContext, Results
from .reduced_loop import (
    LoadedVector,
    PutInto,
    Visit,
    combine_vector,
    store_elements,
    values_of,
    visit_share,
    visit_twice,
)

VisitRow = Callable[[Sequence[Value], Visit], None]


def write_chain(ctx: ReduceContext) -> None:
    """Emit all stages, then the stores of elements that use the last results."""
    if not ctx.group.columns:
        _write_row(ctx)
        return
    sums = _KeptSums(ctx)
    with T.serial(i64(0), i64(ctx.config.turns)) as turn:
        _write_row(replace(ctx, turn=turn), sums)
    sums.store()


def _write_row(ctx: ReduceContext, sums: _KeptSums | None = None) -> None:
    m = T.bind(ctx.safe_output())
    results = [Results(ctx, m + i64(k)) for k in range(ctx.results)]
    visit_row = _KeptRow(ctx, m).visit if ctx.config.kept else _read_again(ctx)
    exchange = ClusterExchange(ctx) if ctx.config.cluster > 1 else None
    group = ctx.group
    for number, stage in enumerate(group.stages):
        _reduce_stage(ctx, stage, group.elements_of(number), results, visit_row, exchange)
    last = group.elements_of(len(group.stages))
    with exchange.leaving() if exchange else nullcontext():
        if last or sums:
            with when(ctx.exists(ctx.first_output)):
                values = [columns.value for columns in group.columns]
                values += [element.value for element in last]
                visit = store_elements(ctx, last, m, _with_results(ctx, results))
                visit_row(values, visit_twice(sums.add(results), visit) if sums else visit)


def _reduce_stage(
    ctx: ReduceContext,
    stage: ReductionStage,
    elements: Sequence[ElementOutput],
    results: list[Results],
    visit_row: VisitRow,
    exchange: ClusterExchange | None,
) -> None:
    """Compute the results of a stage on all threads; the leaders store them."""
    workloads, count = stage.workloads, _accumulators(ctx, stage)
    states = state_buffers.allocate(workloads, count, "local")
    state_buffers.clear(workloads, states, count)
    put_into = _with_results(ctx, results)
    store = store_elements(ctx, elements, results[0].m, put_into, ctx.exists(ctx.first_output))
    visit = visit_twice(combine_vector(ctx, stage, states, count, put_into), store)
    state_buffers.begin_positions(workloads, states, count)
    visit_row(values_of(stage, elements), visit)
    state_buffers.end_positions(workloads, states, count)
    if ctx.is_y:
        share_rows(ctx, workloads, states)
    else:
        state_buffers.fold(workloads, states, count)
        share_lanes(ctx, workloads, states)
    if exchange:
        exchange.combine(workloads, states)
        share_leaders(ctx, workloads, states)
    for k, at_m in enumerate(results):
        at_m.add(stage, state_buffers.load(states, k))
    if any(result.output is not None for result in stage.results):
        first = ctx.first_output
        is_first = tirx.EQ(ctx.split, i64(0)) if exchange else None
        with when(ctx.is_leader, ctx.exists(first), is_first):
            for k, at_m in enumerate(results):
                at_m.write(stage, first + i64(k))


def _accumulators(ctx: ReduceContext, stage: ReductionStage) -> int:
    """States of each reduction in a thread, a power of two."""
    if ctx.is_y:
        return ctx.config.vector
    # Elements take most registers; states with positions are large.
    return 1 if any(workload.is_arg for workload in stage.workloads) else min(4, ctx.config.vector)


def _with_results(ctx: ReduceContext, results: list[Results]) -> PutInto:
    """Function that substitutes the known results into the value of a lane."""
    return lambda value, k: results[k if ctx.is_y else 0].put_into(value)


def _read_again(ctx: ReduceContext) -> VisitRow:
    return lambda values, visit: visit_share(ctx, values, visit)


class _KeptRow:
    """A row whose elements stay in the registers of its threads."""

    def __init__(self, ctx: ReduceContext, m: tirx.Expr):
        self.ctx = ctx
        self.m = m
        self.positions = [_kept_position(ctx, i) for i in range(ctx.config.kept)]
        self.known: list[list[Register]] = [[] for _ in self.positions]

    def visit(self, values: Sequence[Value], visit: Visit) -> None:
        """Visit the vectors of this thread; reads that they share with others are loaded once."""
        ctx = self.ctx
        loads = VectorLoads(values, ctx.is_y, ctx.config.vector, ctx.group.results, keep=True)
        lanes = [
            loads.fetch(self.m, n, ctx.flat, known)
            for (n, _), known in zip(self.positions, self.known, strict=True)
        ]
        for number, ((n, exists), lane) in enumerate(zip(self.positions, lanes, strict=True)):
            with when(exists):
                visit(LoadedVector(n, n, lane, ctx.config.vector, number=number))


class _KeptSums:
    """Sums of the columns that a thread keeps, over the rows of its group."""

    def __init__(self, ctx: ReduceContext):
        self.ctx = ctx
        size = ctx.config.kept * ctx.config.vector
        self.sums = [T.alloc_buffer((size,), "float32", scope="local") for _ in ctx.group.columns]
        for total in self.sums:
            for place in range(size):
                T.buffer_store(total, tirx.const(0, "float32"), [place])

    def add(self, results: list[Results]) -> Visit:
        """Function that adds the first values of each lane of a row with known results."""

        def visit(vector: LoadedVector) -> None:
            for k in range(vector.size):
                at = vector.number * vector.size + k
                for total, value in zip(self.sums, vector.lane(k), strict=False):
                    T.buffer_store(total, total[at] + results[0].put_into(value), [at])

        return visit

    def store(self) -> None:
        """Store the sums of the group of rows, if it exists."""
        ctx, config, reduced = self.ctx, self.ctx.config, i64(self.ctx.group.reduced)
        group = T.bind(ctx.tile * i64(config.rows) + ctx.row)
        with when(group < ceildiv(ctx.group.outputs, config.turns)):
            for number in range(config.kept):
                n, exists = _kept_position(ctx, number)
                with when(exists):
                    for columns, total in zip(ctx.group.columns, self.sums, strict=True):
                        first = number * config.vector
                        values = [total[first + k] for k in range(config.vector)]
                        view = ctx.flat(columns.output)
                        assert view is not None, "sums of columns are float32"
                        store_lanes(
                            values,
                            view,
                            lambda g, n: g * reduced + n,
                            (group, n),
                            False,
                            lambda index: index,
                        )


def _kept_position(ctx: ReduceContext, number: int) -> tuple[tirx.Expr, tirx.Expr | None]:
    """Position of a vector, clamped to the last one, and whether it exists; None if it does."""
    config = ctx.config
    step = config.stride * config.splits
    reduced, width = constant(ctx.group.reduced), 1 if ctx.is_y else config.vector
    assert reduced is not None, "rows of unknown extent are not kept"
    own = ctx.row if ctx.is_y else ctx.lane * i64(width)
    own = ctx.split * i64(config.stride) + own if config.splits > 1 else own
    place = T.bind(i64(number * step) + own)
    if (number + 1) * step <= reduced:
        return place, None
    return T.bind(tirx.min(place, i64(reduced - width))), place < i64(reduced)


_FINISHES = {
    "one_block": finishing.one_block,
    "cluster": finishing.cluster,
    "atomic": finishing.atomic,
}


def write_kernel(group: ReduceGroup, config: ReduceConfig, gpu: GPUInfo) -> tirx.PrimFunc:
    """A function with thread bindings that computes ``group`` by ``config``.

    With the finish ``atomic`` it has two kernels, of which the first initialises the outputs.
    """

    def body() -> None:
        if config.finish == "atomic":
            initialise_output(group, config, gpu)
        with _threads(group, config, gpu) as ctx:
            _write_body(ctx)

    return write_kernels(group.func, body)


@contextmanager
def _threads(group: ReduceGroup, config: ReduceConfig, gpu: GPUInfo) -> Iterator[ReduceContext]:
    """Open the grid; the blocks of a cluster are neighbours in it."""
    count = ceildiv(group.outputs, config.tile_outputs)
    at_once = _blocks_at_once(group, config)
    if config.cluster > 1:
        size = i64(config.cluster)
        with (
            unless_empty(count),
            T.launch_thread("blockIdx.x", count * size) as block,
            T.launch_thread("clusterCtaIdx.x", size),
            T.launch_thread("threadIdx.x", i64(config.threads)) as thread,
            resident_blocks(gpu, at_once),
        ):
            yield ReduceContext.open(group, config, gpu, block // size, block % size, thread)
        return
    stream = current_stream(gpu) if config.finish == "last_block" else None
    axis = "blockIdx.y" if config.splits > 1 else "blockIdx.x"
    with unless_empty(count), T.launch_thread(axis, count) as tile:
        with T.launch_thread("threadIdx.x", i64(config.threads)) as thread:
            if config.splits == 1:
                with resident_blocks(gpu, at_once):
                    yield ReduceContext.open(group, config, gpu, tile, i64(0), thread)
                return
            with (
                T.launch_thread("blockIdx.x", i64(config.splits)) as split,
                resident_blocks(gpu, at_once),
            ):
                yield ReduceContext.open(group, config, gpu, tile, split, thread, stream)


def _blocks_at_once(group: ReduceGroup, config: ReduceConfig) -> int:
    """Blocks that should share a multiprocessor; 0 leaves it to the compiler."""
    if group.is_chain:
        return 1 if config.cluster > 1 and config.threads > COSTS.large_block else 0
    workloads = [reduction.workload for reduction in group.reductions]
    return blocks_at_once(config, workloads, group.row_inputs(), group.row_outputs())


def _write_body(ctx: ReduceContext) -> None:
    if ctx.group.is_chain:
        write_chain(ctx)
        return
    [stage] = ctx.group.stages
    vector = ctx.config.vector
    states = state_buffers.allocate(stage.workloads, vector, "local")
    state_buffers.clear(stage.workloads, states, vector)
    is_last_block = ctx.config.finish == "last_block"
    place = finishing.open_place(ctx, stage) if is_last_block else None
    # The words that all blocks share are far: they are read while the first loads are under way.
    take = None if place is None else partial(finishing.take_place, ctx, place)
    elements, exists = ctx.group.elements, ctx.exists(ctx.first_output)
    store = store_elements(ctx, elements, ctx.safe_output(), condition=exists)
    visit = visit_twice(combine_vector(ctx, stage, states, vector), store)
    state_buffers.begin_positions(stage.workloads, states, vector)
    visit_share(ctx, values_of(stage, elements), visit, take)
    state_buffers.end_positions(stage.workloads, states, vector)
    if ctx.is_y:
        combine_rows(ctx, stage.workloads, states)
    else:
        state_buffers.fold(stage.workloads, states, vector)
        meeting = None if place is None else finishing.tell_ticket(ctx, place)
        combine_lanes(ctx, stage.workloads, states, meeting)
    if place is None:
        _FINISHES[ctx.config.finish](ctx, stage, states)
    else:
        finishing.last_block(ctx, stage, states, place)
