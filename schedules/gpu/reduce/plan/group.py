# SPDX-License-Identifier: Apache-2.0
"""Group of coalesced reductions that one kernel computes, and stages that one pass can compute.

All have the same ``M`` and ``N``. Reductions of one stage are *sisters*: one pass over the data
serves them all, and the elements that are stored on the way. *Epilogues* are computed from results
at the same ``m``. A group is a *chain* if reductions or stored elements use results of earlier
stages.

``sum(exp(x - max(x)))`` needs the maximum first, so the two are stages of a chain, for which one
block must process a whole row. Where it cannot, they become one reduction with the state
:data:`schedules.workload.reduce.MAX_SUM_EXP`, which any number of blocks can share: the largest
value ``m`` and the sum ``s`` of ``exp(x - m)``. For any shift ``h``, one for each row, except -inf
below a finite ``m``::

    sum(exp(x - h)) = s * exp(m - h)                   # exactly s where h is m
                    = exp(m - h)   where m is infinite or NaN

so that a row of -inf, or with inf or NaN, gives the result of the two stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import DataType, ir, tirx

from schedules.tir.expression_walk import loads, substitute, uses
from schedules.tir.extents import Extent
from schedules.workload.reduce import FLOATS, MAX_SUM_EXP, CanonicalLoops, ReduceWorkload


@dataclass(frozen=True)
class Result:
    """A value for each ``m``."""

    var: tirx.Var  # Stands for the value at the same ``m`` in other expressions of the group.
    output: tirx.Buffer | None
    """Its destination, row-major in ``m``; None if only the group uses it."""


@dataclass(frozen=True)
class Reduction:
    """One reduction, with its producers inlined."""

    workload: ReduceWorkload  # Operator, types, finish.
    loops: CanonicalLoops  # Axes of the data; an unknown extent equals only itself.
    value: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
    """The first field of the state of element ``(m, n)``, both int64."""
    results: tuple[Result, ...]  # Results of the operator, mostly one.

    @property
    def output(self) -> tirx.Buffer | None:
        """Destination of the only result."""
        [result] = self.results
        return result.output


@dataclass(frozen=True)
class Epilogue:
    """A value at ``m`` computed from results there."""

    value: Callable[[tirx.Expr], tirx.Expr]
    result: Result

    @property
    def results(self) -> tuple[Result]:
        """The only result."""
        return (self.result,)


@dataclass(frozen=True)
class ElementOutput:
    """A stored tensor of ``M x N`` elements."""

    value: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]  # The element ``(m, n)``, both int64.
    place: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]  # Its row-major position in the output.
    output: tirx.Buffer  # Its destination.
    stage: int
    """The first stage in whose pass over the data the element is known; the number of stages if it
    uses results of the last one."""


@dataclass(frozen=True)
class ColumnSums:
    """Sums of a function of the elements over groups of neighbouring rows."""

    value: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
    """The float32 summand ``(m, n)``, both int64."""
    output: tirx.Buffer  # Their destination, ``N`` sums of each group of rows.


@dataclass(frozen=True)
class ReductionStage:
    """Sisters, and the epilogues that can be computed once they are known, in order."""

    reductions: tuple[Reduction, ...]
    epilogues: tuple[Epilogue, ...]

    @property
    def results(self) -> tuple[Result, ...]:
        """Results of the sisters and of the epilogues."""
        parts: tuple[Reduction | Epilogue, ...] = (*self.reductions, *self.epilogues)
        return tuple(result for part in parts for result in part.results)

    @property
    def workloads(self) -> tuple[ReduceWorkload, ...]:
        """Operators and types."""
        return tuple(reduction.workload for reduction in self.reductions)


@dataclass(frozen=True)
class ReduceGroup:
    """Computation of one kernel."""

    func: tirx.PrimFunc  # Signature and attributes.
    stages: tuple[ReductionStage, ...]
    """Each has at least one reduction, and uses results of previous ones."""
    elements: tuple[ElementOutput, ...]  # Each is stored once.
    outputs: Extent
    reduced: Extent
    """``outputs`` and ``reduced``: ``M`` and ``N``."""
    columns: tuple[ColumnSums, ...] = ()  # All of the same groups of rows; only chains have any.
    turns: int = 1  # Rows of such a group, which the same threads process one after another.

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """Reductions of all stages."""
        return tuple(reduction for stage in self.stages for reduction in stage.reductions)

    @property
    def is_chain(self) -> bool:
        """Return whether a row must be finished before all of it is used."""
        return len(self.stages) > 1 or bool(self.elements_of(len(self.stages)))

    def elements_of(self, stage: int) -> tuple[ElementOutput, ...]:
        """Elements that are stored in the pass of a stage, or in one after all of them."""
        return tuple(element for element in self.elements if element.stage == stage)

    @property
    def has_epilogues(self) -> bool:
        """Return whether anything is computed from results at ``m``."""
        return any(stage.epilogues for stage in self.stages)

    @property
    def results(self) -> tuple[tirx.Var, ...]:
        """Variables of the results in expressions."""
        return tuple(result.var for stage in self.stages for result in stage.results)

    def itemsizes(self) -> list[int]:
        """Bytes of an element of every tensor that the stages read, at least one."""
        return [element_bytes(load) for load in self._loads()] or [1]

    def row_inputs(self) -> list[int]:
        """Bytes of an element of each tensor whose elements differ along a row."""
        return [element_bytes(load) for load in self._loads(along_row=True)]

    def row_outputs(self) -> list[int]:
        """Bytes of an element of each tensor of elements that is stored in the pass of a stage."""
        early = (element for element in self.elements if element.stage < len(self.stages))
        return [DataType(str(element.output.dtype)).bits // 8 or 1 for element in early]

    def late_outputs(self) -> list[int]:
        """Bytes of an element of each tensor of elements that uses results of the last stage."""
        late = self.elements_of(len(self.stages))
        return [DataType(str(element.output.dtype)).bits // 8 or 1 for element in late]

    def _loads(self, along_row: bool = False) -> list[ir.TensorLoad]:
        """One read of each tensor in the values of reductions, and of elements stored with them."""
        m, n = tirx.Var("m", "int64"), tirx.Var("n", "int64")
        by_source: dict[tirx.Buffer, ir.TensorLoad] = {}
        values = [reduction.value for reduction in self.reductions]
        values += [each.value for each in self.elements if each.stage < len(self.stages)]
        values += [each.value for each in self.columns]
        for value in values:
            for load in loads(value(m, n)):
                if not along_row or any(uses(index, n) for index in load.indices):
                    by_source.setdefault(load.source, load)
        return list(by_source.values())


def element_bytes(load: ir.TensorLoad) -> int:
    """Size of a loaded element."""
    return DataType(str(load.ty.dtype)).bits // 8 or 1


def in_one_stage(group: ReduceGroup) -> ReduceGroup | None:
    """Turn a chain into a group of one stage.

    Returns the group with sums of exponentials and the maxima of the same rows made one reduction
    each; None if stored elements use results, if there are more stages, or if the second one has
    anything else.
    """
    if len(group.stages) != 2 or any(element.stage > 0 for element in group.elements):
        return None
    first, second = group.stages
    pairs = [pair for total in second.reductions if (pair := _pair(first, total)) is not None]
    if len(pairs) < len(second.reductions):
        return None
    reductions: list[Reduction] = []
    totals: list[Epilogue] = []
    for reduction in first.reductions:
        own = [pair for pair in pairs if pair.maximum is reduction]
        merged, found = _merge(reduction, own) if own else (reduction, [])
        reductions.append(merged)
        totals += found
    stage = ReductionStage(tuple(reductions), (*first.epilogues, *totals, *second.epilogues))
    return replace(group, stages=(stage,))


@dataclass(frozen=True)
class _MaximumAndSum:
    """A maximum, and the sum of the exponentials of its data minus ``shift``, at ``m``."""

    maximum: Reduction
    total: Reduction
    shift: tirx.Expr
    m: tirx.Var


def _pair(first: ReductionStage, total: Reduction) -> _MaximumAndSum | None:
    """Find the maximum of the rows that belongs to ``total``, a sum of exponentials."""
    m, n = tirx.Var("m", "int64"), tirx.Var("n", "int64")
    exponent = _exponent(total.value(m, n))
    if total.workload.operator != "sum" or not isinstance(exponent, tirx.Sub):
        return None
    if uses(exponent.b, n):
        return None
    for maximum in first.reductions:
        is_float = maximum.workload.operator == "max" and maximum.workload.dtype in FLOATS
        if is_float and _is_same(maximum.value(m, n), exponent.a):
            return _MaximumAndSum(maximum, total, exponent.b, m)
    return None


def _merge(maximum: Reduction, pairs: list[_MaximumAndSum]) -> tuple[Reduction, list[Epilogue]]:
    """One reduction for a maximum and all sums that use it, with the sums as epilogues."""
    workloads = (maximum.workload, *(pair.total.workload for pair in pairs))
    dtype = max((of.acc_dtype for of in workloads), key=lambda name: DataType(name).bits)
    [largest] = maximum.results
    raw = tirx.Var("sum_exp", dtype)
    reduction = Reduction(
        replace(maximum.workload, operator=MAX_SUM_EXP, acc_dtype=dtype),
        maximum.loops,
        lambda m, n: maximum.value(m, n).astype(dtype),
        (largest, Result(raw, None)),
    )
    return reduction, [_total(pair, largest.var, raw) for pair in pairs]


def _total(pair: _MaximumAndSum, largest: tirx.Var, raw: tirx.Var) -> Epilogue:
    """A sum, from the maximum and the sum of exponentials relative to it."""
    dtype = str(raw.ty.dtype)

    def value(position: tirx.Expr) -> tirx.Expr:
        high = largest.astype(dtype)
        infinity = tirx.infinity(dtype)
        is_finite = tirx.abs(high) < infinity
        if _without_widening(pair.shift).same_as(largest):
            # NaN; TVM would simplify a difference of equal expressions to 0.
            terms = tirx.Select(is_finite, raw, infinity - tirx.abs(high))
        else:
            factor = tirx.exp(high - substitute(pair.shift, {pair.m: position}).astype(dtype))
            terms = tirx.Select(is_finite, raw, tirx.const(1, dtype)) * factor
            terms = tirx.Select(tirx.isnan(high), high, terms)
        return terms.astype(pair.total.workload.out_dtype)

    [stored] = pair.total.results
    return Epilogue(value, stored)


def _exponent(value: tirx.Expr) -> tirx.Expr | None:
    """``x`` if ``value`` is the exponential of ``x``, in any float type."""
    while isinstance(value, tirx.Cast) and _is_float(value.value):
        value = value.value
    is_exp = isinstance(value, ir.Call) and getattr(value.op, "name", "") == "tirx.exp"
    return _without_widening(value.args[0]) if is_exp else None


def _is_same(a: tirx.Expr, b: tirx.Expr) -> bool:
    """Return whether two expressions are equal, of whatever float type."""
    return bool(tvm_ffi.structural_equal(_without_widening(a), _without_widening(b)))


def _without_widening(value: tirx.Expr) -> tirx.Expr:
    while isinstance(value, tirx.Cast) and _is_float(value.value):
        if DataType(str(value.value.ty.dtype)).bits >= DataType(str(value.ty.dtype)).bits:
            break
        value = value.value
    return value


def _is_float(value: tirx.Expr) -> bool:
    return str(value.ty.dtype) in FLOATS
