# SPDX-License-Identifier: Apache-2.0
"""One table of PyTorch's exporter to ONNX for all tests.

PyTorch makes it anew for each export, in half of the time of one, and changes it only for tables
of other translations, which nothing here has.
"""

from __future__ import annotations

import functools

try:
    from torch.onnx._internal.exporter._registration import ONNXRegistry
except ImportError:  # no PyTorch, or one with another exporter
    pass
else:
    ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
