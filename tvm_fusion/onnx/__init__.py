# SPDX-License-Identifier: Apache-2.0
"""ONNX models to Relax: loading, checks, shapes, rewrites, translation.

Imports ``runtime`` and below; ``compiler``, ``bench`` and ``cli`` may import it.
Start with ``frontend.py``, then ``rewrite.py`` and ``translate.py``; subpackages are ``model``,
``graph`` and ``operators``.
"""
