# SPDX-License-Identifier: Apache-2.0
"""Values of results at one place, on the thread that holds them."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.expression_walk import substitute
from schedules.workload.reduce_operator import finish

from ..plan.group import ReductionStage
from .context import ReduceContext
from .state_buffers import States


class Results:
    """Results and epilogues of the stages so far, at one ``m``.

    Parameters
    ----------
    ctx : ReduceContext
        The thread.
    m : tirx.Expr
        The place.
    """

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
