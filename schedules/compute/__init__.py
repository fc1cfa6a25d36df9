# SPDX-License-Identifier: Apache-2.0
"""TE computes: pure functions from tensors to tensors, one file a kernel family.

Imports ``workload`` and ``tir``; the rules, and the ops of ``relay_passes``, may import it.
Start with ``conv2d.py`` or ``coalesced_reduce.py``.
"""
