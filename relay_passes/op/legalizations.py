# SPDX-License-Identifier: Apache-2.0
"""Legalization of convolutions in one module: the function of equal kernels is written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm import relax

from .conv2d import CONV2D
from .conv2d import legalize as legalize_conv2d
from .conv_call import Known
from .fused_conv2d import FUSED_CONV2D
from .fused_conv2d import legalize as legalize_fused
from .fused_quantized_conv2d import FUSED_QUANTIZED_CONV2D
from .fused_quantized_conv2d import legalize as legalize_fused_quantized
from .quantized_conv2d import QUANTIZED_CONV2D
from .quantized_conv2d import legalize as legalize_quantized
from .winograd_conv2d import NAME as WINOGRAD
from .winograd_conv2d import legalize as legalize_winograd

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def shared_legalizations() -> dict[str, Legalize]:
    """Legalization of our convolutions, for one ``relax.transform.LegalizeOps``."""
    known: Known = {}
    return {
        CONV2D.name: partial(legalize_conv2d, known=known),
        FUSED_CONV2D.name: partial(legalize_fused, known=known),
        FUSED_QUANTIZED_CONV2D.name: partial(legalize_fused_quantized, known=known),
        QUANTIZED_CONV2D.name: partial(legalize_quantized, known=known),
        WINOGRAD: partial(legalize_winograd, known=known),
    }
