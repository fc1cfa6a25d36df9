# SPDX-License-Identifier: Apache-2.0
"""Devices that compute rows of a rank: operation sequences, and rows split between CPU and device.

Imports the modules of ``distribute`` beside this folder; ``tvm_fusion.distributed`` may import it.
Start with ``operation_sequence.py``, then with ``split.py`` for who computes which rows.
"""
