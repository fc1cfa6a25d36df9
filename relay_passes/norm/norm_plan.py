# SPDX-License-Identifier: Apache-2.0
"""Layer norms of products that only products read, and these products with what follows them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tvm import relax
from tvm.ir import GenericConst

from schedules.compute.norms import SEGMENT
from schedules.tir.extents import constant

from ..core.expressions import Value, op_name, operands

_MOST_COLUMNS = 2048  # two registers for each segment while a row's moments are combined
EPILOGUE = (
    "relax.add",
    "relax.subtract",
    "relax.multiply",
    "relax.divide",
    "relax.maximum",
    "relax.minimum",
)
"""Ops between a product and a norm, or where a norm is read."""


@dataclass(frozen=True, eq=False)
class Norm:
    """A layer norm of the rows of ``data``.

    Parameters
    ----------
    result, data : relax.Var
        ``[*rows, columns]``, float32.
    gamma, beta : relax.Expr | None
        Constants ``[columns]``, if any.
    epsilon : float
        Added to the variance.
    """

    result: relax.Var
    data: relax.Var
    gamma: relax.Expr | None
    beta: relax.Expr | None
    epsilon: float


@dataclass
class NormProduct:
    """A product and what is computed from it element by element, each value read by the next.

    Parameters
    ----------
    steps : list[relax.Var]
        The product, then the others.
    is_data : bool
        Whether a norm is that of the last of them.
    norms : dict[relax.Var, Norm]
        Those that the steps read, by their results.
    """

    steps: list[relax.Var]
    is_data: bool = False
    norms: dict[relax.Var, Norm] = field(default_factory=dict)

    @property
    def end(self) -> relax.Var:
        """The last value."""
        return self.steps[-1]


class Bindings:
    """Values of the variables of a function, and their readers."""

    def __init__(self, func: relax.Function) -> None:
        self.values: dict[relax.Var, relax.Expr] = {}
        self.readers: dict[relax.Var, list[relax.Var | None]] = defaultdict(list)
        self._block: dict[relax.Var, int] = {}
        for number, block in enumerate(func.body.blocks):
            for binding in block.bindings:
                is_plain = isinstance(binding, relax.VarBinding)
                if is_plain and isinstance(block, relax.DataflowBlock):
                    self.values[binding.var] = binding.value
                    self._block[binding.var] = number
                for var in operands(binding.value):
                    self.readers[var].append(binding.var)
        for var in operands(func.body.body):
            self.readers[var].append(None)

    def norms(self) -> list[Norm]:
        """The layer norms that may become a part of the products before and behind."""
        found = [self._norm(var) for var in self.values]
        return [norm for norm in found if norm is not None]

    def products(self, norms: Iterable[Norm]) -> dict[relax.Var, NormProduct]:
        """The products that norms take part in, by their last values."""
        found: dict[relax.Var, NormProduct] = {}
        for norm in norms:
            for end in (norm.data, *self.readers[norm.result]):
                steps = self._steps(end) if end is not None else None
                assert steps is not None, "a norm is read by products"
                known = found.setdefault(steps[0], NormProduct(steps))
                known.steps = max(known.steps, steps, key=len)
                if end is norm.data:
                    known.is_data = True
                else:
                    known.norms[norm.result] = norm
        return {product.end: product for product in found.values()}

    def _norm(self, var: relax.Var) -> Norm | None:
        """The norm bound to a variable, if it is one that products compute and read."""
        call = self.values[var]
        if op_name(call) != "relax.nn.layer_norm" or not _is_wide(call):
            return None
        data, gamma, beta = call.args
        attrs = call.attrs
        gamma, beta = gamma if attrs.scale else None, beta if attrs.center else None
        if not all(weight is None or isinstance(weight, GenericConst) for weight in (gamma, beta)):
            return None
        readers = self.readers[var]
        if not readers or self._steps(data) is None or not self._are_together(var, data, *readers):
            return None
        if not all(reader is not None and self._reads(reader, var) for reader in readers):
            return None
        return Norm(var, data, gamma, beta, float(attrs.epsilon))

    def _are_together(self, *variables: relax.Var | None) -> bool:
        """Return whether variables are of one dataflow block."""
        return len({self._block.get(var, -1) for var in variables}) == 1

    def _reads(self, reader: relax.Var, var: relax.Var) -> bool:
        """Return whether a reader is a product of rows, or a part of what follows one."""
        value: Value = self.values.get(reader)
        if op_name(value) == "relax.matmul":
            left, right = value.args
            is_matrix = isinstance(right, GenericConst) and right.ty.ndim == 2
            return is_matrix and left.same_as(var) and _is_float32(reader)
        return self._steps(reader) is not None and self.readers[var].count(reader) == 1

    def _steps(self, end: relax.Expr) -> list[relax.Var] | None:
        """The product that a value is computed from element by element, and the steps to it."""
        value: Value = self.values.get(end) if isinstance(end, relax.Var) else None
        if not _is_float32(end):
            return None
        if op_name(value) == "relax.matmul":
            is_matrix = value.args[1].ty.ndim == 2 and _is_float32(value.args[0])
            return [end] if is_matrix and value.args[0].ty.ndim >= 2 else None
        if op_name(value) not in EPILOGUE:
            return None
        for argument in value.args:
            alone = isinstance(argument, relax.Var) and len(self.readers[argument]) == 1
            alone = alone and self._are_together(argument, end) and _is_like(argument, end)
            steps = self._steps(argument) if alone else None
            if steps is not None:
                return [*steps, end]
        return None


def _is_wide(norm: relax.Call) -> bool:
    """Return whether a norm is that of whole rows of float32, in segments."""
    data = norm.args[0]
    if not _is_float32(data) or data.ty.shape is None or data.ty.ndim < 2:
        return False
    extents = [constant(extent) for extent in data.ty.shape.values]
    columns, axes = extents[-1], [int(axis) % len(extents) for axis in norm.attrs.axes]
    if None in extents or columns is None or axes != [len(extents) - 1]:
        return False
    return columns % SEGMENT == 0 and 0 < columns <= _MOST_COLUMNS


def _is_float32(expr: relax.Expr) -> bool:
    return isinstance(expr.ty, relax.TensorType) and str(expr.ty.dtype) == "float32"


def _is_like(expr: relax.Expr, other: relax.Expr) -> bool:
    """Return whether two tensors have one shape and one type."""
    return bool(expr.ty == other.ty)
