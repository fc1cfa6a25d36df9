# SPDX-License-Identifier: Apache-2.0
"""Element-wise operators, and those that need a wider type.

Imports ``expansion`` and ``onnx/model``; only ``onnx`` may import it.
Start with ``activations.py``.
"""
