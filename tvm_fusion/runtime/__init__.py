# SPDX-License-Identifier: Apache-2.0
"""Compiled models: calls, memory, threads, and the saved file.

Imports ``codegen`` and ``machine``, and needs no compiler; everything above may import it.
Start with ``compiled_model.py``.
"""

import sys

if "torch" not in sys.modules:
    # tvm_ffi imports PyTorch if it is installed: seconds and 500 MiB for what no model needs.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm_ffi  # noqa: F401
    finally:
        del sys.modules["torch"]
