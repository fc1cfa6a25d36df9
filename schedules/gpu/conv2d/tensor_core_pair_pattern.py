# SPDX-License-Identifier: Apache-2.0
"""Matching of the two products of a fused pair of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import ir, tirx

from schedules.tir.block_expressions import Stage, read_stages
from schedules.workload.conv2d import Conv2DKernel

from ..gemm.matmul.matmul_pattern import ACCUMULATOR, MatmulFunction, read_product


@dataclass(frozen=True)
class PairFunction:
    """The products of a pair.

    Parameters
    ----------
    first : MatmulFunction | None
        The first product, which stores the intermediate; None for a depthwise layer.
    second : MatmulFunction
        The second product. Its left factor is the intermediate, or what computes a depthwise one.
    """

    first: MatmulFunction | None
    second: MatmulFunction


def read_pair(func: tirx.PrimFunc, kernel: Conv2DKernel) -> PairFunction | None:
    """Read the products of a pair; None if the function is none of those of its op."""
    stages = read_stages(func) or []
    names = [stage.name for stage in stages]
    if "layer1" not in names:
        return None
    place = names.index("layer1") + 1
    before, behind = stages[:place], stages[place:]
    if kernel.layers[0].is_depthwise:
        widened = summed_in_float32(before)
        second = read_product(behind, func.params, windows=True, inlined=widened)
        return None if second is None else PairFunction(None, second)
    first = read_product(before, [before[-1].output], windows=True)
    second = read_product(behind, func.params, windows=True)
    return None if first is None or second is None else PairFunction(first, second)


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
