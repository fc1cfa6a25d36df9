# SPDX-License-Identifier: Apache-2.0
"""Front ends are found by the type of a model, and asked for all that depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

import tvm_fusion
from tvm_fusion.compiler import registry
from tvm_fusion.compiler.registry import ONNX, front_end_of


@dataclass
class Wrapped:
    """A model of another framework."""

    proto: onnx.ModelProto


class WrappedFrontEnd:
    """Front end of such models, which notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def ask(model: Wrapped, *others: Any) -> Any:
            self.asked.append(name)
            return getattr(ONNX, name)(model.proto, *others)

        return ask


def relu(rows: str) -> Wrapped:
    graph = f"g (float[{rows}, 3] x) => (float[{rows}, 3] y) {{ y = Relu(x) }}"
    return Wrapped(parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {graph}'))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that the front end got."""
    front_end = WrappedFrontEnd()
    monkeypatch.setitem(registry.FRONT_ENDS, __name__, lambda: front_end)
    return front_end.asked


def test_a_front_end_is_asked_for_models_of_its_package(asked: list[str], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    x = np.float32([[-1, 0, 2]])
    for _ in range(2):
        model = tvm_fusion.compile(relu("1"), threads=1, check=True, cache=tmp_path)
        np.testing.assert_array_equal(model(x), np.maximum(x, 0))
    assert asked == ["digest", "import_model", "reference", "digest", "reference"]
    del asked[:]
    assert tvm_fusion.specialize(relu("n"), threads=1).dimensions == ("n",)
    assert asked == ["as_onnx"]


def test_all_other_models_are_those_of_onnx(asked: list[str]) -> None:
    for model in ("model.onnx", Path("model.onnx"), b"", relu("1").proto, None):
        assert front_end_of(model) is ONNX
    assert not asked
