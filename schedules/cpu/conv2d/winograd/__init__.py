# SPDX-License-Identifier: Apache-2.0
"""Rule ``WinogradConv2D``: packed 3x3 convolutions by Winograd's algorithm.

Imports ``cost``, ``core`` and ``register_tile_nest.py`` beside this folder; only
``cpu/__init__.py`` may import it. Start with ``winograd_nest.py``.
"""
