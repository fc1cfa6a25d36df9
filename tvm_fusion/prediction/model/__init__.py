# SPDX-License-Identifier: Apache-2.0
"""Predictions of whole models: their kernels, in our engine or in PyTorch's, and their times.

The command line imports it. Start with ``predict_model.py``, then with ``compiled.py`` for our
kernels or ``eager.py`` for those of PyTorch.
"""
