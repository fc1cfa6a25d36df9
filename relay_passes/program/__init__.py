# SPDX-License-Identifier: Apache-2.0
"""Passes on whole programs, whatever their ops.

Imports ``op`` and ``core``; no other family may import it.
Start with any file; each pass stands alone.
"""
