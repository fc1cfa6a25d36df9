# SPDX-License-Identifier: Apache-2.0
"""Rules of convolutions on GPUs: dense, depthwise, fused pairs, and all others.

Imports ``gemm`` and ``core``; ``gpu/__init__.py`` and the decisions of the passes may import it.
Start with ``conv2d.py``.
"""
