# SPDX-License-Identifier: Apache-2.0
"""Rules and loop nests of packed convolutions, of fused pairs, and of their layouts.

``planar`` holds pairs on NCHW planes, ``winograd`` convolutions by Winograd's algorithm.
Imports ``cost`` and ``core``; ``cpu/__init__.py`` and the decisions of the passes may import it.
Start with ``conv2d.py``, the rule of a single convolution; ``fused_nest.py`` has that of a pair.
"""
