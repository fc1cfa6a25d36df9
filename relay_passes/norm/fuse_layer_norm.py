# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseLayerNorm``: layer norms as parts of the products before and behind them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst
from tvm.target import Target

from schedules.compute.norms import SEGMENT, row_mean, row_scale, segment_squares, segment_sums
from schedules.gpu.core.machine import GPUInfo, gpu_target
from schedules.gpu.gemm.matmul.matmul_pattern import MatmulFunction, read_matmul
from schedules.gpu.gemm.matmul.statistics_cost import (
    moments_cycles,
    norm_cycles,
    reading_cycles,
    takes_statistics,
)
from schedules.tir.extents import constant

from ..core.constants import array_of, tensor_constant
from ..core.expressions import ELEMENTWISE, Value, op_name, operands
from ..core.graph import Graph, Rule, function_graphs
from ..core.prim_functions import lowered_function

_MOST_COLUMNS = 2048  # two registers for each segment while a row's moments are combined


@dataclass(frozen=True, eq=False)
class Norm:
    """A layer norm of the rows of ``data``."""

    # ``[*rows, columns]``, float32.
    result: relax.Var
    data: relax.Var
    # Constants ``[columns]``, if any.
    gamma: relax.Expr | None
    beta: relax.Expr | None
    epsilon: float  # Added to the variance.


@dataclass
class NormProduct:
    """A product and what is computed from it element by element, each value read by the next."""

    steps: list[relax.Var]  # The product, then the others.
    is_data: bool = False  # Whether a norm is that of the last of them.
    # Norms that the steps read, by their results.
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
        by_start: dict[relax.Var, NormProduct] = {}
        for norm in norms:
            for end in (norm.data, *self.readers[norm.result]):
                steps = self._steps(end) if end is not None else None
                assert steps is not None, "a norm is read by products"
                known = by_start.setdefault(steps[0], NormProduct(steps))
                known.steps = max(known.steps, steps, key=len)
                if end is norm.data:
                    known.is_data = True
                else:
                    known.norms[norm.result] = norm
        return {product.end: product for product in by_start.values()}

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
        if op_name(value) not in ELEMENTWISE:
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


NAME = "matmul_of_norm"
"""Name of the functions."""
_WEIGHT, _SHIFT, _BIAS = "weight", "shift", "bias"  # constants that contain gamma and beta


@dataclass(frozen=True)
class NormInputs:
    """Tensors of a norm that replace its result."""

    # What is normalised, and the moments of its segments.
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

    ``values``: the values of its steps. ``inputs``: for the result of each norm that it reads, the
    tensors that it is computed from. ``known``: functions of other products; layers of a network
    have equal ones. ``arguments``: the tensors to call the function with. ``func``: the function,
    not scheduled; see :func:`.lowered_function`. ``matmul``: the product as the rule for products
    reads it.
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


_FUSIBLE, _OPAQUE = 4, 8  # tvm::relax::OpPatternKind: a product with an epilogue, and anything


@tvm.transform.module_pass(opt_level=0, name="FuseLayerNorm")
class FuseLayerNorm:
    """Make layer norms between products parts of these.

    Before::

        lv = R.add(R.add(R.matmul(a, w), b), residual)     # R.Tensor((1, 128, 768))
        lv1 = R.nn.layer_norm(lv, gamma, beta, axes=[-1])
        lv2 = R.add(R.matmul(lv1, w1), b1)
        lv3 = R.add(R.add(R.matmul(f(lv2), w2), b2), lv1)

    After::

        lv, sums, squares = R.call_tir(matmul_of_norm, (a, w, b, residual))
        moved = R.call_tir(matmul_of_norm1, (lv, sums, squares, gamma * w1, beta @ w1))
        lv2 = R.add(moved, b1)
        lv3 = R.call_tir(matmul_of_norm2, (f(lv2), w2, b2 + beta, lv, sums, squares, gamma))

    The first product also stores the sum of each 32 neighbours of a row, and the sum of their
    squared differences from their mean. Those that read the norm combine these to mean and variance
    of the row. As left factor they subtract the mean from each element on its way to the product,
    and scale the result; weights contain gamma, and a vector beta. In the epilogue they compute the
    norm itself. The rule :class:`schedules.gpu.Matmul` schedules the functions.

    A norm is fused where the estimates of :mod:`schedules.gpu.gemm.matmul.statistics_cost` promise
    a gain. Left alone: norms of other values than products with sums, quotients and extrema; norms
    that anything but products of constant matrices, or such an epilogue, reads; types other than
    float32, since the data of a product on 16-bit tensor cores would be float32 and its tile would
    take twice the bytes; rows of symbolic length or number, of more than 2048 columns or no
    multiple of 32; products of up to eight rows; functions that another pass has claimed, and all
    modules for other targets than ``cuda`` and ``opencl``. It runs before
    ``DecomposeNormalization``, which would take norms apart. The pass is idempotent.

    Parameters
    ----------
    target : Target | None
        Target of the module; the current target if None.
    """

    def __init__(self, target: Target | None = None) -> None:
        self.target = target

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        target = gpu_target(self.target)
        if target is None:
            return mod
        builder = relax.BlockBuilder(mod)
        rewritten = {
            name: graph.to_function()
            for name, graph in function_graphs(mod)
            if graph.sweep(_Fusion(Bindings(graph.func), target).rules(builder))
        }
        result = builder.get()
        result.update(rewritten)
        return result


class _Fusion:
    """Norms that are fused, and the functions of the products that take part.

    ``inputs``: from the data of the norms to what replaces these. ``products``: the products, by
    their last values. ``functions``: their functions.
    """

    def __init__(self, bindings: Bindings, target: Target) -> None:
        self.gpu = GPUInfo.from_target(target)
        norms, known = bindings.norms(), LoweredFunctions()
        while True:
            self.inputs = {norm.data: _placeholders(norm) for norm in norms}
            inputs = {norm.result: self.inputs[norm.data] for norm in norms}
            self.products = bindings.products(norms)
            with target:
                self.functions = {
                    end: NormFunction(product, bindings.values, inputs, known)
                    for end, product in self.products.items()
                }
            losing = [norm for norm in norms if not self._gains(norm)]
            if not losing:
                return
            norms = [norm for norm in norms if norm not in losing]

    def _gains(self, norm: Norm) -> bool:
        """Return whether a norm is predicted to cost less as a part of its products."""
        cycles = 0.0
        for end, product in self.products.items():
            is_read, is_data = norm.result in product.norms, end.same_as(norm.data)
            if not is_read and not is_data:
                continue
            matmul = self.functions[end].matmul
            if matmul is None or not takes_statistics(matmul, self.gpu):
                return False
            cycles += reading_cycles(matmul, self.gpu) if is_read else 0
            cycles += moments_cycles(matmul, self.gpu) if is_data else 0
        *rows, columns = map(int, norm.data.ty.shape.values)
        return cycles < norm_cycles(math.prod(rows), columns, self.gpu)

    def rules(self, builder: relax.BlockBuilder) -> dict[str, list[Rule]]:
        """Rules that replace the last values of the products; they add functions to ``builder``."""
        known: dict[relax.Expr, relax.Expr] = {}

        def rule(graph: Graph, _: relax.Expr) -> Value:
            end = graph.current
            if end not in self.functions:
                return None
            function, moments = self.functions[end], self.inputs.get(end)
            pattern = _FUSIBLE if moments is None else _OPAQUE
            assert function.func is not None, "the product was read from it"
            name = builder.add_func(function.func.with_attr("op_pattern", pattern), NAME)
            arguments = [known.get(argument, argument) for argument in function.arguments]
            if moments is None:
                return relax.call_tir(name, arguments, end.ty)
            types = [moments.data.ty, moments.sums.ty, moments.squares.ty]
            results = graph.emit(relax.call_tir(name, arguments, types))
            for number, placeholder in enumerate((moments.sums, moments.squares), start=1):
                known[placeholder] = graph.emit(relax.TupleGetItem(results, number))
            return relax.TupleGetItem(results, 0)

        return dict.fromkeys(("relax.matmul", *ELEMENTWISE), [rule])


def _placeholders(norm: Norm) -> NormInputs:
    """The tensors that a norm is computed from; variables for those that are still to be bound."""
    *rows, columns = norm.data.ty.shape.values
    kind = relax.TensorType((columns // SEGMENT, *rows), "float32")
    return NormInputs(norm.data, *(relax.Var(name, kind) for name in ("sums", "squares")))
