# SPDX-License-Identifier: Apache-2.0
"""Products of matrices by tiles in shared memory and registers; convolutions as products.

Imports ``pointwise`` and ``core``; ``conv2d`` may import it.
Start with ``matmul/matmul.py``; for convolutions with ``implicit_gemm.py`` and ``main_loop.py``,
for those of warpgroups with ``matmul/warpgroup_conv2d.py``.
"""
