# SPDX-License-Identifier: Apache-2.0
"""A thread of a reduction kernel: its place, and the results that it holds."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.vector_loads import FlatViews
from schedules.tir.expression_walk import substitute
from schedules.tir.extents import constant, unravel
from schedules.tir.index_math import ceildiv, i64
from schedules.workload.reduce_operator import finish

from ..plan.config import ReduceConfig
from ..plan.group import ReduceGroup, ReductionStage
from .state_buffers import States


@dataclass(frozen=True)
class ReduceContext:
    """One thread's place in the kernel."""

    group: ReduceGroup  # The group that is computed.
    config: ReduceConfig  # Its configuration.
    gpu: GPUInfo
    tile: tirx.Expr
    split: tirx.Expr
    """``tile`` and ``split``: the outputs of the block, and its share of the reduced loop."""
    thread: tirx.Expr  # Number in the block, ``row * lanes + lane``.
    views: FlatViews  # Parameters and their one-dimensional views.
    stream: tirx.Expr  # Number of the launch's stream, for the finish ``last_block``.
    turn: tirx.Expr | None = None
    """Number of the output that a row of threads computes; None if it has one only."""

    @classmethod
    def open(
        cls,
        group: ReduceGroup,
        config: ReduceConfig,
        gpu: GPUInfo,
        tile: tirx.Expr,
        split: tirx.Expr,
        thread: tirx.Expr,
        stream: tirx.Expr | None = None,
    ) -> ReduceContext:
        """Declare one-dimensional views of the parameters, inside the kernel."""
        views = FlatViews.declare(group.func, gpu)
        return cls(
            group, config, gpu, tile, split, thread, views, i64(0) if stream is None else stream
        )

    @property
    def workspace(self) -> tirx.Buffer:
        """Tickets and partial results, for the finish ``last_block``."""
        return self.group.func.params[0]

    @property
    def is_y(self) -> bool:
        """Return whether lanes hold neighbouring outputs."""
        return self.config.form == "y"

    @property
    def row(self) -> tirx.Expr:
        """Row of the thread."""
        return self.thread // i64(self.config.lanes)

    @property
    def lane(self) -> tirx.Expr:
        """Lane of the thread."""
        return self.thread % i64(self.config.lanes)

    @property
    def is_leader(self) -> tirx.Expr:
        """Return whether the thread holds results of the block after the states are combined."""
        return tirx.EQ(self.row if self.is_y else self.lane, i64(0))

    @property
    def results(self) -> int:
        """Number of neighbouring results of a leader."""
        return self.config.vector if self.is_y else 1

    @property
    def first_output(self) -> tirx.Expr:
        """The first of the outputs that the thread accumulates, possibly past the last one."""
        if self.is_y:
            return self.tile_start + self.lane * i64(self.config.vector)
        if self.turn is None:
            return self.tile_start + self.row
        return self.tile_start + self.row * i64(self.config.turns) + self.turn

    @property
    def tile_start(self) -> tirx.Expr:
        """The first output of the block."""
        return self.tile * i64(self.config.tile_outputs)

    def exists(self, output: tirx.Expr) -> tirx.Expr | None:
        """Condition for an output to exist; None where all do."""
        outputs = constant(self.group.outputs)
        if outputs is not None and outputs % self.config.tile_outputs == 0:
            return None
        return output < i64(self.group.outputs)

    def safe_output(self) -> tirx.Expr:
        """:attr:`first_output`, or the last one for outputs that do not exist."""
        first = self.first_output
        if self.exists(first) is None:
            return first
        # Written as a multiple of the vector, so that TVM can prove it.
        width = self.config.vector if self.is_y else 1
        last = ceildiv(self.group.outputs, width) - i64(1)
        return tirx.min(first // i64(width), last) * i64(width)

    def flat(self, buffer: tirx.Buffer) -> tirx.Buffer | None:
        """A parameter as one row; bool, which has no vectors, as bytes; None if it has no view."""
        return self.views.row(buffer)

    def write(self, output: tirx.Buffer, place: tirx.Expr, value: tirx.Expr) -> None:
        """Store an element of an output, ``place`` being its row-major position."""
        view = self.flat(output)
        if view is None:
            T.buffer_store(output, value, unravel(place, output.shape))
        else:
            T.buffer_store(view, value.astype(view.dtype), [place])


class Results:
    """Results and epilogues of the stages so far, at one ``m``."""

    def __init__(self, ctx: ReduceContext, m: tirx.Expr):
        self.ctx = ctx
        self.m = m
        self.values: dict[tirx.Var, tirx.Expr] = {}

    def add(self, stage: ReductionStage, states: States) -> None:
        """Compute the results of a stage from its states, then its epilogues."""
        group = self.ctx.group
        is_used = group.is_chain or group.has_epilogues
        for reduction, state in zip(stage.reductions, states, strict=True):
            values = finish(reduction.workload, state, group.reduced)
            for result, value in zip(reduction.results, values, strict=True):
                self.values[result.var] = _hold(value) if is_used else value
        for epilogue in stage.epilogues:
            self.values[epilogue.result.var] = _hold(self.put_into(epilogue.value(self.m)))

    def write(self, stage: ReductionStage, place: tirx.Expr | None = None) -> None:
        """Store the values of a stage that are outputs of the group, at ``m`` by default."""
        for result in stage.results:
            if result.output is not None:
                place = self.m if place is None else place
                self.ctx.write(result.output, place, self.values[result.var])

    def put_into(self, expression: tirx.Expr) -> tirx.Expr:
        """An expression with the values substituted for their variables."""
        return substitute(expression, self.values)


def _hold(value: tirx.Expr) -> tirx.Expr:
    """Compute a value once."""
    dtype = str(value.ty.dtype)
    if dtype != "bfloat16":
        return T.bind(value)
    register = T.alloc_buffer((1,), dtype, scope="local")  # TVM legalizes memory, not variables
    T.buffer_store(register, value, [0])
    return register[0]
