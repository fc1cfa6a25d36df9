# SPDX-License-Identifier: Apache-2.0
"""Dataflow graphs and expressions of Relax, as the passes read and edit them.

Imports no other family; every family but ``op`` may import it.
Start with ``graph.py``.
"""
