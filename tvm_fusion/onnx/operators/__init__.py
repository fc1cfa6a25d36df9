# SPDX-License-Identifier: Apache-2.0
"""Table of operators: for each its checks, the nodes it becomes, its translation to Relax.

Imports ``graph`` and ``model``; only ``onnx`` may import it. Start with ``operator.py``; all
operators are in ``table.py``, those of other domains in ``contrib`` and ``classical``.
"""
