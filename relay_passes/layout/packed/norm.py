# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation over the channels of each pixel, in blocks."""

from __future__ import annotations

from tvm import relax

from relay_passes.op.channel_norm import channel_norm

from .packing_state import Packed, Rule, Scope, channels_of


def pack_layer_norm(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Normalise a packed tensor over axis 1; other axes stay in NCHW."""
    call = binding.value
    data, attrs = scope.lookup(call.args[0]), call.attrs
    if data is None or channels_of(call.args[0]) is None or not attrs.center or not attrs.scale:
        return None
    if [int(axis) % 4 for axis in attrs.axes] != [1] or str(binding.var.ty.dtype) != "float32":
        return None
    # The lanes past the last channel are multiplied by zero.
    if not scope.is_safe(data.channels, data.bound) or not scope.is_worth_packing(binding):
        return None
    gamma, beta = (scope.parameter(vector, "bias") for vector in call.args[1:])
    return Packed(
        channel_norm(data.expr, gamma, beta, data.channels, float(attrs.epsilon)), data.channels
    )


NORM_RULES: dict[str, Rule] = {"relax.nn.layer_norm": pack_layer_norm}
