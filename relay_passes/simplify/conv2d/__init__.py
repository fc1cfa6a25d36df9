# SPDX-License-Identifier: Apache-2.0
"""Rules that fold scales, shifts and paddings into convolutions.

Imports ``op`` and ``core``; only ``simplify`` may import it.
Start with ``conv2d_operands.py``, which the rules share.
"""
