# SPDX-License-Identifier: Apache-2.0
"""Rules for all but convolutions: element-wise, pooling, matmul, softmax, fallback.

Imports ``reduce``, ``nests`` and ``core``; only ``cpu/__init__.py`` may import it.
Start with ``elementwise.py``, the smallest rule.
"""
