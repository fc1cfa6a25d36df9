# SPDX-License-Identifier: Apache-2.0
"""Distribution of loop nests over ranks: parts, regions read, messages, local functions.

Imports ``tir``; ``tvm_fusion.distributed`` may import it.
Start with ``distribute.py``, then with ``exchange.py`` for who sends what to whom.
"""
