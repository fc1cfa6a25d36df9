# SPDX-License-Identifier: Apache-2.0
"""Reports of what ``compile`` decides: pairs of convolutions, GPU kernels, slow kernels.

Imports the compiler beside it; ``bench`` and ``cli`` may import it.
Start with ``explain.py``; ``explain_gpu.py`` is its counterpart for CUDA.
"""
