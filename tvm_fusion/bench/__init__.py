# SPDX-License-Identifier: Apache-2.0
"""Measurements: races between engines, each in its own process, and profiles of kernels.

Imports ``compiler`` and all below it; ``cli`` may import it.
Start with ``race.py``, then ``worker.py``; ``profiler.py`` measures each kernel.
"""
