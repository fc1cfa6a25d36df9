# SPDX-License-Identifier: Apache-2.0
"""Models of kernels: one file a family, one function each, from a call and a machine to a time.

Imports the calls, machines and learned trees beside it; ``registry.py`` imports it.
Start with ``gemm.py``; ``registry.py`` has the table of all.
"""
