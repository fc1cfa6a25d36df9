# SPDX-License-Identifier: Apache-2.0
"""Compilation: targets, the phases of the pipeline, and reports.

Imports ``onnx``, ``runtime``, ``codegen`` and ``machine``; ``bench`` and ``cli`` may import it.
Start with ``compile.py`` and ``compile_model.py``, then ``pipeline.py``.
"""
