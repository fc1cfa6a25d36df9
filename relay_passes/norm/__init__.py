# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseLayerNorm``: layer norms as parts of the products before and behind them.

Imports ``core``; no other family may import it.
Start with ``fuse_layer_norm.py``.
"""
