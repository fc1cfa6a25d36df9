# SPDX-License-Identifier: Apache-2.0
"""Kernels that compute each output on its own: element-wise, transposes, pooling.

Imports ``core``; ``gemm`` and ``conv2d`` may import it.
Start with ``elementwise.py``, then ``iteration_domain.py`` and ``point_kernel.py``.
"""
