# SPDX-License-Identifier: Apache-2.0
"""Attention as one kernel.

Above ``gemm``, whose tiles it uses. Imports ``tir`` and ``workload``.
Start with ``attention.py``, the rule.
"""
