# SPDX-License-Identifier: Apache-2.0
"""Rewrites of operators that TVM's importer would translate wrongly, one file each.

Imports ``onnx/model``; only ``onnx`` may import it.
Start with ``powers.py`` or ``auto_pad.py``, which are small.
"""
