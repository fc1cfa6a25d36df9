# SPDX-License-Identifier: Apache-2.0
"""Loop nests of scheduled blocks: reading them, and the transformations that rules share.

Imports ``core`` and ``tir``; ``reduce`` and ``loops`` may import it.
Start with ``blocks.py``, then ``loop_transforms.py``.
"""
