# SPDX-License-Identifier: Apache-2.0
"""Reduced loops over ranks: parts of a reduction, and what combines them.

Imports the modules of ``distribute`` beside this folder; ``tvm_fusion.distributed`` may import it.
Start with ``partial_reduction.py``; ``selection.py`` combines the parts of argmax and its like.
"""
