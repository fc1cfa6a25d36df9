# SPDX-License-Identifier: Apache-2.0
"""Expressions and statements of TensorIR, read and rewritten whatever the hardware.

Imports no other family; ``workload``, ``compute``, ``cpu``, ``gpu`` and the passes may import it.
Start with ``expression_walk.py`` for reading, with ``vector_math.py`` for rewriting.
"""
