# SPDX-License-Identifier: Apache-2.0
"""Passes on products with constant matrices whose numbers have few bits.

Imports ``op`` and ``core``; no other family may import it.
Start with ``multiply_narrow.py``.
"""
