# SPDX-License-Identifier: Apache-2.0
"""Targets of compilation: CPUs and GPUs, from a user's notation to a complete TVM target.

Imports ``runtime`` and ``machine``; every family above ``compiler``, and ``compiler`` itself, may
import it. Start with ``target.py``.
"""
