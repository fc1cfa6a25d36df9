# SPDX-License-Identifier: Apache-2.0
"""Pass ``SimplifyInference`` and its rewriting rules, by what they rewrite.

Imports ``op`` and ``core``; no other family may import it.
Start with ``simplify_inference.py``, which lists the rules.
"""
