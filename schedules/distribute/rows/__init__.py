# SPDX-License-Identifier: Apache-2.0
"""Rows of a network over ranks: what each rank holds, computes and sends, and what it costs.

Imports ``distribute.cost``; the passes and programs of distribution may import it.
Start with ``row_plan.py``; ``row_cost.py`` chooses the segments.
"""
