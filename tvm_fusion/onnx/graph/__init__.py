# SPDX-License-Identifier: Apache-2.0
"""Transformations of whole graphs: constants, branches, loops, functions, lists and sizes.

Imports ``model``; only ``onnx`` may import it. Start with ``fold.py``.
"""
