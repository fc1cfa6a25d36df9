# SPDX-License-Identifier: Apache-2.0
"""Passes on convolutions: fusion, epilogues, Winograd, products of bytes, and the decisions.

Imports ``op`` and ``core``; no other family may import it.
Start with ``fuse_conv2d.py``, then ``fusion_decision.py``.
"""
