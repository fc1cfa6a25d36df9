# SPDX-License-Identifier: Apache-2.0
"""Predictions: what a run takes on a machine, and what would change that.

Imports everything below ``cli``; only the command line may import it. Start with ``api.py`` for
traced runs, with ``model/predict_model.py`` for models; ``timeline`` holds the algorithms.
"""
