# SPDX-License-Identifier: Apache-2.0
"""Rule ``Pooling``: reductions over sliding windows.

Imports ``nests`` and ``core``; other families than ``loops`` may not import it.
Start with ``pooling.py``, then ``pool_nests.py``.
"""
