# SPDX-License-Identifier: Apache-2.0
"""Operators of the domain ``ai.onnx.ml``: models of scikit-learn, LightGBM and XGBoost.

What ONNX's own operators express is written by them; trees and the coupling of probabilities have
kernels of ours. ``refusals.py`` says what is left out.
"""
