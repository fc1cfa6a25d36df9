# SPDX-License-Identifier: Apache-2.0
"""Convolutions and matrix products of quantised tensors.

Imports ``core``, ``op`` and ``conv_chain.py``; nothing but ``relay_passes`` imports it.
Start with ``multiply_bytes.py``.
"""
