# SPDX-License-Identifier: Apache-2.0
"""Passes on reductions: one op for all, and groups of reductions, with producers, as one kernel.

Imports ``op`` and ``core``; no other family may import it.
Start with ``coalesce_reduction.py``, then ``fuse_reductions.py``.
"""
