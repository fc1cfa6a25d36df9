# SPDX-License-Identifier: Apache-2.0
"""Reductions on CPUs: the op ``coalesced_reduce``, and reductions for other rules.

Imports ``nests`` and ``core``; ``loops`` and ``cpu/__init__.py`` may import it.
Start with ``coalesced_reduce.py``, the rule and its templates.
"""
