# SPDX-License-Identifier: Apache-2.0
"""Rewrites of what TVM's importer would translate wrongly, one file an operator or kind.

Imports ``onnx/model``; only ``onnx`` may import it.
Start with ``powers.py`` or ``auto_pad.py``, which are small.
"""
