# SPDX-License-Identifier: Apache-2.0
"""Workload of the templates of a group of reductions: all that a configuration depends on.

Tensors and expressions are left out. Loops are those of the merged axes, so that groups whose
kernels differ in the shapes of their tensors only have the same workload, and the same records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tvm import ir, tirx

from schedules.tir.expression_walk import nodes
from schedules.tir.extents import Extent, constant
from schedules.workload.reduce import (
    DTYPES,
    FINISHES,
    MAX_SUM_EXP,
    OPERATORS,
    CanonicalLoops,
    Form,
    ReduceWorkload,
)

from .group import ReduceGroup, Reduction, ReductionStage, in_one_stage


@dataclass(frozen=True)
class ReductionWorkload:
    """One reduction of a group."""

    workload: ReduceWorkload  # Operator, types, finish, and the reduced ones of the merged axes.
    loops: CanonicalLoops  # The merged axes of its data.

    @classmethod
    def of(cls, reduction: Reduction) -> ReductionWorkload:
        """The workload of a reduction."""
        runs = reduction.loops.runs
        axes = tuple(axis for axis, (kind, _) in enumerate(runs) if kind == "R")
        loops = CanonicalLoops(tuple(extent for _, extent in runs), axes)
        return cls(replace(reduction.workload, axes=axes, keepdims=False), loops)


@dataclass(frozen=True)
class StageWorkload:
    """Sisters, and how many values are computed from their results."""

    reductions: tuple[ReductionWorkload, ...]  # One or more.
    epilogues: int  # Number of values at each ``m``.

    @classmethod
    def of(cls, stage: ReductionStage) -> StageWorkload:
        """The workload of a stage."""
        return cls(tuple(map(ReductionWorkload.of, stage.reductions)), len(stage.epilogues))

    @property
    def workloads(self) -> tuple[ReduceWorkload, ...]:
        """Operators and types."""
        return tuple(reduction.workload for reduction in self.reductions)


@dataclass(frozen=True)
class GroupWorkload:
    """A group of reductions, as far as the choice of its configuration depends on it."""

    stages: tuple[StageWorkload, ...]  # Stages of :class:`~.group.ReduceGroup`.
    itemsizes: tuple[int, ...]  # Bytes of an element of every tensor that the stages read.
    row_inputs: tuple[int, ...]
    row_outputs: tuple[int, ...] = ()
    """``row_inputs`` and ``row_outputs``: the same of each tensor whose elements differ along a
    row, and of each tensor of elements that is stored in the pass of a stage."""
    late_outputs: tuple[int, ...] = ()
    """The same of each tensor of elements that uses results of the last stage."""
    functions: int = 0  # Calls of functions for an element, in all stages.
    one_stage: GroupWorkload | None = None
    """The same group computed in one stage (:mod:`.group`), if that is possible."""
    columns: int = 0
    turns: int = 1
    """``columns`` and ``turns``: number of sums of columns, and rows of each group of rows over
    which they go."""

    @classmethod
    def of(cls, group: ReduceGroup) -> GroupWorkload:
        """The workload of a group."""
        merged = in_one_stage(group) if group.is_chain and not group.columns else None
        return cls(
            stages=tuple(map(StageWorkload.of, group.stages)),
            itemsizes=tuple(group.itemsizes()),
            row_inputs=tuple(group.row_inputs()),
            row_outputs=tuple(group.row_outputs()),
            late_outputs=tuple(group.late_outputs()),
            functions=_functions(group),
            one_stage=None if merged is None else cls.of(merged),
            columns=len(group.columns),
            turns=group.turns,
        )

    @classmethod
    def from_json(cls, text: str) -> GroupWorkload:
        """Read the JSON of a workload.

        Raises ``ValueError`` if it describes no group of reductions of known extents.
        """
        found = _read_group(json.loads(text))
        if not found.is_sound or (found.one_stage and not found.one_stage.is_sound):
            raise ValueError(f"{text:.100} describes no group of reductions")
        return found

    @cached_property
    def reductions(self) -> tuple[ReductionWorkload, ...]:
        """Reductions of all stages."""
        return tuple(reduction for stage in self.stages for reduction in stage.reductions)

    @property
    def loops(self) -> CanonicalLoops:
        """Loops of the first reduction."""
        return self.reductions[0].loops

    @property
    def outputs(self) -> Extent:
        """``M``."""
        return self.loops.outputs

    @property
    def reduced(self) -> Extent:
        """``N``."""
        return self.loops.reduced

    @property
    def form(self) -> Form:
        """``all``, ``x`` or ``y``."""
        return self.loops.form

    @property
    def title(self) -> str:
        """Operators, type and loops."""
        operators = ", then ".join(
            " and ".join(one.operator for one in stage.workloads) for stage in self.stages
        )
        dtype = self.reductions[0].workload.dtype
        return f"{operators} of {dtype}, M {self.outputs}, N {self.reduced}, form {self.form}"

    @property
    def is_chain(self) -> bool:
        """Return whether a row must be finished before all of it is used."""
        return len(self.stages) > 1 or bool(self.late_outputs)

    @property
    def has_epilogues(self) -> bool:
        """Return whether anything is computed from results at ``m``."""
        return any(stage.epilogues for stage in self.stages)

    @property
    def is_static(self) -> bool:
        """Return whether all extents are known, and none is zero."""
        return all(constant(extent) for one in self.reductions for extent in one.loops.shape)

    @property
    def is_sound(self) -> bool:
        """Return whether it could be that of a function: types and extents agree."""
        if not all(map(_is_sound, self.reductions)):
            return False
        sizes = (*self.itemsizes, *self.row_inputs, *self.row_outputs, *self.late_outputs)
        same = {(one.loops.outputs, one.loops.reduced, one.loops.form) for one in self.reductions}
        return (
            all(stage.reductions for stage in self.stages)
            and len(same) == 1
            and bool(self.itemsizes)
            and all(type(size) is int and 1 <= size <= 8 for size in sizes)
            and not (self.one_stage and (self.one_stage.is_chain or not self.is_chain))
            and all(type(number) is int for number in (self.columns, self.turns))
            and (self.turns == 1 if self.columns == 0 else self.is_chain and self.turns >= 1)
        )


def _is_sound(reduction: ReductionWorkload) -> bool:
    workload, shape = reduction.workload, reduction.loops.shape
    return (
        workload.operator in (*OPERATORS, MAX_SUM_EXP)
        and {workload.dtype, workload.acc_dtype} <= set(DTYPES)
        and workload.finish in FINISHES
        and workload.axes == reduction.loops.axes
        and all(type(extent) is int and extent > 1 for extent in shape)
        and all(type(axis) is int and 0 <= axis < len(shape) for axis in workload.axes)
    )


def _functions(group: ReduceGroup) -> int:
    """Calls of functions for an element."""
    m, n = tirx.Var("m", "int64"), tirx.Var("n", "int64")
    values = [reduction.value(m, n) for reduction in group.reductions]
    values += [element.value(m, n) for element in group.elements]
    values += [columns.value(m, n) for columns in group.columns]
    return sum(len(nodes(value, ir.Call)) for value in values)


def _read_group(values: Mapping[str, Any]) -> GroupWorkload:
    one_stage = values["one_stage"]
    sizes = ("itemsizes", "row_inputs", "row_outputs", "late_outputs")
    read: dict[str, Any] = {name: tuple(values[name]) for name in sizes}
    read["stages"] = tuple(map(_read_stage, values["stages"]))
    read["one_stage"] = None if one_stage is None else _read_group(one_stage)
    return GroupWorkload(**{**values, **read})


def _read_stage(values: Mapping[str, Any]) -> StageWorkload:
    return StageWorkload(**{**values, "reductions": tuple(_read_all(values["reductions"]))})


def _read_all(values: Iterable[Mapping[str, Any]]) -> Iterable[ReductionWorkload]:
    for one in values:
        workload, loops = dict(one["workload"]), one["loops"]
        workload["axes"] = tuple(workload["axes"])
        shape = CanonicalLoops(tuple(loops["shape"]), tuple(loops["axes"]))
        yield ReductionWorkload(ReduceWorkload(**workload), shape)
