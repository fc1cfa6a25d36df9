# SPDX-License-Identifier: Apache-2.0
"""Devices beside the CPU of a rank: drivers, kernels, and runs of operation sequences.

Imports ``codegen``, ``compiler`` and ``runtime``; ``program.py`` and ``local_program.py`` above may
import it. Start with ``shares.py``, then with ``device_run.py``.
"""
