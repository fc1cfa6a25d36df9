# SPDX-License-Identifier: Apache-2.0
"""Gather, scatter and OneHot: indices within bounds.

Imports ``expansion`` and ``onnx/model``; only ``onnx`` may import it.
Start with ``indices.py``.
"""
