# SPDX-License-Identifier: Apache-2.0
"""Rules for all but convolutions: element-wise, pooling, matmul, softmax, fallback; own kernels.

Imports ``reduce``, ``nests`` and ``core``; ``cpu/__init__.py`` may import it, the storeys above
its kernels that only CPUs have: ``recurrent_cells.py``, ``selections.py``, ``determinants.py``,
``trees.py`` and ``pairwise_coupling.py``.
Start with ``fallback.py``, whose ``Elementwise`` is the smallest rule.
"""
