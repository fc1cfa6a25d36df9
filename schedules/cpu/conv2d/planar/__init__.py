# SPDX-License-Identifier: Apache-2.0
"""Pairs of a depthwise and a pointwise layer on NCHW planes, without a change of layout.

Imports ``core``; ``fused_conv2d.py`` and ``forms.py`` beside this folder may import it.
Start with ``planar_nest.py``.
"""
