# SPDX-License-Identifier: Apache-2.0
"""Coalesced reductions on GPUs: the rule, above ``plan`` and ``kernel``.

Imports ``core``; ``gpu/__init__.py`` may import it.
Start with ``coalesced_reduce.py``.
"""
