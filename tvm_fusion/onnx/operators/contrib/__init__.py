# SPDX-License-Identifier: Apache-2.0
"""Operators of the domain ``com.microsoft``, which ONNX Runtime's optimiser writes into models.

Each is written by ONNX's own operators, before anything else looks at the model: onnx infers no
shapes of these operators. Those whose form depends on ranks or sizes wait for their inputs' shapes.
``onnx/foreign.py`` replaces them, also those of ``../classical/``.
"""
