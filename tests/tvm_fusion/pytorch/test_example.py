# SPDX-License-Identifier: Apache-2.0
"""The example with PyTorch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")

from examples import torch_model  # noqa: E402


@pytest.mark.slow
def test_both_ways_agree_with_eager_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_model.main() == 0
    assert "exported program" in capsys.readouterr().out
