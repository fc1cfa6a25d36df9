# SPDX-License-Identifier: Apache-2.0
"""Networks over ranks: compiled, saved as one file, run, explained, simulated.

Imports the programs beside it and ``compiler``; ``cli`` imports it.
Start with ``compile_network.py``, then with ``model.py``.
"""
