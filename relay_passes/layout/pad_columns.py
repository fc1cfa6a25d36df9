# SPDX-License-Identifier: Apache-2.0
"""Pass ``PadColumns``: constant matrices get whole vectors of columns."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.matmul.dense import PACKED_ROWS

from ..core.constants import array_of, tensor_constant
from ..core.expressions import is_claimed, op_name
from ..core.graph import pass_target

LEAST_DEPTH = 256
"""Terms of a sum that take far longer than another copy of the sum."""

TILES = (12, 4, 2, 1)
"""Vectors of columns that are a multiple of this many, if that adds few, suit more tiles."""

MOST_ADDED = 1 / 64
"""Share of columns that may be added."""


@tvm.transform.module_pass(opt_level=0, name="PadColumns")
class PadColumns:
    """Add columns of zeros to the constant matrix of a product, and cut them off the result.

    Before, on a CPU with vectors of 8::

        y = R.matmul(x, w)                                          # w: [768, 50257]

    After::

        lv = R.matmul(x, w')                                        # w': [768, 50304]
        y = R.strided_slice(lv, axes=[1], begin=[0], end=[50257])

    Only a matrix of whole vectors can be stored in the order in which kernels read it; of another
    one, each call copies the columns of each tile, which lie far from row to row. Left alone:
    products of few rows, of an open number of rows, or with short sums; matrices of whole vectors,
    those too narrow for padding, and those that something else reads, too; other types than float32
    and float64. The pass is idempotent.

    Parameters
    ----------
    target : Target | None
        The CPU; the current target for None.
    """

    def __init__(self, target: Target | None = None) -> None:
        self.target = target

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite all functions of Relax that are ours."""
        cpu = CPUInfo.from_target(pass_target(self.target, "PadColumns"))
        functions = [
            (var, function)
            for var, function in mod.functions_items()
            if isinstance(function, relax.Function)
        ]
        kept = _kept_matrices([function for _, function in functions])
        rewriter = _Rewriter(mod, cpu, kept)
        for var, function in functions:
            if not is_claimed(function):
                rewriter.builder_.update_func(var, rewriter.visit_expr(function))
        return rewriter.builder_.get()


def padded_columns(columns: int, lanes: int) -> int:
    """Columns of a matrix with those that fill its vectors.

    Parameters
    ----------
    columns : int
        Columns of the matrix.
    lanes : int
        Columns of a vector.

    Returns
    -------
    int
        ``columns``, if none are missing or too many would be added.
    """
    if columns % lanes == 0:
        return columns
    sizes = [-(-columns // (lanes * tile)) * lanes * tile for tile in TILES]
    return next((size for size in sizes if size - columns <= MOST_ADDED * columns), columns)


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod: IRModule, cpu: CPUInfo, kept: set[int]) -> None:
        super().__init__(mod)
        self._cpu = cpu
        self._kept = kept
        self._padded: dict[tuple[int, str, int], relax.Expr] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Rewrite one call."""
        call = self.visit_expr_post_order(call)
        if op_name(call) != "relax.matmul":
            return call
        x, matrix = call.args
        if not isinstance(matrix, GenericConst) or _place(matrix) in self._kept:
            return call
        columns, lanes = int(matrix.ty.shape[1]), self._cpu.lanes(str(matrix.ty.dtype))
        size = padded_columns(columns, lanes)
        if size == columns:
            return call
        wide = relax.op.matmul(x, self._pad(matrix, size), call.attrs.out_dtype or None)
        axis = x.ty.ndim - 1
        return relax.op.strided_slice(self.builder_.emit(wide), [axis], [0], [columns])

    def _pad(self, matrix: relax.Expr, size: int) -> relax.Expr:
        """A matrix with columns of zeros; the same one for all its readers."""
        key = (_place(matrix), str(matrix.ty), size)
        if key not in self._padded:
            values = array_of(matrix)
            wide = np.pad(values, [(0, 0), (0, size - values.shape[1])])
            self._padded[key] = tensor_constant(wide, matrix.ty.dtype)
        return self._padded[key]


def _kept_matrices(functions: list[relax.Function]) -> set[int]:
    """Places of constants that something reads for which another copy does not pay."""
    kept: set[int] = set()

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call):
            args = list(expr.args)
            is_product = op_name(expr) == "relax.matmul" and isinstance(args[1], GenericConst)
            if is_product and _pays(*args):
                args = args[:1]
            kept.update(_place(arg) for arg in args if isinstance(arg, GenericConst))
        elif isinstance(expr, relax.Tuple):
            kept.update(_place(one) for one in expr.fields if isinstance(one, GenericConst))

    for function in functions:
        relax.analysis.post_order_visit(function, visit)
    return kept


def _place(constant: relax.Expr) -> int:
    """The address of a constant, which tells copies of one array."""
    return int(constant.value.data_ptr())


def _pays(x: relax.Expr, matrix: relax.Expr) -> bool:
    """Return whether a product has enough rows, and long sums."""
    shape = x.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or len(shape) < 2 or matrix.ty.ndim != 2:
        return False
    rows, depth = shape[-2], int(matrix.ty.shape[0])
    is_high = isinstance(rows, tirx.IntImm) and int(rows) >= PACKED_ROWS
    return is_high and depth >= LEAST_DEPTH and str(matrix.ty.dtype) in ("float32", "float64")
