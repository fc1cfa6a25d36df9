# SPDX-License-Identifier: Apache-2.0
"""Matching of attention: two products with a softmax between them, and the logits of a score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.gemm.matmul.matmul_pattern import (
    Operand,
    dependences,
    product_factors,
    read_in_place,
    read_operand,
    rows_are_neighbours,
)
from schedules.gpu.pointwise.element_program import ElementProgram, Read, Step, Value
from schedules.gpu.pointwise.iteration_domain import IterationSpace, Store
from schedules.tir.block_expressions import Stage
from schedules.tir.expression_walk import loads, op_name, substitute, uses
from schedules.tir.extents import Extent, constant, extent_of, unravel
from schedules.tir.index_math import ceildiv, i64, ravel, volume

_HIDDEN = -1e30  # a logit of at most this has no weight beside any score
_HIDDEN_HALF = -65504.0  # nor has the least float16 beside one of that type
_HALF = ("float16", "bfloat16")
_LEAST = float.fromhex("-0x1.fffffep127")
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max)
_FUNCTIONS = ("tirx.exp", "tirx.tanh", "tirx.sigmoid", "tirx.sqrt", "tirx.log", "tirx.fabs")


@dataclass(frozen=True)
class Logit:
    """``factor * value``, the score after scale, mask and bias."""

    score: tirx.Var  # Stands for a product of a query and a key, in float32.
    space: IterationSpace
    """Axes: those of the batch, ``m``, ``n``; no stores. Its steps compute what ``value`` reads."""
    value: tirx.Expr  # Value in float32.
    factor: float  # A positive number.
    ahead: int | None
    """Row ``m`` depends on the keys up to ``m + ahead`` only; None if it may depend on all."""
    visible: tirx.Expr  # The value at those keys.

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
    """Distance of the last key that a row depends on from the row.

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


_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class OutputElements:
    """Elements of the output."""

    m: Extent
    n: Extent
    """``m`` and ``n``: rows, and columns of a row."""
    accumulator: tirx.Var  # Stands for an element, in float32.
    epilogue: IterationSpace  # Axes: those of the batch, ``m``, ``n``; it stores the element.


@dataclass(frozen=True)
class AttentionFunction:
    """``O[b, m, c] = sum_n softmax_n(logit(sum_k Q[b, m, k] * K[b, n, k])) * V[b, n, c]``."""

    query: Operand
    key: Operand
    """``query`` and ``key``: over the batch, their own rows, ``k``."""
    value: Operand  # Matrix over the batch, the columns ``c``, the keys ``n``.
    batch: tuple[Extent, ...]  # Extents of the batch axes; heads are one of them.
    m: Extent
    n: Extent
    depth: Extent
    columns: Extent
    """``m``, ``n``, ``depth`` and ``columns``: queries, keys, elements of a key and of a value."""
    logit: Logit  # The argument of softmax.
    results: OutputElements

    def place(self, block: tirx.Expr, rows: int) -> tuple[list[tirx.Expr], tirx.Expr]:
        """Emit the place in the batch, and the first query, of the block with a number.

        Of queries with more and more keys the last ones come first.
        """
        count = ceildiv(self.m, rows)
        *batch, number = map(T.bind, unravel(block, [*self.batch, count], is_natural=True))
        if self.logit.ahead is not None:
            number = count - i64(1) - number
        return batch, T.bind(number * i64(rows))

    def tiles(self, first: tirx.Expr, rows: int, keys: int) -> tirx.Expr:
        """Tiles of ``keys`` on which the ``rows`` queries from ``first`` on depend."""
        if self.logit.ahead is None:
            return ceildiv(self.n, keys)
        last = tirx.min(first + i64(rows + self.logit.ahead), i64(self.n))
        return (last + i64(keys - 1)) // i64(keys)

    @property
    def batches(self) -> Extent:
        """Number of attentions."""
        return extent_of(volume(self.batch))

    def with_shared_heads(self) -> AttentionFunction:
        """Return the same with a batch axis of its own for the queries that share keys.

        Grouped queries read the keys of head ``h // heads``, which are linear in two axes.
        """
        for axis, extent in enumerate(map(constant, self.batch)):
            for heads in range((extent or 1) // 2, 1, -1):
                if extent is not None and extent % heads == 0:
                    split = self._split(axis, extent // heads, heads)
                    if split.shares_keys(axis + 1) and not self.shares_keys(axis):
                        return split
        return self

    def shares_keys(self, axis: int) -> bool:
        """Return whether keys and values are the same all along an axis of the batch."""
        return not any(
            uses(operand.space.position(read), operand.space.axes[axis])
            for operand in (self.key, self.value)
            for read in operand.space.accesses
        )

    def _split(self, axis: int, outer: int, inner: int) -> AttentionFunction:
        batch = (*self.batch[:axis], outer, inner, *self.batch[axis + 1 :])

        def split(space: IterationSpace) -> tuple[IterationSpace, dict[tirx.Var, tirx.Expr]]:
            old, group = space.axes[axis], tirx.Var("group", "int64")
            axes = (*space.axes[:axis], group, old, *space.axes[axis + 1 :])
            values = {old: group * i64(inner) + old}
            return space.with_axes(axes, (*batch, *space.extents[-2:]), values), values

        def of(operand: Operand) -> Operand:
            space, values = split(operand.space)
            value, neighbours = substitute(operand.value, values), rows_are_neighbours(space)
            return replace(operand, space=space, value=value, rows_first=neighbours)

        space, values = split(self.logit.space)
        value, visible = (
            substitute(each, values) for each in (self.logit.value, self.logit.visible)
        )
        epilogue, _ = split(self.results.epilogue)
        return replace(
            self,
            query=of(self.query),
            key=of(self.key),
            value=of(self.value),
            batch=batch,
            logit=replace(self.logit, space=space, value=value, visible=visible),
            results=replace(self.results, epilogue=epilogue),
        )


def read_attention(func: tirx.PrimFunc, stages: Sequence[Stage] | None) -> AttentionFunction | None:
    """Read the attention of a function of these stages; None if it is none.

    The function has two products, and between them a softmax of the first one's last axis as TVM
    writes it: maximum, exponential, sum, quotient. Its argument is computed from the product in
    place, queries, keys and values are computed by injective blocks, and the output is moved by
    transpositions and reshapes only.
    """
    reduced = [stage for stage in stages or [] if stage.reduced]
    if stages is None or len(reduced) != 4:
        return None
    scores, _, _, result = reduced
    place = stages.index(result)
    before = [stage for stage in stages[:place] if not stage.reduced]
    factors = product_factors(result)
    if factors is None or len(result.reduced) != 1 or len(scores.reduced) != 1:
        return None
    for weight, value in (factors, factors[::-1]):
        argument = _softmax_argument(weight, result, stages[:place], reduced)
        if argument is not None:
            found = _Reader(func, scores, result, before, argument).read(value, stages[place + 1 :])
            if found is None or not _reads_inputs(func, found):
                return None
            return found.with_shared_heads()
    return None


def _softmax_argument(
    weight: tirx.Expr, result: Stage, before: Sequence[Stage], reduced: Sequence[Stage]
) -> tirx.Buffer | None:
    """The buffer of which ``weight`` is the softmax over its last axis, at the keys' place."""
    stages = {stage.output: stage for stage in before}
    places = [*(axis.var for axis in result.axes[:-1]), result.reduced[0].var]
    load = _plain(weight)
    if load is None or not _is_at(load, places):
        return None
    value = stages[load.source].value if load.source in stages else load
    while (inner := _plain(value)) is not None and inner.source in stages:
        if not _is_in_place(stages[load.source], inner):
            return None
        load, value = inner, stages[inner.source].value
    quotient = stages.get(load.source)
    if quotient is None or not isinstance(value, tirx.Div):
        return None
    _, maximum, total, _ = reduced
    power, divisor = _plain(value.a), _plain(value.b)
    if power is None or divisor is None or not divisor.source.same_as(total.output):
        return None
    exponential = stages.get(power.source)
    if exponential is None or op_name(exponential.value) != "tirx.exp":
        return None
    difference = exponential.value.args[0]
    if not isinstance(difference, tirx.Sub):
        return None
    data, greatest = _plain(difference.a), _plain(difference.b)
    if data is None or greatest is None or not greatest.source.same_as(maximum.output):
        return None
    in_place = (
        _is_in_place(quotient, power)
        and _is_in_place(quotient, divisor, -1)
        and _is_in_place(exponential, data)
        and _is_in_place(exponential, greatest, -1)
        and _reduces(maximum, tirx.Max, data.source)
        and _reduces(total, tirx.Add, power.source)
    )
    return data.source if in_place else None


def _plain(value: tirx.Expr) -> ir.TensorLoad | None:
    """The read that an expression is, but for conversions."""
    while isinstance(value, tirx.Cast):
        value = value.value
    return value if isinstance(value, ir.TensorLoad) else None


def _is_at(load: ir.TensorLoad, places: Sequence[tirx.Expr]) -> bool:
    """Return whether a buffer is read at some places; an axis of one element may say zero."""
    return len(load.indices) == len(places) and all(
        place.same_as(index) or (constant(index) == 0 and constant(extent) == 1)
        for index, place, extent in zip(load.indices, places, load.source.shape, strict=True)
    )


def _is_in_place(stage: Stage, load: ir.TensorLoad, end: int | None = None) -> bool:
    return _is_at(load, [axis.var for axis in stage.axes[:end]])


def _reduces(stage: Stage, kind: Any, source: tirx.Buffer) -> bool:
    """Return whether a stage combines the last axis of a buffer with its own result."""
    value = stage.value
    if not isinstance(value, kind) or len(stage.reduced) != 1:
        return False
    read = [_plain(side) for side in (value.a, value.b)]
    own = [load for load in read if load is not None and load.source.same_as(stage.output)]
    data = [load for load in read if load is not None and load.source.same_as(source)]
    places = [*(axis.var for axis in stage.axes), stage.reduced[0].var]
    return len(own) == len(data) == 1 and _is_at(data[0], places)


class _Reader:
    """Reads the parts of an attention whose stages are known."""

    def __init__(
        self,
        func: tirx.PrimFunc,
        scores: Stage,
        result: Stage,
        before: Sequence[Stage],
        argument: tirx.Buffer,
    ):
        self.func, self.scores, self.result = func, scores, result
        self.before, self.argument = before, argument
        self.batch = tuple(range(len(scores.axes) - 2))

    def read(self, value: tirx.Expr, after: Sequence[Stage]) -> AttentionFunction | None:
        """The attention, if queries, keys, values and logits are what they must be."""
        scores, result = self.scores, self.result
        shape, depth = scores.shape, extent_of(scores.reduced[0].dom.extent)
        same = tvm_ffi.structural_equal(list(result.shape[:-1]), list(shape[:-1]))
        if not same or not self._are_floats():
            return None
        factors = self._query_and_key()
        if factors is None or not read_in_place(scores, self._from_scores()):
            return None
        query, key = (
            self._operand(scores, factor, axis, depth)
            for factor, axis in zip(factors, (-2, -1), strict=True)
        )
        row = result.axes[-2].var
        if row in dependences(result, self.before, value):
            return None
        operand = self._operand(result, value, -1, shape[-1])
        results = self._results(after)
        if results is None:
            return None
        batch = tuple(shape[i] for i in self.batch)
        m, n, columns = shape[-2], shape[-1], result.shape[-1]
        parts = (batch, m, n, depth, columns)
        return AttentionFunction(query, key, operand, *parts, self._logit(), results)

    def _are_floats(self) -> bool:
        return all(str(stage.output.dtype) in _FLOATS for stage in (self.scores, self.result))

    def _query_and_key(self) -> tuple[tirx.Expr, tirx.Expr] | None:
        """The factor with the queries, and that with the keys."""
        factors = product_factors(self.scores)
        if factors is None:
            return None
        row, column = (axis.var for axis in self.scores.axes[-2:])
        for query, key in (factors, factors[::-1]):
            of_query, of_key = (dependences(self.scores, self.before, f) for f in (query, key))
            if column not in of_query and row not in of_key:
                return query, key
        return None

    def _from_scores(self) -> list[Stage]:
        """The stages that depend on the scores, up to the argument of softmax."""
        follow, stages = {self.scores.output}, []
        if self.argument.same_as(self.scores.output):
            return []
        for stage in self.before:
            if any(load.source in follow for load in loads(stage.value)):
                follow.add(stage.output)
                stages.append(stage)
                if stage.output.same_as(self.argument):
                    break
        return stages

    def _operand(self, product: Stage, factor: tirx.Expr, axis: int, depth: Extent) -> Operand:
        part = (len(product.axes) + axis,)
        reduced = product.reduced
        return read_operand(
            product, self.before, factor, part, self.batch, reduced, depth, "float32"
        )

    def _logit(self) -> Logit:
        score, axes = tirx.Var("score", "float32"), _axes(self.batch, ("m", "n"))
        stored = score.astype(str(self.scores.output.dtype))
        program = ElementProgram(self.before, {self.scores.output: stored})
        value = program.element(self.argument, axes)
        space = IterationSpace(axes, self.scores.shape, tuple(program.steps), ())
        return Logit.of(score, space, value)

    def _results(self, after: Sequence[Stage]) -> OutputElements | None:
        """The output, which only moves and converts the elements of the second product."""
        element = tirx.Var("element", "float32")
        axes, shape = _axes(self.batch, ("m", "c")), self.result.shape
        space = IterationSpace(axes, shape, (), ())
        buffer: tirx.Buffer = self.result.output
        value: tirx.Expr = element.astype(str(buffer.dtype))
        indices: list[tirx.Expr] = list(axes)
        for stage in after:
            read = loads(stage.value)
            if len(read) != 1 or not read[0].source.same_as(buffer):
                return None
            moved = _moved(stage, read[0], indices)
            if moved is None:
                return None
            value = _replaced(stage.value, value)
            analyzer = space.analyzer()
            buffer, indices = stage.output, [analyzer.simplify(index) for index in moved]
        if not any(buffer.same_as(param) for param in self.func.params):
            return None
        store = Store(buffer, tuple(indices), value)
        epilogue = IterationSpace(axes, shape, (), (store,))
        return OutputElements(shape[-2], shape[-1], element, epilogue)


def _axes(batch: Sequence[int], own: Sequence[str]) -> tuple[tirx.Var, ...]:
    names = [*(f"b{i}" for i in batch), *own]
    return tuple(tirx.Var(name, "int64") for name in names)


def _replaced(expression: tirx.Expr, value: tirx.Expr) -> tirx.Expr:
    """An expression with a value in the place of its only read."""
    return tvm_ffi.structural_map(expression, (ir.TensorLoad, lambda _: value))


def _moved(
    stage: Stage, load: ir.TensorLoad, indices: Sequence[tirx.Expr]
) -> list[tirx.Expr] | None:
    """Return where a stage that transposes or reshapes stores the element at some indices."""
    axes = [axis.var for axis in stage.axes]
    at = {index: place for index, place in zip(load.indices, indices, strict=True)}
    if all(var in at or constant(size) == 1 for var, size in zip(axes, stage.shape, strict=True)):
        return [at.get(var, i64(0)) for var in axes]
    shape = load.source.shape
    analyzer = IterationSpace(tuple(axes), stage.shape, (), ()).analyzer()
    same = analyzer.can_prove_equal(ravel(load.indices, shape), ravel(axes, stage.shape))
    return unravel(ravel(indices, shape), stage.shape) if same else None


def _reads_inputs(func: tirx.PrimFunc, found: AttentionFunction) -> bool:
    """Return whether all parts are computed from the function's inputs."""
    spaces = [found.query.space, found.key.space, found.value.space, found.logit.space]
    steps: list[Step] = [step for space in spaces for step in space.steps]
    params = list(func.params)
    return all(step.buffer in params for step in steps if isinstance(step, Read))
