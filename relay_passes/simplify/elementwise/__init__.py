# SPDX-License-Identifier: Apache-2.0
"""Rules that bring activations and clips into one form.

Imports ``op`` and ``core``; only ``simplify`` may import it.
Start with ``canonicalize_clip.py``.
"""
