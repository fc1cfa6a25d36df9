# SPDX-License-Identifier: Apache-2.0
"""Normalizations that TVM's importer lacks or gets wrong.

Imports ``expansion`` and ``onnx/model``; only ``onnx`` may import it.
Start with ``layer_norm.py``.
"""
