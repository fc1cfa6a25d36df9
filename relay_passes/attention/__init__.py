# SPDX-License-Identifier: Apache-2.0
"""Passes on attention: products of queries, keys and values with the softmax between them.

Imports ``core``; no other family may import it.
Start with ``fuse_attention.py`` for GPUs, with ``attention_in_tiles.py`` for CPUs.
"""
