# SPDX-License-Identifier: Apache-2.0
"""Distribution of networks over ranks by the rows, or channels, of their activations.

Imports ``op``, ``core`` and ``schedules.distribute``; no other family may import it.
Start with ``distribute_rows.py``, then with ``row_rules.py`` and ``row_stages.py`` for the ops
that can be split.
"""
