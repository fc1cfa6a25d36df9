# SPDX-License-Identifier: Apache-2.0
"""Function of a product that normalises what it reads, and stores moments of what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GenericConst

from schedules.compute.norms import row_mean, row_scale, segment_squares, segment_sums
from schedules.gpu.gemm.matmul.matmul_pattern import MatmulFunction, read_matmul

from ..core.constants import array_of, tensor_constant
from ..core.expressions import op_name
from ..core.lowered_function import lowered_function
from .norm_plan import Norm, NormProduct

NAME = "matmul_of_norm"
"""Name of the functions."""
_WEIGHT, _SHIFT, _BIAS = "weight", "shift", "bias"  # constants that contain gamma and beta


@dataclass(frozen=True)
class NormInputs:
    """Tensors of a norm that replace its result.

    Parameters
    ----------
    data, sums, squares : relax.Expr
        What is normalised, and the moments of its segments.
    """

    data: relax.Expr
    sums: relax.Expr
    squares: relax.Expr


class LoweredFunctions:
    """Functions that were lowered and read before."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[tvm.IRModule, tuple[Any, Any]]] = {}

    def lowered(
        self, builder: relax.BlockBuilder
    ) -> tuple[tirx.PrimFunc | None, MatmulFunction | None]:
        """The function in a builder as a PrimFunc, and as the rule for products reads it."""
        mod = builder.get()
        key = tvm_ffi.structural_hash(mod)
        if key not in self._found or not tvm_ffi.structural_equal(self._found[key][0], mod):
            func = lowered_function(builder, NAME)
            self._found[key] = mod, (func, None if func is None else read_matmul(func))
        return self._found[key][1]


class NormFunction:
    """The function of a product.

    Parameters
    ----------
    product : NormProduct
        The product.
    values : Mapping
        The values of its steps.
    inputs : Mapping
        For the result of each norm that it reads, the tensors that it is computed from.
    known : LoweredFunctions
        Functions of other products; layers of a network have equal ones.

    Attributes
    ----------
    arguments : list[relax.Expr]
        The tensors to call the function with.
    func : tirx.PrimFunc | None
        The function, not scheduled; see :func:`.lowered_function`.
    matmul : MatmulFunction | None
        The product as the rule for products reads it.
    """

    def __init__(
        self,
        product: NormProduct,
        values: Mapping[relax.Var, relax.Expr],
        inputs: Mapping[relax.Var, NormInputs],
        known: LoweredFunctions,
    ) -> None:
        self.product, self.values, self.inputs = product, values, inputs
        self.arguments: list[relax.Expr] = []
        self._builder = relax.BlockBuilder()
        self._local: dict[Any, relax.Expr] = {}
        self._rows: dict[relax.Var, tuple[relax.Expr, relax.Expr]] = {}
        self._bias = self._find_bias()
        self._build()
        self.func, self.matmul = known.lowered(self._builder)

    def _build(self) -> None:
        builder = self._builder
        self._add_inputs()
        params = list(self._local.values())
        with builder.function(NAME, params, {"Primitive": True}, private=True):
            with builder.dataflow():
                for result, norm in self.product.norms.items():
                    self._rows[result] = self._row_values(norm)
                for var in self.product.steps:
                    self._local[var] = self._step(self.values[var])
                results = builder.emit_output(self._results())
            builder.emit_func_output(results)

    def _add_inputs(self) -> None:
        first = self.product.steps[0]
        for var in self.product.steps:
            for operand in self.values[var].args:
                if operand in self.product.steps or _is_number(operand):
                    continue
                if operand in self.product.norms:
                    self._add_norm(self.product.norms[operand], is_factor=var is first)
                elif operand.same_as(self._bias):
                    self._add(_BIAS, self._with_betas(operand))
                elif not (var is first and self._folded(operand)):
                    self._add(operand, operand)

    def _find_bias(self) -> relax.Expr | None:
        """A constant vector to which the vectors beta of what else is added may be added before."""
        steps = [self.values[var] for var in self.product.steps[1:]]
        if any(op_name(step) != "relax.add" for step in steps):
            return None
        added = [operand for step in steps for operand in step.args]
        found = [e for e in added if isinstance(e, GenericConst) and e.ty.ndim == 1]
        return found[0] if len(found) == 1 else None

    def _with_betas(self, bias: relax.Expr) -> relax.Expr:
        result = array_of(bias).astype("float64")
        for var in self.product.steps[1:]:
            for norm in filter(None, map(self.product.norms.get, self.values[var].args)):
                result = result if norm.beta is None else result + array_of(norm.beta)
        return tensor_constant(result, "float32")

    def _folded(self, weight: relax.Expr) -> bool:
        """Return whether a weight is replaced by one with the norm's factors."""
        return self._factor_norm() is not None and isinstance(weight, GenericConst)

    def _factor_norm(self) -> Norm | None:
        """The norm of the left factor."""
        return self.product.norms.get(self.values[self.product.steps[0]].args[0])

    def _add(self, key: Any, tensor: relax.Expr) -> None:
        if key not in self._local:
            self._local[key] = relax.Var(f"p{len(self._local)}", tensor.ty)
            self.arguments.append(tensor)

    def _add_norm(self, norm: Norm, is_factor: bool) -> None:
        given = self.inputs[norm.result]
        for tensor in (given.data, given.sums, given.squares):
            self._add(tensor, tensor)
        if not is_factor:
            for weight in (norm.gamma, None if self._bias is not None else norm.beta):
                if weight is not None:
                    self._add(weight, weight)
            return
        weight = self.values[self.product.steps[0]].args[1]
        matrix = array_of(weight)
        scale = 1 if norm.gamma is None else array_of(norm.gamma)[:, None]
        self._add(_WEIGHT, tensor_constant(matrix * scale, "float32"))
        if norm.beta is not None and array_of(norm.beta).any():
            shift = array_of(norm.beta).astype("float64") @ matrix
            self._add(_SHIFT, tensor_constant(shift, "float32"))

    def _row_values(self, norm: Norm) -> tuple[relax.Expr, relax.Expr]:
        """Mean of each row, and the inverse of its standard deviation."""
        given, emit = self.inputs[norm.result], self._builder.emit_te
        sums, squares = self._local[given.sums], self._local[given.squares]
        mean = emit(row_mean, sums)
        return mean, emit(row_scale, sums, squares, mean, norm.epsilon)

    def _step(self, value: relax.Expr) -> relax.Expr:
        emit = self._builder.emit
        norm = self._factor_norm()
        if op_name(value) == "relax.matmul" and norm is not None:
            mean, scale = self._rows[norm.result]
            left = emit(relax.op.subtract(self._local[self.inputs[norm.result].data], mean))
            product = emit(relax.op.matmul(left, self._local[_WEIGHT]))
            result = emit(relax.op.multiply(product, scale))
            shift = self._local.get(_SHIFT)
            return result if shift is None else emit(relax.op.add(result, shift))
        operands = [self._operand(operand) for operand in value.args]
        return emit(relax.Call(value.op, operands, value.attrs, value.ty_args))

    def _operand(self, operand: relax.Expr) -> relax.Expr:
        """An operand of a step, with norms computed where they are read."""
        norm = self.product.norms.get(operand)
        if norm is None:
            return self._local.get(_BIAS if operand.same_as(self._bias) else operand, operand)
        emit, (mean, scale) = self._builder.emit, self._rows[norm.result]
        data = self._local[self.inputs[norm.result].data]
        result = emit(relax.op.multiply(emit(relax.op.subtract(data, mean)), scale))
        if norm.gamma is not None:
            result = emit(relax.op.multiply(result, self._local[norm.gamma]))
        if norm.beta is None or self._bias is not None:
            return result
        return emit(relax.op.add(result, self._local[norm.beta]))

    def _results(self) -> relax.Expr:
        end = self._local[self.product.end]
        if not self.product.is_data:
            return end
        sums = self._builder.emit_te(segment_sums, end)
        return relax.Tuple([end, sums, self._builder.emit_te(segment_squares, end, sums)])


def _is_number(expr: relax.Expr) -> bool:
    return isinstance(expr, GenericConst) and expr.ty.ndim == 0
