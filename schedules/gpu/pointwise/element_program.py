# SPDX-License-Identifier: Apache-2.0
"""Elements of tensors as a list of steps, with each read and each shared value once.

Inlining a chain of blocks would recompute values with several uses; here every intermediate
value at one place is a step, and the expressions refer to it by a variable.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx

from schedules.tir.block_expressions import Stage
from schedules.tir.expression_walk import is_if_then_else, substitute
from schedules.tir.index_math import ravel


@dataclass(frozen=True)
class Read:
    """A read of a tensor in global memory."""

    var: tirx.Var  # Stands for the value.
    buffer: tirx.Buffer  # The tensor.
    indices: tuple[tirx.Expr, ...]  # Place in the tensor; may refer to earlier steps.
    guards: tuple[tirx.Expr, ...]  # Conditions under which the place exists.

    @property
    def index(self) -> tirx.Expr:
        """Row-major position."""
        return ravel(self.indices, self.buffer.shape)


@dataclass(frozen=True)
class Value:
    """A value computed from earlier steps."""

    var: tirx.Var  # Stands for it.
    expression: tirx.Expr  # It reads no memory.
    guards: tuple[tirx.Expr, ...]  # Conditions under which it may be computed.
    is_partial: bool = False
    """Whether it is a partial result of a reduction, which deserves a register."""


Step = Read | Value


class ElementProgram:
    """Steps that lead from the inputs of a function to elements of its outputs.

    Attributes
    ----------
    steps : list[Step]
        Steps in an order in which they can be taken.
    """

    def __init__(
        self,
        # Blocks whose results are computed where they are needed; what they reduce is unrolled.
        stages: Sequence[Stage],
        # Values that stand for elements of other buffers wherever they are read, such as the
        # accumulator of a matrix product.
        known: Mapping[tirx.Buffer, tirx.Expr] | None = None,
    ):
        self.steps: list[Step] = []
        self._stages = {stage.output: stage for stage in stages}
        self._known = dict(known or {})
        self._memo: dict[tuple[tirx.Buffer, int], list[tuple[tuple, tuple, tirx.Var]]] = {}

    def element(self, buffer: tirx.Buffer, indices: Sequence[tirx.Expr]) -> tirx.Expr:
        """Add the steps for an element of a stage's result; returns the expression for it."""
        return self._read(buffer, tuple(indices), ())

    def add(self, expression: tirx.Expr, guards: tuple[tirx.Expr, ...] = ()) -> tirx.Expr:
        """Add the steps for an expression; returns it without reads and conditions."""

        def replace(node: tirx.Expr) -> tirx.Expr:
            if isinstance(node, ir.TensorLoad):
                indices = tuple(self.add(index, guards) for index in node.indices)
                return self._read(node.source, indices, guards)
            if is_if_then_else(node):
                return self._conditional(node, guards)
            return node

        return tvm_ffi.structural_map(
            expression, ((ir.TensorLoad, replace), (ir.Call, replace)), order="pre"
        )

    def _conditional(self, call: ir.Call, guards: tuple[tirx.Expr, ...]) -> tirx.Var:
        condition = self.add(call.args[0], guards)
        yes = self.add(call.args[1], (*guards, condition))
        no = self.add(call.args[2], (*guards, tirx.Not(condition)))
        return self._value(tirx.if_then_else(condition, yes, no), guards)

    def _value(
        self, expression: tirx.Expr, guards: tuple[tirx.Expr, ...], is_partial: bool = False
    ) -> tirx.Var:
        var = tirx.Var("value", expression.ty.dtype)
        self.steps.append(Value(var, expression, guards, is_partial))
        return var

    def _reduction(
        self, stage: Stage, indices: Sequence[tirx.Expr], guards: tuple[tirx.Expr, ...]
    ) -> tirx.Expr:
        """Combine all elements of a reduction, one after the other."""
        assert stage.init is not None, "a reduction begins somewhere"
        partial = self.add(stage.at(indices, stage.init), guards)
        ranges = [range(int(axis.dom.extent)) for axis in stage.reduced]
        for point in itertools.product(*ranges):
            place = {
                axis.var: tirx.const(k, axis.var.ty.dtype)
                for axis, k in zip(stage.reduced, point, strict=True)
            }

            def previous(load: ir.TensorLoad, value: tirx.Expr = partial) -> tirx.Expr:
                return value if load.source.same_as(stage.output) else load

            value = substitute(stage.at(indices), place)
            value = tvm_ffi.structural_map(value, (ir.TensorLoad, previous))
            partial = self._value(self.add(value, guards), guards, is_partial=True)
        return partial

    def _read(
        self, buffer: tirx.Buffer, indices: tuple[tirx.Expr, ...], guards: tuple[tirx.Expr, ...]
    ) -> tirx.Expr:
        if buffer in self._known:
            return self._known[buffer]
        key = (buffer, hash(tuple(tvm_ffi.structural_hash(index) for index in indices)))
        for at, under, var in self._memo.get(key, []):
            if tvm_ffi.structural_equal(at, indices) and tvm_ffi.structural_equal(
                under, guards[: len(under)]
            ):
                return var
        if buffer in self._stages:
            stage = self._stages[buffer]
            if stage.reduced:
                expression = self._reduction(stage, indices, guards)
            else:
                expression = self.add(stage.at(indices), guards)
            is_step = isinstance(expression, tirx.Var)
            found = expression if is_step else self._value(expression, guards)
        else:
            found = tirx.Var(buffer.name, buffer.dtype)
            self.steps.append(Read(found, buffer, indices, guards))
        self._memo.setdefault(key, []).append((indices, guards, found))
        return found
