# SPDX-License-Identifier: Apache-2.0
"""Small programs of ranks, each of whose convolutions are exchanged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax

from relay_passes import DistributeRows, LegalizeCalls, op
from relay_passes.op.legalizations import shared_legalizations
from schedules.distribute.cost import Network, Processor

FIGURES = Network(1e-7, 1e11), Processor(1e9, 1e10)
PACKED = {"out_layout": "NCHW4c", "in_channels": 4, "out_channels": 4}


def weight(*shape: int) -> relax.Expr:
    return relax.const(np.ones(shape, np.float32))


def packed(
    data: relax.Expr, residual: relax.Expr | None = None, size: int = 3, **attrs: object
) -> relax.Call:
    """A convolution of four channels in one block."""
    padding = [size // 2] * 4
    operands = weight(1, 1, size, size, 4, 4), weight(1, 4), residual
    return op.conv2d(data, *operands, padding=padding, data_layout="NCHW4c", **PACKED, **attrs)


def distributed(build: Callable[..., relax.Expr], ranks: int = 2) -> tvm.IRModule:
    """Legalized programs of ranks, each of whose convolutions are exchanged."""
    x = relax.Var("x", relax.TensorType((1, 1, 8, 8, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(build(builder, x))
        builder.emit_func_output(result)
    mod = DistributeRows(ranks, *FIGURES, "always")(builder.get())
    return LegalizeCalls(shared_legalizations())(mod)


def calls(mod: tvm.IRModule, name: str) -> dict[str, relax.Call]:
    """Calls of a program, by the names of their results."""
    bindings = [b for block in mod[name].body.blocks for b in block.bindings]
    return {b.var.name: b.value for b in bindings if isinstance(b.value, relax.Call)}


def residual_block(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    first = builder.emit(packed(x), "first")
    return packed(first, first)
