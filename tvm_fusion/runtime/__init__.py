# SPDX-License-Identifier: Apache-2.0
"""Compiled models: calls, memory, threads, and the saved file.

Imports ``codegen`` and ``machine``, and needs no compiler; everything above may import it.
Start with ``compiled_model.py``.
"""
