# SPDX-License-Identifier: Apache-2.0
"""Passes on layouts: activations in NCHW[x]c, and the rules for each op (``packed``).

Imports ``op`` and ``core``; no other family may import it.
Start with ``pack_layout.py``.
"""
