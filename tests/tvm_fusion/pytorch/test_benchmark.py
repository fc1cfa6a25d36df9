# SPDX-License-Identifier: Apache-2.0
"""The benchmarks with models of PyTorch; torchvision and transformers need not be installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")

from examples import torch_zoo, torchvision_ops  # noqa: E402
from examples.benchmarks import torch_engines, torch_models, zoo  # noqa: E402


@pytest.mark.slow
def test_engines_make_the_same_model_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_model(name: str, weights: None) -> Any:
        assert name == "tiny"
        pool = torch.nn.AvgPool2d(32)
        return torch.nn.Sequential(pool, torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())

    package = SimpleNamespace(models=SimpleNamespace(get_model=get_model))
    monkeypatch.setattr(torchvision_ops, "import_torchvision", lambda: package)
    outputs = []
    for backend in ("eager", "tvm_fusion"):
        engine = torch_engines.engines.ENGINES[f"torch-{backend}"].make()
        engine.load("/tmp/tiny", {}, 1, {})
        service = torch_engines.engines.Service(engine)
        outputs.append(service.outputs([0]))
        assert len(service.turn([0], 2, 0.1)) >= 1
    assert outputs[0][0].shape == (1, 4, 5, 5)
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-6, rtol=1e-5)


def test_table_has_ratios_and_their_mean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def races(models: Any, engines: Any, plan: Any, options: Any, fresh: bool) -> dict[str, Any]:
        assert fresh and [spec.engine for spec in engines] == list(torch_models.ENGINES)
        numbers = {"compile_seconds": 1, "relative_error": "1e-7", "median_ms": 2}
        ratios = (("ours", 1), ("Inductor", 2), ("eager", 8))
        rows = [{"title": title, "ratio": ratio, **numbers} for title, ratio in ratios]
        machine = {"packages": {}, "cpu": "a CPU"}
        return {"resnet18": {"engines": rows, "machine": machine, "threads": 2}}

    monkeypatch.setattr(torch_models, "run_races", races)
    monkeypatch.setattr(sys, "argv", ["torch_models.py", "--output", str(tmp_path / "t.json")])
    assert torch_models.main() == 0
    out = capsys.readouterr().out
    assert "resnet18" in out and "2.00x" in out and "8.00x" in out


def test_stored_results_are_right() -> None:
    for path in Path(torch_models.__file__).with_name("results").glob("*/torch.json"):
        for name, result in json.loads(path.read_text())["results"].items():
            assert name in torch_models.MODELS
            assert all(float(engine["relative_error"]) < 1e-4 for engine in result["engines"])


def test_exported_models_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []

    def export(name: str, full: bool) -> Any:
        assert full
        made.append(name)
        return SimpleNamespace(model=onnx.helper.make_model(onnx.GraphProto(name=name)))

    monkeypatch.setattr(zoo, "export", export)
    paths = {zoo.exported("bert", tmp_path / "models") for _ in range(2)}
    assert made == ["bert"] and onnx.load(paths.pop()).graph.name == "bert" and not paths


def test_zoo_has_a_table_and_a_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="it is not installed")

    def races(models: Any, engines: Any, plan: Any, options: Any, fresh: bool) -> dict[str, Any]:
        assert list(models) == list(torch_zoo.TORCH_ZOO) and len(models) >= 35
        assert [spec.engine for spec in engines] == ["tvm-fusion", "onnxruntime"]
        numbers = {"compile_seconds": 1, "relative_error": "1e-7", "median_ms": 2}
        machine = {"packages": {}, "cpu": "a CPU"}
        ratios = {"bert": 2, "gpt2": 8, "dlrm": 0.5}
        return {
            name: {
                "engines": [{"title": "ours", "ratio": 1, **numbers}]
                + [{"title": "theirs", "ratio": ratio, **numbers}],
                "machine": machine,
                "threads": 2,
            }
            for name, ratio in ratios.items()
        }

    monkeypatch.setattr(zoo, "run_races", races)
    monkeypatch.setattr(sys, "argv", ["zoo.py", "--output", str(tmp_path / "z.json")])
    assert zoo.main() == 0
    out = capsys.readouterr().out
    assert "text, geometric mean" in out and "4.00x" in out and "2.00x" in out
    assert (tmp_path / "z.png").read_bytes().startswith(b"\x89PNG")
