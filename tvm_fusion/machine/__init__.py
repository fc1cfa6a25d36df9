# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine: its CPU, its software, NVIDIA's toolkit.

Imports only ``tvm_fusion.errors``; every other family may import it.
Start with ``host.py``.
"""
