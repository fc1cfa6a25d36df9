# SPDX-License-Identifier: Apache-2.0
"""Relax ops of this package; importing it registers them.

Imports no other family; every family but ``core`` may import it.
Start with ``pack.py``, a small op, and ``register.py``.

TVMScript prints a call as ``R.tvm_fusion.<op>(...)``; the last lines here let it read that back.
"""

import sys

import tvm.relax.script

from .byte_matmul import byte_matmul
from .channels import channel_norm, channel_shuffle, channel_slice, pack, unpack
from .coalesced_reduce import coalesced_reduce
from .conv2d import conv2d, conv2d_pair, fused_conv2d
from .elementwise import dynamic_quantize, hardswish, round_clip, sort_key
from .quantized_conv2d import fused_quantized_conv2d, quantized_conv2d
from .recurrence import recurrence
from .widen_weight import take_widened, widen_weight
from .winograd_conv2d import winograd_conv2d

__all__ = [
    "byte_matmul",
    "channel_norm",
    "channel_shuffle",
    "channel_slice",
    "coalesced_reduce",
    "conv2d",
    "conv2d_pair",
    "dynamic_quantize",
    "fused_conv2d",
    "fused_quantized_conv2d",
    "hardswish",
    "pack",
    "quantized_conv2d",
    "recurrence",
    "round_clip",
    "sort_key",
    "take_widened",
    "unpack",
    "widen_weight",
    "winograd_conv2d",
]

for _namespace in (tvm.relax.script, tvm.relax.script.parser):
    _namespace.tvm_fusion = sys.modules[__name__]
