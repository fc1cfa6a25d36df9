# SPDX-License-Identifier: Apache-2.0
"""Models that tests of ``torch.compile`` make, and one table of PyTorch's exporter for all tests.

PyTorch makes the table anew for each export, in half of the time of one, and changes it only for
tables of other translations, which nothing here has.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

try:
    from torch.onnx._internal.exporter._registration import ONNXRegistry
except ImportError:  # no PyTorch, or one with another exporter
    pass
else:
    ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))


@pytest.fixture
def kept_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The models that are compiled; Dynamo forgets all before and after a test."""
    import torch

    from tvm_fusion.errors import EagerModeWarning
    from tvm_fusion.torch import lowering

    made: list[Any] = []
    compile_model = lowering.compile

    def keep(*arguments: Any, **options: Any) -> Any:
        made.append(compile_model(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(lowering, "compile", keep)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerModeWarning)
        yield made
    torch._dynamo.reset()
