# SPDX-License-Identifier: Apache-2.0
"""Pass ``NarrowWeights``: rounds the constant matrices of products and lookups to few bits."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst

from ..core.constants import array_of, tensor_constant
from ..core.expressions import MOVES, Value, op_name, operands
from ..core.graph import Graph, Rule, function_graphs
from ..op.widen_weight import LEAST_ELEMENTS, is_lookup, widen_weight

BLOCKS = {8: 128, 4: 32}
"""Rows that share a scale, by the bits of an integer."""

LEAST_COLUMNS = 16
"""Columns below which a matrix may not fill a vector."""

_TYPES = ("float32", "float16", "bfloat16")
_MOVES = (*MOVES, "relax.astype", "relax.broadcast_to", "relax.concat", "relax.strided_slice")


@tvm.transform.module_pass(opt_level=0, name="NarrowWeights")
class NarrowWeights:
    """Round constant matrices of products to integers with a scale for each block of rows.

    Before::

        y = R.matmul(x, w)                                  # w: [768, 3072], a constant

    After, for 4 bits::

        lv = R.tvm_fusion.widen_weight(integers, scale, block=32, bits=4)
        y = R.matmul(x, lv)

    Integers of 8 bits lie between -127 and 127, and a block's largest magnitude is 127. Of 4 bits
    they lie between -8 and 7, and the number of the largest magnitude is -8. So a number differs by
    at most 1/254 or 1/8 of its block's largest magnitude. Numbers of 16 bits are bfloat16, which
    differ by at most 1/256 each, and have no scales. What is multiplied by 4 bits may be
    rounded to 8 bits in blocks of 32 numbers, a far smaller error.

    Of a matrix whose rows are looked up, as of embeddings, integers of a row share scales::

        y = R.take(w, rows, axis=0)                         # w: [50257, 768], a constant

    becomes, for 8 and 4 bits alone::

        lv = R.tvm_fusion.widen_weight(integers, scale, block=32, axis=1, bits=4)
        y = R.take(lv, rows, axis=0)

    So a matrix that is looked up and, transposed, multiplied by has the same numbers in both. Left
    alone: small matrices, those with infinities or NaN, and rows that are factors of something
    that does not come from them, as sines of positions are. ``MultiplyNarrow`` runs after it.

    Parameters
    ----------
    bits : int
        16, 8 or 4.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        result = mod.clone()
        rounded: dict[tuple[int, int], relax.Expr | None] = {}

        def wide(graph: Graph, matrix: relax.Expr, axis: int) -> relax.Expr | None:
            key = int(matrix.value.data_ptr()), axis
            if key not in rounded:
                rounded[key] = _rounded(matrix, self.bits, axis)
            narrow = rounded[key]
            return None if narrow is None else graph.emit(narrow)

        def multiply(graph: Graph, call: relax.Call) -> Value:
            x, matrix = call.args
            if not isinstance(matrix, GenericConst) or x.ty.ndim < 2:
                return None
            narrow = wide(graph, matrix, 0)
            dtype = call.attrs.out_dtype or None
            return None if narrow is None else relax.op.matmul(x, narrow, dtype)

        def look_up(graph: Graph, call: relax.Call) -> Value:
            table, rows = call.args
            is_table = isinstance(table, GenericConst) and is_lookup(call)
            if not is_table or _is_factor(graph.func, graph.current):
                return None
            narrow = wide(graph, table, 1)
            return None if narrow is None else relax.op.take(narrow, rows, 0, call.attrs.mode)

        rules: dict[str, list[Rule]] = {"relax.matmul": [multiply]}
        if self.bits < 16:
            rules["relax.take"] = [look_up]
        for name, graph in function_graphs(mod):
            if graph.sweep(rules):
                result.update_func(name, graph.to_function())
        return result


def _is_factor(function: relax.Function, rows: relax.Var) -> bool:
    """Return whether ``rows`` are multiplied by something that does not come from them."""
    moved, derived = {rows}, {rows}
    for binding in (one for block in function.body.blocks for one in block.bindings):
        read = {*operands(binding.value)}
        if derived.isdisjoint(read):
            continue
        derived.add(binding.var)
        name = op_name(binding.value)
        if name == "relax.multiply" and moved & read and not derived >= read:
            return True
        if moved & read and (name in _MOVES or isinstance(binding.value, relax.Tuple)):
            moved.add(binding.var)
    return False


def _rounded(matrix: GenericConst, bits: int, axis: int) -> relax.Call | None:
    """The matrix in numbers of ``bits``, with blocks along an axis, if it is one to round."""
    dtype = str(matrix.ty.dtype)
    if matrix.ty.ndim != 2 or dtype not in _TYPES or int(matrix.ty.shape[1]) < LEAST_COLUMNS:
        return None
    values = array_of(matrix).astype(np.float32)
    if values.size < LEAST_ELEMENTS or not np.isfinite(values).all():
        return None
    if bits == 16:
        return relax.op.astype(tensor_constant(values, "bfloat16"), dtype)
    values = values.T if axis else values
    depth, columns = values.shape
    block = min(BLOCKS[bits], depth)
    groups = -(-depth // block)
    blocks = np.pad(values, [(0, groups * block - depth), (0, 0)]).reshape(groups, block, columns)
    places = np.abs(blocks).argmax(1)[:, None]
    largest = np.take_along_axis(blocks, places, 1)
    scale = np.abs(largest) / 127 if bits == 8 else largest / -8
    scale[scale == 0] = 1
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    integers = np.clip(np.rint(blocks / scale), low, high).astype(np.int8)
    integers, scale = integers.reshape(groups * block, columns)[:depth], scale[:, 0]
    if axis:
        integers, scale = integers.T, scale.T
    return widen_weight(
        tensor_constant(integers, "int8"),
        tensor_constant(scale, "float32"),
        block=block,
        axis=axis,
        bits=bits,
        by_bytes=bits == 4,
        out_dtype=dtype,
    )
