# SPDX-License-Identifier: Apache-2.0
"""ONNX models to Relax: loading, checks, shapes, rewrites, import.

Imports ``runtime`` and below; ``compiler``, ``bench`` and ``cli`` may import it.
Start with ``frontend.py``, then ``rewrite.py``; subpackages are ``model`` and ``rewrites``.
"""
