# SPDX-License-Identifier: Apache-2.0
"""Plan of a reduction kernel: the group that it computes, and its configuration.

Imports ``core``; ``reduce/kernel``, the rule, and the passes for reductions may import it.
Start with ``group.py``, then ``config.py``.
"""
