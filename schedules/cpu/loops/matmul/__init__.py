# SPDX-License-Identifier: Apache-2.0
"""Rule ``Dense``: products of matrices and vectors, with their bias and activation.

Imports ``nests`` and ``core``; other families than ``loops`` may not import it.
Start with ``matmul_pattern.py``, then ``dense.py``.
"""
