# SPDX-License-Identifier: Apache-2.0
"""Pass ``MultiplyNarrow``: products with, and rows of, matrices that stay in 16, 8 or 4 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tvm
from tvm import IRModule, relax, te, tirx
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.matmul.narrow_dot import byte_rows, narrow_dot
from schedules.cpu.loops.matmul.narrow_matmul import narrow_matmul
from schedules.cpu.loops.matmul.narrow_matrix import (
    GRANULE,
    NarrowMatrix,
    number_at,
    pack_matrix,
    pack_scales,
    tile_columns,
)
from schedules.workload.conv2d import WORDS

from ..core.constants import array_of, tensor_constant
from ..core.expressions import Value, is_claimed, op_name
from ..core.graph import pass_target
from ..op.widen_weight import LEAST_ELEMENTS, in_pairs, is_lookup, row_inside, take_widened
from ..op.widen_weight import NAME as WIDEN_WEIGHT

MOST_ROWS = 16
"""Rows of a product up to which a matrix of 16 bits stays so: more are bound by arithmetic, and
kernels of float32 are faster."""

_FLOAT = "float32"
_HALVES = ("float16", "bfloat16")
_TYPES = (_FLOAT, *_HALVES)


@tvm.transform.module_pass(opt_level=0, name="MultiplyNarrow")
class MultiplyNarrow:
    """Multiply by matrices of few bits without making floats of them first.

    Before, with integers of 4 bits::

        w = R.tvm_fusion.widen_weight(integers, scale, block=32, bits=4)   # [768, 3072]
        y = R.matmul(x, w)                                                  # x: [1, 768]

    After, with eight integers in each int32 of the weight::

        y = R.call_tir(cls.narrow_matmul, (x, weight, scale), ...)

    or, where ``by_bytes`` allows it and the CPU multiplies bytes::

        lv = R.call_tir(cls.byte_rows, (x,), ...)
        y = R.call_tir(cls.narrow_dot, (lv[0], lv[1], lv[2], weight, scale), ...)

    Rows that a ``take`` chooses of such a matrix are widened alone, by ``take_widened``, or, if a
    product has the same matrix transposed, from what that product reads.
    Matrices of 16-bit floats stay so, too, where products have few rows, or an open number of them.
    On CPUs, before ``WidenSums``: operands of 16 bits are cast, and so is the result. Left alone,
    for ``SimplifyInference`` to make constants of: matrices that something else reads than a
    product of floats; small ones, and those narrower than a vector; those whose scales are shared
    by fewer rows than the kernel takes at once; and products whose other operand is quantised,
    which ``MultiplyBytes`` takes; but for one row where the CPU multiplies bytes in 16 bits.

    Parameters
    ----------
    target : Target | None
        The CPU; the current target for None.
    """

    def __init__(self, target: Target | None = None) -> None:
        self.target = target

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite all functions of Relax that are ours."""
        cpu = CPUInfo.from_target(pass_target(self.target, "MultiplyNarrow"))
        products = _Products(mod, cpu)
        changed = _rewritten(mod, products)
        return _rewritten(changed, _Lookups(changed, products.packed))


def _rewritten(mod: IRModule, rewriter: PyExprMutator) -> IRModule:
    """The module after a visit of its functions."""
    for var, function in mod.functions_items():
        if isinstance(function, relax.Function) and not is_claimed(function):
            rewritten = rewriter.visit_expr(function)
            if not rewritten.same_as(function):
                rewritten = relax.analysis.remove_all_unused(rewritten)
                rewriter.builder_.update_func(var, rewritten)
    return rewriter.builder_.get()


class _Packed(NamedTuple):
    """A matrix in the kernel's layout, with its constants."""

    matrix: NarrowMatrix
    zeros: str
    constants: tuple[relax.Expr, ...]
    depth: int  # Depth before it was padded.
    arrays: tuple[np.ndarray, ...] = ()
    """Integers, scales and zero points ``[depth, columns]`` as they were."""

    def is_transposed(self, table: Sequence[np.ndarray], block: int) -> bool:
        """Whether it is the transposed of a matrix whose rows have blocks of scales."""
        pairs = [(one.T, other) for one, other in zip(table, self.arrays, strict=False)]
        is_alike = len(table) == len(self.arrays) and self.matrix.groups == table[1].shape[1]
        if not is_alike or (self.matrix.groups > 1 and self.matrix.block != block):
            return False
        return all(one.dtype == other.dtype and np.array_equal(one, other) for one, other in pairs)


@mutator
class _Lookups(PyExprMutator):
    """Rewrites lookups; ``packed``: the matrices of products."""

    def __init__(self, mod: IRModule, packed: Sequence[_Packed]) -> None:
        super().__init__(mod)
        self._packed = packed
        self._stored: dict[int, _Packed | relax.Expr] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Rewrite one call."""
        call = self.visit_expr_post_order(call)
        if not is_lookup(call):
            return call
        source, rows = call.args
        table = self.lookup_binding(source) if isinstance(source, relax.Var) else source
        if op_name(table) != WIDEN_WEIGHT:
            return call
        if not all(isinstance(each, GenericConst) for each in table.args):
            return call
        key, mode = int(table.args[0].value.data_ptr()), str(call.attrs.mode)
        if key not in self._stored:
            self._stored[key] = self._storage(table)
        stored, dtype = self._stored[key], str(table.attrs["out_dtype"])
        if isinstance(stored, _Packed):
            return self._from_product(rows, stored, mode, dtype)
        return take_widened(
            rows,
            stored,
            *table.args[1:],
            columns=int(table.ty.shape[1]),
            block=int(table.attrs["block"]),
            axis=int(table.attrs["axis"]),
            mode=mode,
            out_dtype=dtype,
        )

    def _storage(self, table: relax.Call) -> _Packed | relax.Expr:
        """The matrix of a product that is the table transposed; else the table's integers."""
        arrays, block = [array_of(each) for each in table.args], int(table.attrs["block"])
        if int(table.attrs["axis"]) == 1:
            for packed in self._packed:
                if packed.is_transposed(arrays, block):
                    return packed
        if int(table.attrs["bits"]) != 4:
            return table.args[0]
        return tensor_constant(in_pairs(arrays[0]), "uint8")

    def _from_product(self, rows: relax.Expr, packed: _Packed, mode: str, dtype: str) -> relax.Call:
        """The chosen columns of the matrix of a product."""
        matrix = packed.matrix

        def take(rows: te.Tensor, *stored: te.Tensor) -> te.Tensor:
            def number(*index: tirx.Var) -> tirx.Expr:
                *place, at = (each.astype("int64") for each in index)
                row = row_inside(rows(*place), matrix.columns, mode).astype("int64")
                return number_at(matrix, at, row, *stored).astype(dtype)

            return te.compute([*rows.shape, packed.depth], number, name="take_packed")

        return self.builder_.call_te(
            take, rows, *packed.constants, primfunc_name_hint="take_packed"
        )


@mutator
class _Products(PyExprMutator):
    """Rewrites products."""

    def __init__(self, mod: IRModule, cpu: CPUInfo) -> None:
        super().__init__(mod)
        self._cpu = cpu
        self._packed: dict[tuple[int, bool], _Packed | None] = {}
        self._in_bytes: dict[tuple[relax.Expr, int], list[relax.Expr]] = {}

    @property
    def packed(self) -> list[_Packed]:
        """The matrices of products."""
        return [each for each in self._packed.values() if each is not None]

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Rewrite one call."""
        call = self.visit_expr_post_order(call)
        if op_name(call) != "relax.matmul":
            return call
        x, weight = call.args
        shape = x.ty.shape
        if not isinstance(shape, relax.ShapeExpr) or x.ty.ndim < 2:
            return call
        rows = list(shape.values)[:-1]
        if str(x.ty.dtype) not in _TYPES or self._multiplies_bytes(x, rows):
            return call
        packed = self._matrix(weight, rows)
        return call if packed is None else self._product(call, packed)

    def _product(self, call: relax.Call, packed: _Packed) -> relax.Expr:
        """The product by the kernel, in the type of ``call``."""
        x, emit, matrix = call.args[0], self.builder_.emit, packed.matrix
        if str(x.ty.dtype) != _FLOAT:
            x = emit(relax.op.astype(x, _FLOAT))
        if matrix.depth > packed.depth:
            widths = [0, 0] * (x.ty.ndim - 1) + [0, matrix.depth - packed.depth]
            x = emit(relax.op.nn.pad(x, widths))
        rows = list(x.ty.shape.values)[:-1]
        operands = self._bytes(x, matrix) if matrix.in_bytes else [x]
        build = narrow_dot if matrix.in_bytes else narrow_matmul
        kernel = build(rows, matrix, packed.zeros, self._cpu)
        result = relax.call_tir(
            self.builder_.add_func(kernel, build.__name__),
            [*operands, *packed.constants],
            relax.TensorType([*rows, matrix.columns], _FLOAT),
        )
        if str(call.ty.dtype) == _FLOAT:
            return result
        return relax.op.astype(emit(result), str(call.ty.dtype))

    def _bytes(self, x: relax.Expr, matrix: NarrowMatrix) -> list[relax.Expr]:
        """Integers, scales and sums of the rows of ``x``; one call for all that read them."""
        key = x, matrix.byte_block
        if not isinstance(x, relax.Var) or key not in self._in_bytes:
            *rows, depth = x.ty.shape.values
            per_block = relax.TensorType([*rows, matrix.depth // matrix.byte_block], _FLOAT)
            made = relax.call_tir(
                self.builder_.add_func(byte_rows(rows, matrix), "byte_rows"),
                [x],
                [relax.TensorType([*rows, depth], "int8"), per_block, per_block],
            )
            whole = self.builder_.emit(made)
            self._in_bytes[key] = [
                self.builder_.emit(relax.TupleGetItem(whole, field)) for field in range(3)
            ]
        return self._in_bytes[key]

    def _multiplies_bytes(self, x: relax.Expr, rows: Sequence[tirx.Expr]) -> bool:
        """Whether ``MultiplyBytes`` takes a product with ``x``.

        Where products are added in pairs, its matrices have 16 bits, for which one row waits longer
        than it takes to widen 8.
        """
        is_row = all(isinstance(row, tirx.IntImm) and int(row) == 1 for row in rows)
        in_pairs = self._cpu.word_channels == WORDS["int16"]
        return op_name(self._bound(x)) == "relax.dequantize" and not (is_row and in_pairs)

    def _bound(self, expr: relax.Expr) -> Value:
        return self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr

    def _matrix(self, weight: relax.Expr, rows: Sequence[tirx.Expr]) -> _Packed | None:
        """The matrix that a weight is widened from, if the kernel takes it."""
        value = self._bound(weight)
        turned = op_name(value) == "relax.permute_dims"
        if turned:
            if value.attrs.axes is not None and [*map(int, value.attrs.axes)] != [1, 0]:
                return None
            value = self._bound(value.args[0])
        is_asked = op_name(value) == "relax.astype"
        source = value.args[0] if is_asked else value
        is_float = isinstance(source, GenericConst) and str(source.ty.dtype) in _HALVES
        if is_float and not (is_asked or _are_few(rows)):
            return None
        if not is_float and op_name(value) != WIDEN_WEIGHT:
            return None
        constants = [source] if is_float else list(value.args)
        if not all(isinstance(constant, GenericConst) for constant in constants):
            return None
        key = int(constants[0].value.data_ptr()), turned
        if key not in self._packed:
            pack = _pack_floats if is_float else _pack
            self._packed[key] = pack(source, turned, self._cpu)
        return self._packed[key]


def _are_few(rows: Sequence[tirx.Expr]) -> bool:
    """Whether products of so many rows wait for their matrix, as those of an open number may."""
    count = math.prod(int(row) for row in rows if isinstance(row, tirx.IntImm))
    return count <= MOST_ROWS or not all(isinstance(row, tirx.IntImm) for row in rows)


def _pack_floats(constant: GenericConst, turned: bool, cpu: CPUInfo) -> _Packed | None:
    """A matrix of 16 bits in the kernel's layout, if it takes it."""
    dtype = str(constant.ty.dtype)
    if constant.ty.ndim != 2 or (dtype == "float16" and not cpu.converts_halves):
        return None
    values = array_of(constant).view(np.uint16)
    values = values.T if turned else values
    depth, columns = values.shape
    tile = tile_columns(columns, cpu)
    if values.size < LEAST_ELEMENTS or not tile:
        return None
    padded = -(-depth // GRANULE) * GRANULE
    matrix = NarrowMatrix(padded, columns, dtype, padded, tile, False)
    stored = pack_matrix(matrix, np.pad(values, [(0, padded - depth), (0, 0)]))
    return _Packed(matrix, "int8", (tensor_constant(stored, stored.dtype),), depth)


def _pack(call: relax.Call, turned: bool, cpu: CPUInfo) -> _Packed | None:
    """The operands of a ``widen_weight`` in the kernel's layout, if it takes them."""
    integers, scale, *zero = (array_of(argument) for argument in call.args)
    bits, block = int(call.attrs["bits"]), int(call.attrs["block"])
    if int(call.attrs["axis"]) != int(turned):
        return None
    if turned:
        integers, scale, *zero = (values.T for values in (integers, scale, *zero))
    originals = integers, scale, *zero
    depth, columns = integers.shape
    groups = len(scale)
    if groups == 1:
        block = -(-depth // GRANULE) * GRANULE
    tile = tile_columns(columns, cpu)
    if block % GRANULE or integers.size < LEAST_ELEMENTS or not tile:
        return None
    padded = groups * block
    integers = np.pad(integers, [(0, padded - depth), (0, 0)])
    if zero:  # what is added times zero is zero, if no infinity makes NaN of it
        integers[depth:] = zero[0][-1] if zero[0].dtype == np.int8 else 0
    in_bytes = bits == 4 and bool(call.attrs["by_bytes"]) and bool(cpu.byte_dots)
    matrix = NarrowMatrix(padded, columns, f"int{bits}", block, tile, bool(zero), in_bytes)
    arrays = [pack_matrix(matrix, integers), *(pack_scales(matrix, one) for one in (scale, *zero))]
    constants = tuple(tensor_constant(array, array.dtype) for array in arrays)
    kind = str(zero[0].dtype) if zero else "int8"
    return _Packed(matrix, kind, constants, depth, originals)
