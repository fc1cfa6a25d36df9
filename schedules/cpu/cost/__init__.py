# SPDX-License-Identifier: Apache-2.0
"""Cost models of convolutions, and the knobs that they choose.

Imports ``core``; ``conv2d`` and the decisions of ``relay_passes`` may import it.
Start with ``cost_model.py``; ``nest_cost.py`` has the equations.
"""
