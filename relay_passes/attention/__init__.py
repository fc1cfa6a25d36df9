# SPDX-License-Identifier: Apache-2.0
"""Pass on attention: products of queries, keys and values with the softmax between them.

Imports ``core``; no other family may import it.
Start with ``fuse_attention.py``.
"""
