# SPDX-License-Identifier: Apache-2.0
"""Pass ``NarrowWeights``: rounds the constant matrices of products to 16, 8 or 4 bits."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst

from ..core.constants import array_of, tensor_constant
from ..core.expressions import Value
from ..core.graph import Graph, function_graphs
from ..op.widen_weight import LEAST_ELEMENTS, widen_weight

BLOCKS = {8: 128, 4: 32}
"""Rows that share a scale, by the bits of an integer."""

LEAST_COLUMNS = 16
"""Columns below which a matrix may not fill a vector."""

_TYPES = ("float32", "float16", "bfloat16")


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
    rounded to 8 bits in blocks of 32 numbers, a far smaller error. Left alone: small matrices, and
    those with infinities or NaN. ``MultiplyNarrow`` runs after it.

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
        rounded: dict[int, relax.Expr | None] = {}

        def rule(graph: Graph, call: relax.Call) -> Value:
            x, matrix = call.args
            if not isinstance(matrix, GenericConst) or x.ty.ndim < 2:
                return None
            key = int(matrix.value.data_ptr())
            if key not in rounded:
                rounded[key] = _rounded(matrix, self.bits)
            wide = rounded[key]
            if wide is None:
                return None
            return relax.op.matmul(x, graph.emit(wide), call.attrs.out_dtype or None)

        for name, graph in function_graphs(mod):
            if graph.sweep({"relax.matmul": [rule]}):
                result.update_func(name, graph.to_function())
        return result


def _rounded(matrix: GenericConst, bits: int) -> relax.Call | None:
    """The matrix in numbers of ``bits``, if it is one to round."""
    dtype = str(matrix.ty.dtype)
    if matrix.ty.ndim != 2 or dtype not in _TYPES or int(matrix.ty.shape[1]) < LEAST_COLUMNS:
        return None
    values = array_of(matrix).astype(np.float32)
    if values.size < LEAST_ELEMENTS or not np.isfinite(values).all():
        return None
    if bits == 16:
        return relax.op.astype(tensor_constant(values, "bfloat16"), dtype)
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
    return widen_weight(
        tensor_constant(integers.reshape(groups * block, columns)[:depth], "int8"),
        tensor_constant(scale[:, 0], "float32"),
        block=block,
        bits=bits,
        by_bytes=bits == 4,
        out_dtype=dtype,
    )
