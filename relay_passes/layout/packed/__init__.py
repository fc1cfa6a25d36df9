# SPDX-License-Identifier: Apache-2.0
"""Rules of ``PackLayout``: one module for each family of ops that can stay packed.

Imports ``op``; only ``layout`` may import it. Start with ``packing_state.py``, then
``channels.py``.

``RULES`` maps an op's name to the function that rewrites a call of it. A rule gets the scope and
the binding, and returns the packed result, an expression that replaces the value, or None where
the call has to stay in NCHW.
"""

from __future__ import annotations

from .channels import CHANNEL_RULES
from .convolution import CONVOLUTION_RULES
from .elementwise import ELEMENTWISE_RULES
from .image_ops import SPATIAL_RULES
from .packing_state import Rule

RULES: dict[str, Rule] = CONVOLUTION_RULES | ELEMENTWISE_RULES | SPATIAL_RULES | CHANNEL_RULES
