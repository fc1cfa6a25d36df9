# SPDX-License-Identifier: Apache-2.0
"""Calibration of this CPU: its limits, overheads, and how our kernels compare with their models.

Imports the rest of ``prediction``; ``cli`` may import it. Start with ``calibration.py``;
``cases.py`` has the kernels, ``timing.py`` measures them.
"""
