# SPDX-License-Identifier: Apache-2.0
"""ONNX models as data: reading them, their weights and shapes, walking and editing graphs.

Imports ``tvm_fusion.errors`` only; ``onnx`` and its subpackages may import it, and ``cli``.
Start with ``loader.py``.
"""
