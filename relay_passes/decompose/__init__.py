# SPDX-License-Identifier: Apache-2.0
"""Pass ``DecomposeNormalization`` and its rules: ops that hide reductions.

Imports ``op`` and ``core``; no other family may import it.
Start with ``decompose_normalization.py``, which lists the rules.
"""
