# SPDX-License-Identifier: Apache-2.0
"""Machine code without a compiler's linker: ELF objects, shared libraries, NVRTC.

Imports ``machine``; ``runtime`` and everything above it may import it.
Start with ``linker.py``, for GPUs with ``library_bin.py``.
"""
