# SPDX-License-Identifier: Apache-2.0
"""Pass ``SimplifyInference`` and its rewriting rules, one a file, in folders by family.

Imports ``op`` and ``core``; no other family may import it.
Start with ``simplify_inference.py``, which lists the rules.
"""
