# SPDX-License-Identifier: Apache-2.0
"""Workloads: the shapes, attributes and algebra that computes, rules and passes share.

Imports only ``schedules.errors`` and extents of ``tir``; everything else may import it.
Start with ``conv2d.py`` for convolutions, with ``reduce.py`` for reductions.
"""
