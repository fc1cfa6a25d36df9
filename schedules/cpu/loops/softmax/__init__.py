# SPDX-License-Identifier: Apache-2.0
"""Rule ``Softmax``: chains of reductions over the same rows.

Imports ``nests`` and ``core``; other families than ``loops`` may not import it.
Start with ``row_chain.py``, then ``softmax.py``.
"""
