# SPDX-License-Identifier: Apache-2.0
"""Graphs within graphs: branches, loops and functions become nodes of the graph around them.

Imports ``expansion`` and ``onnx/model``; only ``onnx`` may import it.
Start with ``loops.py``.
"""
