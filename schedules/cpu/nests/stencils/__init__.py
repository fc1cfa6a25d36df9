# SPDX-License-Identifier: Apache-2.0
"""Rows of stencils: steps of several of them, and images larger than the caches.

Imports its parent's modules; those import it.
Start with ``shared_rows.py``, then ``streaming_stores.py``.
"""
