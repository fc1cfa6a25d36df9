# SPDX-License-Identifier: Apache-2.0
"""The GPU kernel of a coalesced reduction, for ``cuda`` and ``opencl`` alike.

::

    for tile in blockIdx.y, split in blockIdx.x:          # blockIdx.x alone if nothing is split
        for row, lane in threadIdx.x:
            states = identity
            for n in this split's share, unroll x vector elements at once:
                states = combine(states, value(m, n))     # loads first, 16 bytes each
            states = combine over the block               # shuffles, shared memory
            finish                                        # one_block, atomic or last_block
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..reduce_workload import constant
from . import reduce_finish, reduce_state
from .block_combine import combine_lanes, combine_rows
from .device import GPUInfo
from .index_math import ceildiv, i64, simplified
from .initialise_output import initialise_output
from .reduce_config import ReduceConfig
from .reduce_context import ReduceContext
from .reduce_function import ReduceFunction
from .reduce_state import Buffers
from .vector_loads import VectorLoads

_FINISHES = {
    "one_block": reduce_finish.one_block,
    "atomic": reduce_finish.atomic,
    "last_block": reduce_finish.last_block,
}


def write_kernel(reduction: ReduceFunction, config: ReduceConfig, gpu: GPUInfo) -> tirx.PrimFunc:
    """A function with thread bindings that computes ``reduction`` as ``config`` says.

    With the finish ``atomic`` it has two kernels, of which the first initialises the output.
    """
    func = reduction.func
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            for buffer in func.params:
                T.arg(buffer.name, buffer)
            T.func_attr({**dict(func.attrs), "tirx.is_scheduled": True})
            with T.sblock("root"):
                T.reads()
                T.writes()
                if config.finish == "atomic":
                    initialise_output(reduction, config, gpu)
                with _threads(reduction, config, gpu) as ctx:
                    _write_body(ctx)
    written = builder.get()  # named by the builder; the module knows the function by its variable
    return written if "global_symbol" in func.attrs else written.without_attr("global_symbol")


@contextmanager
def _threads(
    reduction: ReduceFunction, config: ReduceConfig, gpu: GPUInfo
) -> Iterator[ReduceContext]:
    """Open the grid."""
    count = ceildiv(reduction.outputs, config.tile_outputs)
    axis = "blockIdx.y" if config.splits > 1 else "blockIdx.x"
    with T.launch_thread(axis, count) as tile:
        with T.launch_thread("threadIdx.x", i64(config.threads)) as thread:
            if config.splits == 1:
                yield ReduceContext.open(reduction, config, gpu, tile, i64(0), thread)
            else:
                with T.launch_thread("blockIdx.x", i64(config.splits)) as split:
                    yield ReduceContext.open(reduction, config, gpu, tile, split, thread)


def _write_body(ctx: ReduceContext) -> None:
    vector = ctx.config.vector
    states = reduce_state.allocate(ctx.workload, vector, "local")
    reduce_state.clear(ctx.workload, states, vector)
    _accumulate(ctx, states)
    if ctx.is_y:
        combine_rows(ctx, states)
    else:
        reduce_state.fold(ctx.workload, states, vector)
        combine_lanes(ctx, states)
    _FINISHES[ctx.config.finish](ctx, states)


def _accumulate(ctx: ReduceContext, states: Buffers) -> None:
    """Combine this thread's share of the reduced loop into its states."""
    config = ctx.config
    begin, count = _share(ctx)
    step = config.stride * config.unroll
    iterations = simplified(count // i64(step))
    loads = VectorLoads(ctx.reduction.value, ctx.is_y, config.vector)
    if constant(iterations) != 0:
        with T.serial(i64(0), iterations) as iteration:
            start = begin + iteration * i64(step)
            starts = [start + i64(u * config.stride) for u in range(config.unroll)]
            _combine_vectors(ctx, states, loads, [T.bind(_position(ctx, s, loads)) for s in starts])
    done = simplified(iterations * i64(step))
    if constant(simplified(count - done)) != 0:
        _tail(ctx, states, loads, begin + done, begin + count)


def _tail(
    ctx: ReduceContext, states: Buffers, loads: VectorLoads, start: tirx.Expr, end: tirx.Expr
) -> None:
    """The rest of the share, less than one step of the main loop, guarded."""
    config, reduced = ctx.config, constant(ctx.reduction.reduced)
    stride = config.stride
    if not ctx.is_y and (reduced is None or reduced % config.vector != 0):
        loads = VectorLoads(ctx.reduction.value, ctx.is_y, 1)
        stride = config.lanes
    with T.serial(i64(0), ceildiv(simplified(end - start), stride)) as iteration:
        n = T.bind(_position(ctx, start + iteration * i64(stride), loads))
        with T.If(n < end):
            with T.Then():
                _combine_vectors(ctx, states, loads, [n])


def _share(ctx: ReduceContext) -> tuple[tirx.Expr, tirx.Expr]:
    """Begin and length of the part of the reduced loop that this block has.

    Shares are whole strides, and differ by one stride at most; the last one ends with the loop.
    """
    reduced, config = i64(ctx.reduction.reduced), ctx.config
    if config.splits == 1:
        return i64(0), reduced
    strides = ceildiv(ctx.reduction.reduced, config.stride)
    least = simplified(strides // i64(config.splits))
    longer = simplified(strides % i64(config.splits))  # so many blocks take one more
    if constant(longer) == 0 and constant(simplified(reduced % i64(config.stride))) == 0:
        length = simplified(least * i64(config.stride))
        return ctx.split * length, length
    begin = T.bind((ctx.split * least + tirx.min(ctx.split, longer)) * i64(config.stride))
    more = tirx.Select(ctx.split < longer, i64(1), i64(0))
    end = T.bind(tirx.min(reduced, begin + (least + more) * i64(config.stride)))
    return begin, tirx.max(end - begin, i64(0))


def _position(ctx: ReduceContext, start: tirx.Expr, loads: VectorLoads) -> tirx.Expr:
    """Where in the reduced loop the thread's vector begins."""
    return start + (ctx.row if ctx.is_y else ctx.lane * i64(loads.vector))


def _combine_vectors(
    ctx: ReduceContext, states: Buffers, loads: VectorLoads, positions: list[tirx.Expr]
) -> None:
    """Load a vector at each position, then combine all of them."""
    m = ctx.safe_output()
    lanes = [loads.fetch(m, n, ctx.flat) for n in positions]
    for n, lane in zip(positions, lanes, strict=True):
        for k in range(loads.vector):
            position = n if ctx.is_y else n + i64(k)
            state = (lane(k), position) if ctx.workload.is_arg else (lane(k),)
            reduce_state.update(ctx.workload, states, k, state)
