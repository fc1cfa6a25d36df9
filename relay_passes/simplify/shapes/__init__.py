# SPDX-License-Identifier: Apache-2.0
"""Rules for reshapes and transposes, and for ops that they stand around.

Imports ``op`` and ``core``; only ``simplify`` may import it.
Start with ``channels_first.py``.
"""
