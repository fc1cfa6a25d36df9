# SPDX-License-Identifier: Apache-2.0
"""Matrix products on the GPU: on ordinary cores, on tensor cores, of few rows, and of windows.

Imports the pipeline beside it, ``pointwise`` and ``core``; ``attention`` may import it.
Start with ``matmul.py``, which chooses among them.
"""
