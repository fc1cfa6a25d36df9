# SPDX-License-Identifier: Apache-2.0
"""Paddings of convolutions and pools, and sizes of resized images.

Imports ``onnx/model``; only ``onnx`` may import it.
Start with ``auto_pad.py``.
"""
