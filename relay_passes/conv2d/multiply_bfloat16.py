# SPDX-License-Identifier: Apache-2.0
"""Pass ``MultiplyBfloat16``: convolutions and matrix products of float32 in bfloat16, on CPUs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
import tvm
import tvm_ffi
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..core.constants import array_of, tensor_constant
from ..core.expressions import MOVES, is_claimed, op_name, operands
from ..op.widen_weight import LEAST_ELEMENTS
from .conv_chain import read_activation, read_convolution

_HALF, _FLOAT = "bfloat16", "float32"
_CONV2D, _MATMUL, _ADD = "relax.nn.conv2d", "relax.matmul", "relax.add"
_MOVES = frozenset(
    [*MOVES, "relax.flatten", "relax.strided_slice", "relax.nn.max_pool2d", "relax.nn.pad"]
    + ["relax.tvm_fusion.channel_shuffle"]
)
"""Ops whose results are elements of their first operand, or a constant."""

FEW_ROWS = 16
"""Rows of a product up to which its matrix alone matters; ``MultiplyNarrow`` takes it."""
LEAST_COLUMNS = 16
"""Columns of a matrix below which it is not kept in bfloat16, or of few elements."""


@tvm.transform.module_pass(opt_level=0, name="MultiplyBfloat16")
class MultiplyBfloat16:
    """Round what convolutions and matrix products of float32 multiply to bfloat16.

    Before::

        lv = R.nn.conv2d(x, w1)                                     # float32
        lv1 = R.nn.relu(lv)
        lv2 = R.nn.conv2d(lv1, w2)
        lv3 = R.add(lv2, lv1)

    After, with weights of bfloat16::

        x16 = R.astype(x, "bfloat16")
        lv = R.nn.conv2d(x16, w1, out_dtype="float32")
        lv1 = R.nn.relu(lv)
        lv1_16 = R.astype(lv1, "bfloat16")
        lv2 = R.nn.conv2d(lv1_16, w2, out_dtype="float32")
        lv3 = R.add(lv2, R.astype(lv1_16, "float32"))

    So each tensor that a product reads is stored once, in bfloat16, and so it is through ops that
    only move elements, and as the residual of a convolution; all arithmetic but the products stays
    float32. Products of at least 17 rows
    with a constant matrix become 1x1 convolutions, each row a pixel, together with a bias, a
    residual and an activation after them; those of fewer rows are left to ``MultiplyNarrow``, and
    products of two activations become products of float32 that are rounded. Inputs and outputs of a
    function keep their types. Left alone: convolutions that ``FuseEpilogue`` leaves alone, other
    types, and functions that belong to a backend.

    Parameters
    ----------
    exact : bool
        Whether to leave alone products one of whose factors would be rounded: then only those of
        networks that are stored in bfloat16 are rewritten, and all numbers stay.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite all functions of Relax that are ours."""
        rewriter = _Rewriter(mod, self.exact)
        for var, function in mod.functions_items():
            if isinstance(function, relax.Function) and not is_claimed(function):
                rewriter.read(function)
                rewritten = relax.analysis.remove_all_unused(rewriter.visit_expr(function))
                rewriter.builder_.update_func(var, rewritten)
        return rewriter.builder_.get()


@mutator
class _Rewriter(PyExprMutator):
    """Binds the twin of bfloat16 beside each tensor that products read."""

    def __init__(self, mod: IRModule, exact: bool) -> None:
        super().__init__(mod)
        self._exact = exact
        self._products: set[relax.Var] = set()
        self._wanted: set[relax.Var] = set()
        self._returned: set[relax.Var] = set()
        self._uses: Counter[relax.Var] = Counter()
        self._halves: dict[relax.Var, relax.Var] = {}
        self._pixels: dict[relax.Var, relax.Var] = {}  # rows as pixels of [rows, columns, 1, 1]
        self._weights: dict[tuple[relax.Expr, bool], relax.Expr] = {}

    def read(self, function: relax.Function) -> None:
        """Note what is read, and what products read, also through ops that move elements."""
        bindings = [binding for block in function.body.blocks for binding in block.bindings]
        values = {binding.var: binding.value for binding in bindings}
        self._wanted, self._uses = set(), Counter(operands(function.body.body))
        self._returned = set(_returned(function.body.body, values))
        for binding in reversed(bindings):
            self._uses.update(operands(binding.value))
            if not isinstance(binding, relax.VarBinding):
                continue
            if _is_product(binding) and (not self._exact or _is_exact(binding.value, values)):
                self._products.add(binding.var)
                self._wanted.update(operands(binding.value))
            elif _is_move(binding.value) and binding.var in self._wanted:
                self._wanted.update(operands(binding.value))
            elif not self._exact:
                self._wanted.update(_residuals(binding.value, values))

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        """Forget the twins of a block at its end; they are local to it."""
        self._halves, self._pixels = {}, {}
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Rewrite one binding of a dataflow block."""
        value, var = binding.value, binding.var
        if not self.builder_.current_block_is_dataflow():
            super().visit_var_binding_(binding)
            return
        if var in self._products:
            is_conv = op_name(value) == _CONV2D
            result = self._convolve(value) if is_conv else self._multiply(binding)
        elif _is_move(value) and var in self._wanted and value.args[0] in self._halves:
            half = self._halves[value.args[0]]
            others = [self.visit_expr(argument) for argument in value.args[1:]]
            moved = relax.Call(value.op, [half, *others], value.attrs, value.ty_args)
            self._halves[var] = self.builder_.emit(moved)
            result = relax.op.astype(self._halves[var], _FLOAT)
        else:
            result = self._follow(binding)
        self._bind(binding, result)

    def _bind(self, binding: relax.VarBinding, result: relax.Expr | None) -> None:
        """Bind a variable, rounded if products read it, unless the function returns it."""
        var = binding.var
        is_inner = isinstance(var, relax.DataflowVar) and var not in self._returned
        if var in self._wanted and var not in self._halves and is_inner and _is_float(var):
            source = self._pixels.get(var)
            if source is None:
                wide = self.visit_expr(binding.value) if result is None else result
                source = self.builder_.emit(wide)
            half = self._rounded(source)
            if var in self._pixels:
                half = self.builder_.emit(relax.op.reshape(half, var.ty.shape))
            self._halves[var] = half
            result = relax.op.astype(half, _FLOAT)
        if result is not None:
            binding = relax.VarBinding(var, result)
        super().visit_var_binding_(binding)

    def _rounded(self, value: relax.Var) -> relax.Var:
        """A tensor in bfloat16; that of which it was widened, if it was."""
        bound = self.lookup_binding(value)
        if op_name(bound) == "relax.astype" and str(bound.args[0].ty.dtype) == _HALF:
            return bound.args[0]
        return self.builder_.emit(relax.op.astype(value, _HALF))

    def _half(self, expr: relax.Expr) -> relax.Expr:
        """The twin of an operand."""
        if isinstance(expr, GenericConst):
            return self._constant(expr, turned=False)
        if expr not in self._halves:
            self._halves[expr] = self._rounded(self.visit_expr(expr))
        return self._halves[expr]

    def _constant(self, constant: GenericConst, turned: bool) -> relax.Expr:
        """A constant in bfloat16; ``turned``: a matrix as the weight of a 1x1 convolution."""
        if (constant, turned) not in self._weights:
            values = array_of(constant)
            values = values.T[:, :, None, None] if turned else values
            with np.errstate(over="ignore", invalid="ignore"):
                self._weights[constant, turned] = tensor_constant(values, _HALF)
        return self._weights[constant, turned]

    def _convolve(self, call: relax.Call) -> relax.Call:
        attrs = call.attrs
        return relax.op.nn.conv2d(
            *map(self._half, call.args),
            strides=attrs.strides,
            padding=attrs.padding,
            dilation=attrs.dilation,
            groups=attrs.groups,
            out_dtype=_FLOAT,
        )

    def _multiply(self, binding: relax.VarBinding) -> relax.Expr:
        """A product of rows with a matrix as a convolution; any other one of rounded numbers."""
        call = binding.value
        x, matrix = call.args
        shape = x.ty.shape.values if isinstance(x.ty.shape, relax.ShapeExpr) else ()
        is_matrix = isinstance(matrix, GenericConst) and matrix.ty.ndim == 2 and len(shape) > 1
        if not is_matrix or not all(isinstance(extent, tirx.IntImm) for extent in shape[:-1]):
            return relax.op.matmul(*map(self._wide, call.args))
        rows = math.prod(int(extent) for extent in shape[:-1])
        depth, columns = (int(extent) for extent in matrix.ty.shape.values)
        if depth * columns < LEAST_ELEMENTS or columns < LEAST_COLUMNS:
            return relax.op.matmul(*map(self._wide, call.args))
        if rows <= FEW_ROWS:
            half = relax.op.astype(self._constant(matrix, turned=False), _FLOAT)
            return relax.op.matmul(self._wide(x), self.builder_.emit(half))
        data = self.builder_.emit(relax.op.reshape(self._half(x), (rows, depth, 1, 1)))
        weight = self._constant(matrix, turned=True)
        product = relax.op.nn.conv2d(data, weight, out_dtype=_FLOAT)
        return self._in_rows(binding.var, product)

    def _wide(self, expr: relax.Expr) -> relax.Expr:
        """An operand, rounded, in float32 again."""
        if isinstance(expr, GenericConst):
            return tensor_constant(array_of(self._half(expr)), _FLOAT)
        return self.builder_.emit(relax.op.astype(self._half(expr), _FLOAT))

    def _in_rows(self, var: relax.Var, pixels: relax.Expr) -> relax.Expr:
        """The value of a variable whose rows are pixels."""
        self._pixels[var] = self.builder_.emit(pixels)
        return relax.op.reshape(self._pixels[var], var.ty.shape)

    def _follow(self, binding: relax.VarBinding) -> relax.Expr | None:
        """Follow a product of rows to its only reader, of pixels: an addition or an activation."""
        value, var = binding.value, binding.var
        source = next((arg for arg in _arguments(value) if arg in self._pixels), None)
        if source is None or self._uses[source] > 1 or not _is_float(var):
            return None
        pixels = self._pixels[source]
        if read_activation(binding) is not None:
            others = value.args[1:]
            return self._in_rows(var, relax.Call(value.op, [pixels, *others], value.attrs))
        if op_name(value) != _ADD or not _same_shape(var, source):
            return None
        other = value.args[1] if value.args[0].same_as(source) else value.args[0]
        added = self._addend(other, var, pixels)
        return None if added is None else self._in_rows(var, relax.op.add(pixels, added))

    def _addend(self, other: relax.Expr, var: relax.Var, pixels: relax.Var) -> relax.Expr | None:
        """Addend of rows, in the shape of pixels; None for other shapes."""
        rows, columns, *_ = pixels.ty.shape.values
        if isinstance(other, GenericConst):
            values = array_of(other)
            if values.size != int(columns) or values.shape[-1:] != (int(columns),):
                return None
            return tensor_constant(values.reshape(1, -1, 1, 1), _FLOAT)
        if other in self._pixels and other not in self._halves:
            return self._pixels[other] if _same_shape(other, var) else None
        if not isinstance(other, relax.Var) or not _same_shape(other, var):
            return None
        source = self._halves.get(other)
        source = self.visit_expr(other) if source is None else source
        turned = self.builder_.emit(relax.op.reshape(source, (rows, columns, 1, 1)))
        if str(source.ty.dtype) == _FLOAT:
            return turned
        return self.builder_.emit(relax.op.astype(turned, _FLOAT))


def _returned(result: relax.Expr, values: Mapping[relax.Var, relax.Expr]) -> Iterator[relax.Var]:
    """Variables that are results of a function, under any name."""
    for var in operands(result):
        yield var
        if isinstance(values.get(var), relax.Var | relax.Tuple):
            yield from _returned(values[var], values)


def _residuals(value: relax.Expr, values: Mapping[relax.Var, relax.Expr]) -> list[relax.Var]:
    """The tensor that an addition adds to a convolution: the summand that was there before."""
    summands = list(_arguments(value)) if op_name(value) == _ADD else []
    order = sorted(summands, key=list(values).index) if all(s in values for s in summands) else []
    if len(order) != 2 or not _same_shape(*order):
        return []
    last = values[order[1]]
    if op_name(last) == _ADD:
        last = next((values.get(each) for each in _arguments(last)), None)
    return order[:1] if op_name(last) == _CONV2D else []


def _is_product(binding: relax.Binding) -> bool:
    """Return whether a binding is a convolution or a matrix product of float32 to round."""
    name = op_name(binding.value) if isinstance(binding, relax.VarBinding) else None
    if name == _CONV2D:
        return _is_float(binding.var) and read_convolution(binding) is not None
    return name == _MATMUL and all(map(_is_float, [binding.var, *binding.value.args]))


def _is_exact(call: relax.Call, values: Mapping[relax.Var, relax.Expr]) -> bool:
    """Return whether both factors of a product are numbers of bfloat16."""
    return all(
        _is_rounded(array_of(factor))
        if isinstance(factor, GenericConst)
        else op_name(values.get(factor)) == "relax.astype"
        and str(values[factor].args[0].ty.dtype) == _HALF
        for factor in call.args
    )


def _is_rounded(values: np.ndarray) -> bool:
    """Return whether numbers of float32 are those of bfloat16, whose lower bits are 0."""
    return not (np.ascontiguousarray(values).view(np.uint32) & 0xFFFF).any()


def _is_move(value: relax.Expr) -> bool:
    return op_name(value) in _MOVES and _is_float(value.args[0])


def _is_float(expr: relax.Expr) -> bool:
    return isinstance(expr.ty, relax.TensorType) and str(expr.ty.dtype) == _FLOAT


def _arguments(value: relax.Expr) -> Iterator[relax.Var]:
    if isinstance(value, relax.Call):
        yield from (argument for argument in value.args if isinstance(argument, relax.Var))


def _same_shape(left: relax.Expr, right: relax.Expr) -> bool:
    shapes = [expr.ty.shape for expr in (left, right)]
    if not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        return False
    return tvm_ffi.structural_equal(*shapes)
