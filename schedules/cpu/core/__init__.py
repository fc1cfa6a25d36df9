# SPDX-License-Identifier: Apache-2.0
"""Machine, register tiles and micro-kernels: the base of all families of CPU kernels.

Imports ``workload``, ``compute`` and ``tir``; every family of ``cpu`` may import it.
Start with ``machine.py`` (``CPUInfo``), then ``micro_kernel.py``.
"""
