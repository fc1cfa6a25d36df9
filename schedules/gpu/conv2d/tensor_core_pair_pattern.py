# SPDX-License-Identifier: Apache-2.0
"""Matching of the two products of a fused pair of convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import ir, tirx

from schedules.tir.block_expressions import Stage, read_stages
from schedules.tir.index_math import i64
from schedules.workload.conv2d import Conv2DKernel, ConvLayer

from ..gemm.matmul.matmul_pattern import ACCUMULATOR, MatmulFunction, Operand, read_product


@dataclass(frozen=True)
class PairFunction:
    """The products of a pair.

    Parameters
    ----------
    first : MatmulFunction | None
        The first product, which stores the intermediate; None for a depthwise layer.
    second : MatmulFunction
        The second product. Its right factor is the intermediate, or what computes a depthwise one.
        Unless it is pointwise, its weights are by taps.
    """

    first: MatmulFunction | None
    second: MatmulFunction


def read_pair(
    func: tirx.PrimFunc, kernel: Conv2DKernel, by_pixels: bool = False
) -> PairFunction | None:
    """Read the products of a pair; None if the function is none of those of its op.

    With ``by_pixels`` the factors of the first are exchanged, so that its rows are pixels.
    """
    stages = read_stages(func) or []
    names = [stage.name for stage in stages]
    if "layer1" not in names:
        return None
    place = names.index("layer1") + 1
    before, behind = stages[:place], stages[place:]
    if kernel.layers[0].is_depthwise:
        widened = summed_in_float32(before)
        second = read_product(behind, func.params, windows=True, inlined=widened)
        if second is None:
            return None
        # Strided windows of neighbouring pixels do not begin beside each other, but are kept so.
        right = replace(second.right, rows_first=True)
        return PairFunction(None, replace(second, right=right))
    first = read_product(before, [before[-1].output], windows=True)
    second = read_product(behind, func.params, windows=True)
    if first is None or second is None:
        return None
    layer = kernel.layers[1]
    if not layer.is_pointwise:
        second = replace(second, left=_by_taps(second.left, layer))
    return PairFunction(_turned(first) if by_pixels else first, second)


def _turned(matmul: MatmulFunction) -> MatmulFunction:
    """The product with its factors exchanged."""
    count = len(matmul.epilogue.axes)
    epilogue = matmul.epilogue.permuted([*range(count - 2), count - 1, count - 2])
    turned = replace(matmul, left=matmul.right, right=matmul.left, epilogue=epilogue)
    return replace(turned, m=matmul.n, n=matmul.m)


def _by_taps(weight: Operand, layer: ConvLayer) -> Operand:
    """The weights of a layer by taps: with an axis more before the rows, and less to sum over."""
    space, taps = weight.space, math.prod(layer.kernel)
    *outer, row, depth = space.axes
    tap, channel = tirx.Var("tap", "int64"), tirx.Var("c", "int64")
    extents = [*space.extents[:-2], taps, space.extents[-2], layer.in_channels]
    values = {depth: channel * i64(taps) + tap}
    space = space.with_axes([*outer, tap, row, channel], extents, values)
    return replace(weight, space=space, rows_first=False)


def summed_in_float32(stages: Sequence[Stage]) -> list[Stage]:
    """The stages, with sums of products of 16-bit floats in float32 before they are rounded."""
    wide = {
        stage.output: tirx.decl_buffer(stage.output.shape, ACCUMULATOR[str(stage.output.dtype)])
        for stage in stages
        if stage.reduced and str(stage.output.dtype) in ACCUMULATOR
    }

    def rounded(load: ir.TensorLoad) -> tirx.Expr:
        if load.source not in wide:
            return load
        return wide[load.source][tuple(load.indices)].astype(load.source.dtype)

    def widened(stage: Stage) -> Stage:
        if stage.output not in wide:
            value = tvm_ffi.structural_map(stage.value, (ir.TensorLoad, rounded))
            return replace(stage, value=value)
        output, product = wide[stage.output], stage.value.b
        left, right = (factor.astype(output.dtype) for factor in (product.a, product.b))
        own = output[tuple(axis.var for axis in stage.axes)]
        init = tirx.const(0, output.dtype)
        return replace(stage, output=output, value=own + left * right, init=init)

    return [widened(stage) for stage in stages]
