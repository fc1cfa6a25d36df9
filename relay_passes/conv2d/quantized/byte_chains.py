# SPDX-License-Identifier: Apache-2.0
"""Matching of convolutions of bytes, whose epilogues are part of their calls already."""

from __future__ import annotations

from tvm import relax

from ...core.expressions import op_name
from ...op.quantized_conv2d import QUANTIZED_CONV2D, read_quantized
from ..conv_chain import ConvChain


def find_byte_chains(block: relax.DataflowBlock) -> list[ConvChain]:
    """All convolutions of bytes in NCHW of a block, as chains of one line."""
    return [chain for binding in block.bindings for chain in [_match(binding)] if chain is not None]


def _match(binding: relax.Binding) -> ConvChain | None:
    call = binding.value
    if not isinstance(binding, relax.VarBinding) or op_name(call) != QUANTIZED_CONV2D.name:
        return None
    kernel = read_quantized(call)
    if kernel.out_layout != "NCHW":
        return None
    data, weight, bias, scale, *residual = call.args
    [layer] = kernel.layers
    operands = data, weight, bias, residual[0] if residual else None
    given = str(kernel.out_dtype), scale
    return ConvChain(layer, *operands, (binding,), *given, addition=kernel.addition)
