# SPDX-License-Identifier: Apache-2.0
"""Loops, types and operator of a reduction, on which the choice of its nest depends.

The workload of the templates (:mod:`.templates`) if all extents are known.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property

import tvm_ffi

from schedules.tir.extents import constant
from schedules.tir.vector_math import is_expensive
from schedules.workload.reduce import DTYPES, MAX_SUM_EXP, OPERATORS

from .source import Axis, ReduceSource

SYMBOLIC = 1024
"""Assumed for a symbolic extent."""


@dataclass(frozen=True)
class ReductionLoops:
    """Loops of one reduction, as far as the choice of its nest depends on them.

    Parameters
    ----------
    operator, dtype, acc_dtype : str
        Operator, type of the elements, and type of the states in registers.
    kinds : str
        ``P`` (parallel) or ``R`` (reduced) for each loop, outermost first.
    extents : tuple[int | None, ...]
        Iterations of each loop; None where symbolic.
    strides : tuple[tuple[int | None, ...], ...]
        For each load of an element, the stride of its address along each loop; None where it is
        no constant.
    has_functions : bool
        Whether an element takes an elementary function, such as the exponential.
    is_stream : bool
        Whether the two innermost loops, reduced rows of parallel columns, read all their data one
        element after the other.
    """

    operator: str
    dtype: str
    acc_dtype: str
    kinds: str
    extents: tuple[int | None, ...]
    strides: tuple[tuple[int | None, ...], ...] = ()
    has_functions: bool = False
    is_stream: bool = False

    @classmethod
    def of(cls, source: ReduceSource) -> ReductionLoops:
        """The loops of a reduction."""
        strides = (
            tuple(stride if stride is None else constant(stride) for stride in load.values())
            for load in source.strides
        )
        return cls(
            operator=source.workload.operator,
            dtype=source.workload.dtype,
            acc_dtype=source.registers.acc_dtype,
            kinds="".join("R" if axis.reduced else "P" for axis in source.axes),
            extents=tuple(axis.size for axis in source.axes),
            strides=tuple(strides),
            has_functions=is_expensive(source.element),
            is_stream=_is_stream(source),
        )

    @classmethod
    def from_json(cls, text: str) -> ReductionLoops:
        """Read the JSON of a workload.

        Raises
        ------
        ValueError
            If it is anything else, or an extent is symbolic.
        """
        values = json.loads(text)
        strides = tuple(map(tuple, values["strides"]))
        found = cls(**{**values, "extents": tuple(values["extents"]), "strides": strides})
        count = len(found.extents)
        if not (
            found.operator in (*OPERATORS, MAX_SUM_EXP)
            and {found.dtype, found.acc_dtype} <= set(DTYPES)
            and len(found.kinds) == count == found.kinds.count("P") + found.kinds.count("R")
            and "R" in found.kinds
            and all(type(extent) is int and extent > 0 for extent in found.extents)
            and (not found.is_stream or found.kinds.endswith("RP"))
        ):
            raise ValueError(f"{text:.100} describes no reduction")
        return found

    @property
    def is_static(self) -> bool:
        """Return whether all extents are known."""
        return None not in self.extents

    @cached_property
    def parallel(self) -> tuple[int | None, ...]:
        """Extents of the parallel loops."""
        return self._extents_of("P")

    @cached_property
    def reduced(self) -> tuple[int | None, ...]:
        """Extents of the reduced loops."""
        return self._extents_of("R")

    def _extents_of(self, kind: str) -> tuple[int | None, ...]:
        pairs = zip(self.kinds, self.extents, strict=True)
        return tuple(extent for own, extent in pairs if own == kind)

    @cached_property
    def elements(self) -> int | None:
        """Reduced elements in all; None where an extent is symbolic."""
        return None if None in self.extents else estimate(self.extents)

    @property
    def is_arg(self) -> bool:
        """Return whether the result is a position."""
        return self.operator in ("argmin", "argmax")

    @property
    def is_heavy(self) -> bool:
        """Return whether a step is so long that unrolling it less compiles and runs as fast."""
        return self.is_arg or self.has_functions

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return tvm_ffi.dtype(self.dtype).itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of a state in registers, without its position."""
        return tvm_ffi.dtype(self.acc_dtype).itemsize


def estimate(extents: tuple[int | None, ...]) -> int:
    """Product of extents; a symbolic one counts as :data:`SYMBOLIC`."""
    return math.prod(SYMBOLIC if extent is None else extent for extent in extents)


def _is_stream(source: ReduceSource) -> bool:
    """Return whether each row begins where the previous one ends, at all addresses."""
    if len(source.axes) < 2 or source.workload.is_arg:
        return False
    rows, columns = source.axes[-2:]
    if columns.reduced or not rows.reduced or columns.size is None:
        return False
    if source.bare & {rows.var, columns.var}:
        return False
    return all(_is_contiguous(strides, rows, columns) for strides in source.strides)


def _is_contiguous(strides: dict, rows: Axis, columns: Axis) -> bool:
    row, column = strides[rows.var], strides[columns.var]
    if row is None or column is None:
        return False
    return tvm_ffi.structural_equal(row, column * columns.extent)
