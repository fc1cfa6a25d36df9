# SPDX-License-Identifier: Apache-2.0
"""Description of a reduction before it is scheduled: operator, types, axes, canonical form.

Loop coalescing (Panamera, section 3.1): the parallel loops become one of extent ``M``, the reduced
loops one of extent ``N``, each in the order of its axes. After unit axes are dropped and neighbours
of one kind merged, the innermost axis determines the form: *x* scans consecutive addresses by the
reduced loop, *y* by the parallel loop, and *all* has one output.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import OpError
from ..tir.extents import Extent, is_one, size_of, unravel

if TYPE_CHECKING:
    from tvm import tirx

Form = Literal["all", "x", "y"]

OPERATORS = (
    "sum",
    "prod",
    "min",
    "max",
    "and",
    "or",
    "mean",
    "sum_squares",
    "argmin",
    "argmax",
)
MAX_SUM_EXP = "max_sum_exp"  # Used by softmax in kernels only, since it has two results.
FINISHES = ("auto", "one_block", "atomic", "last_block")
FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")

_NARROW = {"float16": "float32", "bfloat16": "float32", "int8": "int32", "uint8": "int32"}
_FLOAT_ONLY = ("mean",)
_LOGICAL = ("and", "or")
_BOOL_OPERATORS = ("and", "or", "min", "max")


@dataclass(frozen=True)
class ReduceWorkload:
    """A reduction as its op describes it."""

    operator: str
    """One of :data:`OPERATORS`, or :data:`MAX_SUM_EXP` within a kernel. ``and`` and ``or`` are
    logical; ``argmin`` and ``argmax`` give the position in the reduced axes, flattened in row-major
    order, of the first extreme element."""
    axes: tuple[int, ...]  # Reduced axes, ascending, none negative.
    keepdims: bool  # Whether reduced axes stay in the output with extent 1.
    dtype: str  # Type of the data.
    acc_dtype: str
    """Type of the accumulators: ``float32`` for 16-bit floats, ``int32`` for 8-bit integers and
    bool, else that of the data, or a wider one on request."""
    finish: str = "auto"
    """One of :data:`FINISHES`: how the partial results of several GPU blocks are combined."""

    @classmethod
    def create(
        cls,
        operator: str,
        axes: Sequence[int] | None,
        ndim: int,
        dtype: str,
        keepdims: bool = False,
        acc_dtype: str | None = None,
        finish: str = "auto",
    ) -> ReduceWorkload:
        """Check the arguments of a user and fill in the defaults.

        Raises ``OpError`` if the operator, an axis, a type or the finish is unknown or does not fit
        the others.
        """
        if operator not in OPERATORS:
            raise OpError(f"reduction {operator!r} is unknown; expected one of {_list(OPERATORS)}")
        if finish not in FINISHES:
            raise OpError(f"finish {finish!r} is unknown; expected one of {_list(FINISHES)}")
        _check_dtype(operator, dtype)
        accumulator = acc_dtype or accumulation_dtype(operator, dtype)
        _check_accumulator(operator, dtype, accumulator)
        return cls(operator, normal_axes(axes, ndim), bool(keepdims), dtype, accumulator, finish)

    @property
    def out_dtype(self) -> str:
        """Type of the output: ``int64`` for positions, ``bool`` for logic, else the data's."""
        if self.is_arg:
            return "int64"
        return "bool" if self.operator in _LOGICAL else self.dtype

    @property
    def is_arg(self) -> bool:
        """Return whether the result is a position."""
        return self.operator in ("argmin", "argmax")

    def to_json(self) -> str:
        """A text for :meth:`from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ReduceWorkload:
        """Read the text that :meth:`to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "axes": tuple(fields["axes"])})


def accumulation_dtype(operator: str, dtype: str) -> str:
    """The default type of partial results."""
    if dtype == "bool" or operator in _LOGICAL:
        return "int32"
    return _NARROW.get(dtype, dtype)


def normal_axes(axes: Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Ascending axes without negative ones; None stands for all.

    Raises ``OpError`` if an axis is out of range or given twice.
    """
    if axes is None:
        return tuple(range(ndim))
    normalized = []
    for axis in axes:
        if isinstance(axis, bool) or int(axis) != axis or not -ndim <= int(axis) < ndim:
            raise OpError(f"axis {axis} is out of range; data has {ndim} axes")
        normalized.append(int(axis) % ndim)
    if len(set(normalized)) < len(normalized):
        raise OpError(f"axes {list(axes)} name an axis twice; give each reduced axis once")
    return tuple(sorted(normalized))


@dataclass(frozen=True)
class CanonicalLoops:
    """The two coalesced loops, and the recovery of subscripts from them."""

    shape: tuple[Extent, ...]  # Extents of the data's axes.
    axes: tuple[int, ...]  # Reduced axes.

    @property
    def parallel_axes(self) -> tuple[int, ...]:
        """Axes that are not reduced."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.axes)

    @property
    def outputs(self) -> Extent:
        """``M``, the extent of the coalesced parallel loop."""
        return size_of(self.shape[axis] for axis in self.parallel_axes)

    @property
    def reduced(self) -> Extent:
        """``N``, the extent of the coalesced reduced loop."""
        return size_of(self.shape[axis] for axis in self.axes)

    @property
    def runs(self) -> tuple[tuple[str, Extent], ...]:
        """Kinds (``P`` or ``R``) and extents from outermost to innermost, neighbours merged."""
        merged: list[tuple[str, Extent]] = []
        for axis, extent in enumerate(self.shape):
            if is_one(extent):
                continue
            kind = "R" if axis in self.axes else "P"
            if merged and merged[-1][0] == kind:
                merged[-1] = (kind, merged[-1][1] * extent)
            else:
                merged.append((kind, extent))
        return tuple(merged)

    @property
    def form(self) -> Form:
        """``all``, ``x`` or ``y``."""
        runs = self.runs
        if all(kind == "R" for kind, _ in runs):
            return "all"
        return "x" if runs[-1][0] == "R" else "y"

    def subscripts(self, m: tirx.Expr, n: tirx.Expr) -> list[tirx.Expr]:
        """Indices into the data: the last two lines of Formula (1)."""
        found: dict[int, tirx.Expr] = {}
        for axes, index in ((self.parallel_axes, m), (self.axes, n)):
            found |= zip(axes, unravel(index, [self.shape[axis] for axis in axes]), strict=True)
        return [found[axis] for axis in range(len(self.shape))]


def _check_dtype(operator: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise OpError(f"data has dtype {dtype}; expected one of {_list(DTYPES)}")
    if operator in _FLOAT_ONLY and dtype not in FLOATS:
        raise OpError(f"{operator} of {dtype}; expected a floating-point type: cast it first")
    if dtype == "bool" and operator not in (*_BOOL_OPERATORS, "argmin", "argmax"):
        raise OpError(
            f"{operator} of bool; expected a number type: cast it first, or reduce by 'and' or 'or'"
        )


def _check_accumulator(operator: str, dtype: str, accumulator: str) -> None:
    allowed = ("int32", "int64", "float32", "float64")
    if accumulator not in allowed:
        raise OpError(f"acc_dtype is {accumulator}; expected one of {_list(allowed)}")
    default = accumulation_dtype(operator, dtype)
    same_kind = ("float" in accumulator) == ("float" in default)
    if not same_kind or int(accumulator[-2:]) < int(default[-2:]):
        raise OpError(
            f"acc_dtype is {accumulator} for {operator} of {dtype}; expected {default} or a wider "
            "type of its kind"
        )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
