# SPDX-License-Identifier: Apache-2.0
"""Code of a reduction kernel, from the loads to the combination in the last block.

Imports ``reduce/plan`` and ``core``; only the rule may import it.
Start with ``group_kernel.py``.
"""
