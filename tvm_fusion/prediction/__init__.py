# SPDX-License-Identifier: Apache-2.0
"""Predictions: what a run takes on a machine, and what would change that.

Imports everything below ``cli``; only the command line may import it. Start with ``api.py``;
``timeline`` holds the algorithms, ``kineto.py`` and ``chakra.py`` read traces.
"""
