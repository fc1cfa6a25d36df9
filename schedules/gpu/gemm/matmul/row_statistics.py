# SPDX-License-Identifier: Apache-2.0
"""Statistics of rows in the function of a product: those it uses, and those it leaves behind.

::

    mean[m] = ..., scale[m] = ...                      # of segments, which another product stored
    C[m, n] = epilogue(sum_k (x[m, k] - mean[m]) * w[k, n], scale[m])
    sums[t, m], squares[t, m]                          # of the segment t of C[m]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx
from tvm.sym import Analyzer

from schedules.compute.norms import SEGMENT
from schedules.tir.block_expressions import Stage
from schedules.tir.expression_walk import loads
from schedules.tir.extents import constant, extent_of, unravel
from schedules.tir.index_math import i64, volume

from ...pointwise.element_program import ElementProgram
from ...pointwise.iteration_domain import IterationSpace


@dataclass(frozen=True)
class RowStatistics:
    """Values of each row that a product needs.

    Parameters
    ----------
    space : IterationSpace
        One axis, the rows; no stores.
    names : tuple[tirx.Var, ...]
        Stand for the values in the left factor and in the epilogue.
    values : tuple[tirx.Expr, ...]
        The values, by the steps of the space.
    """

    space: IterationSpace
    names: tuple[tirx.Var, ...]
    values: tuple[tirx.Expr, ...]


@dataclass(frozen=True)
class SegmentMoments:
    """Moments of segments of the result, stored ``[segments, rows]``.

    Parameters
    ----------
    source : tirx.Buffer
        The result that they are of.
    sums, squares : tirx.Buffer
        Outputs: the sum of a segment, and the sum of squared differences from its mean.
    """

    source: tirx.Buffer
    sums: tirx.Buffer
    squares: tirx.Buffer


@dataclass(frozen=True)
class SplitStages:
    """Stages of a function apart from its product.

    Parameters
    ----------
    before, after : list[Stage]
        Injective ones of whole tensors, before and behind the product.
    rows : list[Stage]
        Those of one value a row.
    known : dict[tirx.Buffer, tirx.Var]
        The values of a row that others read, with a variable for each.
    moments : SegmentMoments | None
        What the reductions behind the product compute.
    """

    before: list[Stage]
    after: list[Stage]
    rows: list[Stage]
    known: dict[tirx.Buffer, tirx.Var]
    moments: SegmentMoments | None

    @property
    def is_plain(self) -> bool:
        """Return whether there are no statistics of rows."""
        return not self.known and self.moments is None

    def statistics(self, product: Stage) -> RowStatistics | None:
        """The values of a row, if there are any."""
        if not self.known:
            return None
        row, shape = tirx.Var("row", "int64"), product.shape[:-1]
        indices = (*unravel(row, shape), i64(0))
        program = ElementProgram(self.rows)
        values = tuple(program.element(buffer, indices) for buffer in self.known)
        space = IterationSpace((row,), (extent_of(volume(shape)),), tuple(program.steps), ())
        return RowStatistics(space, tuple(self.known.values()), values)


def split_stages(
    outputs: Sequence[tirx.Buffer], stages: Sequence[Stage], product: Stage
) -> SplitStages | None:
    """Split the other stages of a product's function; None if they are of another kind."""
    place = stages.index(product)
    behind = [stage for stage in stages[place + 1 :] if stage.reduced]
    rest = [stage for stage in stages if stage is not product and stage not in behind]
    moments = _read_moments(behind, outputs) if behind else None
    if behind and moments is None:
        return None
    rows = _row_stages(rest, product)
    others = [stage for stage in rest if stage not in rows]
    if any(stage.reduced for stage in others):
        return None
    if any(stage.output in outputs for stage in rows):
        return None
    readers = [*others, product]
    read = {load.source for stage in readers for load in loads(stage.value)}
    needed = [stage.output for stage in rows if stage.output in read]
    known = {buffer: tirx.Var(buffer.name, buffer.dtype) for buffer in needed}
    if not _are_in_place(known, readers):
        return None
    before = [stage for stage in others if stage in stages[:place]]
    after = [stage for stage in others if stage not in before]
    return SplitStages(before, after, rows, known, moments)


def _row_stages(stages: Sequence[Stage], product: Stage) -> list[Stage]:
    """Reductions to one value a row, and what is computed from them alone."""
    found: list[Stage] = []
    shape = (*product.shape[:-1], 1)
    for stage in stages:
        follows = any(load.source.same_as(s.output) for s in found for load in loads(stage.value))
        if stage.shape == shape and (stage.reduced or follows):
            found.append(stage)
    return found


def _are_in_place(known: dict[tirx.Buffer, tirx.Var], stages: Sequence[Stage]) -> bool:
    """Return whether values of a row, and what is computed from them, are read by the same row."""
    follow = set(known)
    for stage in stages:
        read = [load for load in loads(stage.value) if load.source in follow]
        rows = stage.axes[:-1]
        if not all(len(load.indices) == len(rows) + 1 for load in read):
            return False
        if not all(_is_at(load, rows) for load in read):
            return False
        if read:
            follow.add(stage.output)
    return True


def _is_at(load: ir.TensorLoad, axes: Sequence[tirx.IterVar]) -> bool:
    """Return whether the leading subscripts are these axes; those of one element may be zero."""
    return all(
        axis.var.same_as(index) or (constant(axis.dom.extent) == 1 and constant(index) == 0)
        for index, axis in zip(load.indices, axes, strict=False)
    )


def _read_moments(stages: Sequence[Stage], outputs: Sequence[tirx.Buffer]) -> SegmentMoments | None:
    """The moments that two reductions compute, as :mod:`schedules.compute.norms` has them."""
    if len(stages) != 2 or not all(stage.output in outputs for stage in stages):
        return None
    sums, squares = stages
    element, square = (_summand(stage) for stage in stages)
    if not isinstance(element, ir.TensorLoad) or not isinstance(square, tirx.Mul):
        return None
    difference = square.a
    if not tvm_ffi.structural_equal(difference, square.b) or not isinstance(difference, tirx.Sub):
        return None
    mean = difference.b
    if not isinstance(mean, tirx.Mul) or _number(mean.b) != 1 / SEGMENT:
        return None
    source = element.source
    is_sum = isinstance(mean.a, ir.TensorLoad) and mean.a.source.same_as(sums.output)
    if not is_sum or not _is_at(mean.a, squares.axes):
        return None
    if not _is_of_segment(element, source, sums):
        return None
    if not _is_of_segment(difference.a, source, squares):
        return None
    return SegmentMoments(source, sums.output, squares.output)


def _number(expression: tirx.Expr) -> float | None:
    """Value of a constant of a floating-point type."""
    return float(expression.value) if isinstance(expression, tirx.FloatImm) else None


def _summand(stage: Stage) -> tirx.Expr | None:
    """Term that a stage adds to zero, element by element."""
    value = stage.value
    if not isinstance(value, tirx.Add) or getattr(stage.init, "value", None) != 0:
        return None
    is_own = isinstance(value.a, ir.TensorLoad) and value.a.source.same_as(stage.output)
    return value.b if is_own else None


def _is_of_segment(load: tirx.Expr, source: tirx.Buffer, stage: Stage) -> bool:
    """Return whether a read is that of the stage's segment of ``source``."""
    if not isinstance(load, ir.TensorLoad) or not load.source.same_as(source):
        return False
    if len(stage.reduced) != 1 or not stage.axes:
        return False
    [column], (segment, *rows) = stage.reduced, stage.axes
    if len(load.indices) != len(rows) + 1 or not _is_at(load, rows):
        return False
    expected = segment.var * SEGMENT + column.var
    width, columns = constant(column.dom.extent), constant(source.shape[-1])
    whole = width == SEGMENT and columns == SEGMENT * (constant(segment.dom.extent) or 0)
    return whole and bool(Analyzer().can_prove_equal(load.indices[-1], expected))
