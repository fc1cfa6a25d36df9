# SPDX-License-Identifier: Apache-2.0
"""Real architectures of PyTorch, torchvision, timm and transformers: ONNX Runtime's numbers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")

from examples import torch_zoo  # noqa: E402
from examples.torch_zoo import FAMILIES, LIMIT, TORCH_ZOO, check, rows_error  # noqa: E402
from examples.torchvision_ops import import_torchvision, suppress  # noqa: E402

OURS = ("conformer", "diffusion_unet", "dlrm", "speech_gru", "speech_lstm", "unet")
"""Small networks of our own, for which PyTorch is enough."""

QUICK = ("conformer", "dlrm")
"""Attention and tables; the U-Nets have the layers of the other zoo's."""

PACKAGES = {
    "classification": "torchvision",
    "detection": "torchvision",
    "segmentation": "torchvision",
    "timm": "timm",
    "text": "transformers",
    "image transformers": "transformers",
    "speech": "transformers",
    "series": "transformers",
}


def needed(name: str) -> str | None:
    """The package beside PyTorch that has a model."""
    family = next(key for key, models in FAMILIES.items() if name in models)
    return None if name in OURS else PACKAGES.get(family)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in TORCH_ZOO],
)
def test_numbers_of_onnx_runtime(name: str) -> None:
    package = needed(name)
    if package:
        with contextlib.suppress(ImportError):
            import_torchvision()  # This comes before timm and transformers, which import it, too.
        pytest.importorskip(package, reason="it is not installed", exc_type=ImportError)
    error, _ = check(name)
    assert error <= LIMIT


def test_there_are_enough_of_each_kind() -> None:
    assert len(TORCH_ZOO) >= 100
    assert {family: len(models) for family, models in FAMILIES.items()} == {
        "classification": 22,
        "timm": 20,
        "detection": 3,
        "segmentation": 4,
        "text": 43,
        "image transformers": 11,
        "speech": 9,
        "series": 1,
        "diffusion and ranking": 3,
    }


@pytest.mark.slow
def test_command_writes_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_zoo.main(["dlrm", "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("dlrm: right, error ")
    assert (tmp_path / "dlrm.onnx").exists()
    with pytest.raises(SystemExit):
        torch_zoo.main(["no_model"])
    assert "unknown models: no_model" in capsys.readouterr().err


def test_failures_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str, full: bool, folder: Path | None) -> tuple[float, float]:
        if name == "dlrm":
            raise ValueError("no such layer")
        return 1.0, 2.0

    monkeypatch.setattr(torch_zoo, "check", fail)
    assert torch_zoo.main(["dlrm", "unet"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dlrm: ValueError: no such layer"
    assert lines[1] == "unet: WRONG, error 1.0e+00, compiled in 2.0 s"


def test_rows_may_come_in_any_order() -> None:
    boxes, scores = np.arange(12.0).reshape(3, 4), np.array([0.9, 0.5, 0.4])
    turned = [boxes[[0, 2, 1]], scores[[0, 2, 1]]]
    assert rows_error(turned, [boxes, scores]) == 0
    assert rows_error([boxes, scores[::-1]], [boxes, scores]) > 0.1
    with pytest.raises(AssertionError, match="expected the same"):
        rows_error([boxes[:2], scores[:2]], [boxes, scores])


def test_suppression_for_tracing() -> None:
    boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.8], [5, 5, 6, 6], [0, 0, 2, 1]])
    scores = torch.tensor([0.5, 0.9, 0.1, 0.7])
    assert suppress(boxes, scores, 0.5).tolist() == [1, 2]
    assert suppress(boxes, scores, 0.95).tolist() == [1, 3, 0, 2]
