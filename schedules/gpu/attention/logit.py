# SPDX-License-Identifier: Apache-2.0
"""The argument of the softmax of an attention, computed in float32 from a score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from schedules.tir.expression_walk import op_name, substitute
from schedules.tir.extents import constant

from ..pointwise.element_program import Step, Value
from ..pointwise.iteration_domain import IterationSpace

_HIDDEN = -1e30  # a logit of at most this has no weight beside any score
_HIDDEN_HALF = -65504.0  # nor has the least float16 beside one of that type
_HALF = ("float16", "bfloat16")
_LEAST = float.fromhex("-0x1.fffffep127")
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max)
_FUNCTIONS = ("tirx.exp", "tirx.tanh", "tirx.sigmoid", "tirx.sqrt", "tirx.log", "tirx.fabs")


@dataclass(frozen=True)
class Logit:
    """``factor * value``, the score after scale, mask and bias.

    Parameters
    ----------
    score : tirx.Var
        Stands for a product of a query and a key, in float32.
    space : IterationSpace
        Axes: those of the batch, ``m``, ``n``; no stores. Its steps compute what ``value`` reads.
    value : tirx.Expr
        In float32.
    factor : float
        A positive number.
    ahead : int | None
        Row ``m`` depends on the keys up to ``m + ahead`` only; None if it may depend on all.
    visible : tirx.Expr
        The value at those keys.
    """

    score: tirx.Var
    space: IterationSpace
    value: tirx.Expr
    factor: float
    ahead: int | None
    visible: tirx.Expr

    @classmethod
    def of(cls, score: tirx.Var, space: IterationSpace, value: tirx.Expr) -> Logit:
        """The logit that some steps compute, of the type that the graph gives it.

        Floats of 16 bits between the score and the logit are float32 here, so that nothing is
        rounded on the way.
        """
        last = value.value if isinstance(value, tirx.Cast) else value
        most = _HIDDEN_HALF if _dtype(last) == "float16" else _HIDDEN
        wide = _Widening(space.steps)
        space = replace(space, steps=tuple(wide.steps))
        values = {step.var: step.expression for step in wide.steps if isinstance(step, Value)}
        reads_none = len(values) == len(wide.steps)
        ahead = _ahead(space, _inlined(wide.of(value), values), most) if reads_none else None
        value, factor = _without_factor(wide.of(value), values, most)
        visible = value if ahead is None else value.true_value
        return cls(score, space, value, factor, ahead, visible)


class _Widening:
    """Steps whose values of 16-bit floats are float32.

    Attributes
    ----------
    steps : list[Step]
        The steps; reads are of the type of their tensors.
    """

    def __init__(self, steps: Sequence[Step]):
        self.steps: list[Step] = []
        self._wide: dict[tirx.Var, tirx.Var] = {}
        self._narrow: dict[tirx.Var, tirx.Expr] = {}
        for step in steps:
            guards = tuple(map(self._kept, step.guards))
            if not isinstance(step, Value):
                indices = tuple(map(self._kept, step.indices))
                self.steps.append(replace(step, indices=indices, guards=guards))
                continue
            var, expression = step.var, self.of(step.expression)
            if _dtype(var) in _HALF:
                var = self._wide[step.var] = tirx.Var(var.name, "float32")
                self._narrow[step.var] = var.astype(_dtype(step.var))
            self.steps.append(replace(step, var=var, expression=expression, guards=guards))

    def of(self, value: tirx.Expr) -> tirx.Expr:
        """An expression of the old steps' variables by the new ones; float32 if it had 16 bits."""
        is_half = _dtype(value) in _HALF
        if isinstance(value, tirx.Var):
            return self._wide.get(value, value.astype("float32") if is_half else value)
        if isinstance(value, tirx.FloatImm):
            return tirx.const(value.value, "float32") if is_half else value
        if isinstance(value, tirx.Cast):
            inner = self.of(value.value)
            wanted = "float32" if is_half else _dtype(value)
            return inner if _dtype(inner) == wanted else inner.astype(wanted)
        if isinstance(value, _ARITHMETIC):
            return type(value)(self.of(value.a), self.of(value.b))
        if isinstance(value, tirx.Select):
            branches = self.of(value.true_value), self.of(value.false_value)
            return tirx.Select(self._kept(value.condition), *branches)
        if op_name(value) == "prim.if_then_else":
            condition, *rest = value.args
            return tirx.if_then_else(self._kept(condition), *map(self.of, rest))
        if is_half and op_name(value) in _FUNCTIONS:
            return tirx.call_intrin("float32", value.op.name, *map(self.of, value.args))
        return self._kept(value).astype("float32") if is_half else self._kept(value)

    def _kept(self, value: tirx.Expr) -> tirx.Expr:
        """The same expression, which rounds where it did."""
        return substitute(value, self._narrow)


def _dtype(value: tirx.Expr) -> str:
    return str(value.ty.dtype)


def _inlined(value: tirx.Expr, values: Mapping[tirx.Var, tirx.Expr]) -> tirx.Expr:
    while value in values:
        value = values[value]
    return value


def _without_factor(
    value: tirx.Expr, values: Mapping[tirx.Var, tirx.Expr], most: float
) -> tuple[tirx.Expr, float]:
    """A logit divided by a constant factor of it, and the factor.

    Its steps are ``values``; a logit of at most ``most`` has no weight.
    """
    value = _inlined(value, values)
    if isinstance(value, (tirx.Mul, tirx.Div)):
        sides = [(value.a, value.b)]
        sides += [(value.b, value.a)] if isinstance(value, tirx.Mul) else []
        for rest, number in sides:
            if isinstance(number, tirx.FloatImm) and 0 < number.value < math.inf:
                rest, factor = _without_factor(rest, values, most)
                factor *= number.value if isinstance(value, tirx.Mul) else 1 / number.value
                return (rest, factor) if 0 < factor < -_LEAST else (value, 1.0)
    if isinstance(value, tirx.Select) and _is_at_most(value.false_value, most):
        rest, factor = _without_factor(value.true_value, values, most)
        least = value.false_value.value
        if least > -math.inf:  # hidden keys keep equal weights where no key is visible
            least = max(least / factor, _LEAST)
        return tirx.Select(value.condition, rest, tirx.const(least, "float32")), factor
    return value, 1.0


def _is_at_most(value: tirx.Expr, most: float) -> bool:
    return isinstance(value, tirx.FloatImm) and value.value <= most


def _ahead(logits: IterationSpace, value: tirx.Expr, most: float) -> int | None:
    """By how much the last key that a row depends on is ahead of the row.

    Other keys have no weight, since a key before them has a score of its own. With a mask in memory
    that might be hidden, too.
    """
    if not isinstance(value, tirx.Select) or not _is_at_most(value.false_value, most):
        return None
    past, (row, column) = value.condition, logits.axes[-2:]
    if not isinstance(past, tirx.LE):
        return None
    ahead = constant(logits.analyzer().simplify(past.b - past.a - row + column))
    return ahead if ahead is not None and ahead >= 0 else None
