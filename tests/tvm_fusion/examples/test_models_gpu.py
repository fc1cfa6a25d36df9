# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark of whole models without a GPU: numbers, tables, dry run, resumption."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from gpu_fakes import FakeClock, FakeEngine

from examples.benchmarks import models_gpu, reductions_gpu
from examples.benchmarks.gpu import compare, machine, report
from examples.benchmarks.gpu.protocol import Plan, Summary, Verdict
from examples.benchmarks.gpu.with_tvm import model_case, model_engines
from examples.benchmarks.gpu.with_tvm.model_case import ModelCase, judge, our_phases
from examples.mobilenet_v3 import mobilenet_v3_large
from examples.models import mobilenet_v2, resnet_18
from examples.transformers import bert_base, gpt2
from examples.vgg import vgg_16
from examples.wide_and_deep import wide_and_deep
from tvm_fusion.errors import EngineError

SMALL: dict[str, Callable[[], onnx.ModelProto]] = {
    "bert": lambda: bert_base(2, 16, layers=1, width=32, heads=2, vocabulary=50),
    "gpt2": lambda: gpt2(1, 12, layers=1, width=32, heads=2, vocabulary=60),
    "wide_and_deep": lambda: wide_and_deep(3, rows=50, embedding=4, layers=(16, 8)),
    "mobilenet_v3": lambda: mobilenet_v3_large(1, 32, layers=4),
    "mobilenet_v2": lambda: mobilenet_v2(1, 32),
    "vgg_16": lambda: vgg_16(1, 32, width=4, features=16),
    "resnet_18": lambda: resnet_18(1, 32),
}


def summary(seconds: float) -> Summary:
    return Summary(seconds, seconds, seconds, 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock; inputs need no PyTorch, and an output is what the engine's launch returns."""
    monkeypatch.setattr(ModelCase, "tensors", lambda self, seed, device: self.arrays(seed))
    monkeypatch.setattr(machine, "gpu_state", lambda: {})
    monkeypatch.setattr(models_gpu, "reference", lambda case, seed: [np.array(3.0), np.array(0)])
    monkeypatch.setattr(model_case, "as_torch", _Fake)
    return FakeClock()


class _Fake:
    """Tensor with the methods that are asked for."""

    def __init__(self, value: Any) -> None:
        self._value = np.asarray(value)

    def detach(self) -> _Fake:
        return self

    def cpu(self) -> _Fake:
        return self

    def numpy(self) -> np.ndarray:
        return self._value


def race_on(
    names: list[str], engines: list[Any], clock: FakeClock, path: Path, *arguments: str
) -> models_gpu.Results:
    options = models_gpu.parser().parse_args(["--output", str(path), *arguments])
    settings = {"machine": {"gpu": {"name": "fake"}}, "plan": {}}
    plan = Plan(samples=2, warmup_seconds=0)
    return models_gpu.measure_all(names, engines, clock, plan, settings, options)


def test_models_are_raced_checked_and_kept(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models_gpu, "MODELS", {"one": SMALL["bert"], "two": SMALL["bert"]})
    titles = (models_gpu.OURS, models_gpu.WITHOUT, "wrong", "lost")
    values = (3.0, 3.0, 3.1, 3.0)
    engines = [
        FakeEngine(clock, title, 1e-3 * (i + 1), value=value, breaks_after=5 if i == 3 else 99)
        for i, (title, value) in enumerate(zip(titles, values, strict=True))
    ]
    path = tmp_path / "models.json"
    found = race_on(["one"], engines, clock, path)
    verdicts = {verdict.engine: verdict for verdict in found["one"]}
    ours = verdicts[models_gpu.OURS]
    assert ours.how == "graph" and ours.device is not None and ours.host is not None
    assert ours.device.median == pytest.approx(1e-3) and ours.stream is not None
    assert set(engines[0].launched) == set(range(models_gpu.INPUT_SETS)), "fresh inputs"
    assert "off by 33.3 times what is allowed" in verdicts["wrong"].problem
    assert verdicts["lost"].problem == "RuntimeError: device lost"
    stored = json.loads(path.read_text())
    assert stored["results"]["one"]["gain"] == pytest.approx(2.0)
    before = len(engines[0].launched)
    again = race_on(["one", "two"], engines[:2], clock, path, "--resume")
    assert [*again] == ["one", "two"] and again["one"] == found["one"]
    assert len(engines[0].launched) > before
    assert race_on(["one"], engines, clock, path, "--minutes", "1e-12") == {}


def test_a_model_that_fails_does_not_end_the_race(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken() -> onnx.ModelProto:
        raise MemoryError("too large")

    monkeypatch.setattr(models_gpu, "MODELS", {"bad": broken, "good": SMALL["bert"]})
    ours = FakeEngine(clock, models_gpu.OURS, 1e-3, value=3.0)
    found = race_on(["bad", "good"], [ours], clock, tmp_path / "m.json")
    assert [v[0].problem for v in found.values()] == ["MemoryError: too large", ""]


def test_an_engine_without_graphs_is_timed_by_events(clock: FakeClock) -> None:
    def capture(_: Any) -> Any:
        raise RuntimeError("a copy to the host")

    clock.capture = capture  # type: ignore[method-assign]
    engine = FakeEngine(clock, "ours", 1e-3, value=3.0)
    (verdict,) = models_gpu.measure_model(
        ModelCase("one", SMALL["bert"]()), [engine], clock, Plan(samples=2, warmup_seconds=0)
    )
    assert verdict.how == "events" and verdict.device is not None and not verdict.problem
    assert verdict.details["no graph"] == "RuntimeError: a copy to the host"


def test_outputs_are_judged_by_the_reference_or_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_case, "as_torch", _Fake)
    expected = [np.array([10.0, -20.0])]
    error, bound = judge(expected)([np.array([10.0, -20.01])])
    assert error == pytest.approx(0.5, rel=1e-2) and bound == 1e-3
    assert judge(expected)([np.array([10.0, math.nan])])[0] == math.inf
    with pytest.raises(EngineError, match=r"shapes \[\(3,\)\]; expected \[\(2,\)\]"):
        judge(expected)([np.zeros(3)])
    without = judge(None)
    assert without([np.array([1.0])]) == (0.0, 1e-3)
    assert without([np.array([1.1])])[0] == pytest.approx(100)


def test_the_reference_is_onnx_runtime() -> None:
    case = ModelCase("one", SMALL["wide_and_deep"]())
    (output,) = model_case.reference(case, 0) or []
    assert output.shape == (3, 1) and ((output > 0) & (output < 1)).all()
    assert [*case.inputs] == ["numbers", "categories", "crosses"]
    assert case.inputs["numbers"] == ((3, 13), "float32")
    assert not np.array_equal(case.arrays(0)[0], case.arrays(1)[0])


def test_the_table_and_the_plot(tmp_path: Path) -> None:
    good = Verdict(models_gpu.OURS, device=summary(2e-3), host=summary(3e-3), how="graph")
    good.details["kernels"] = 7
    slow = Verdict(models_gpu.WITHOUT, device=summary(3e-3), how="events")
    wrong = Verdict("other", "EngineError: wrong: off by 2 times what is allowed")
    results = {"one": [good, slow, wrong], "two": [good, Verdict(models_gpu.WITHOUT, "absent")]}
    table = models_gpu.results_table(results, "title")
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows == [
        ("one", "2.000, host 3.000 (7)", "3.000 *", "wrong", "1.50x"),
        ("two", "2.000, host 3.000 (7)", "none", "", ""),
    ]
    assert "geometric mean of the gains 1.50x" in str(table.caption)
    report.draw_models(results, "title", tmp_path / "models.png")
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "wide_and_deep"])
def test_dry_run_counts_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models_gpu, "MODELS", {name: SMALL[name]})
    assert models_gpu.main(["--dry-run", "--only", name]) == 0
    out = capsys.readouterr().out
    (row,) = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith(f"│ {name}")]
    ours, without, stock, lines, _ = (int(cell) for cell in row[1:])
    assert 0 < ours <= without <= stock and lines > 100
    assert "stock TVM: absent: " in out and "FAILED" not in out


def test_dry_run_lists_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(case: ModelCase, plan: Any, arch: str) -> None:
        raise EngineError(f"no kernel for {arch}")

    monkeypatch.setattr(models_gpu, "MODELS", {"bert": SMALL["bert"]})
    monkeypatch.setattr(models_gpu, "optimize", fails)
    assert models_gpu.main(["--dry-run"]) == 1
    assert "FAILED bert, tvm-fusion: EngineError: no kernel for sm_90" in capsys.readouterr().out


def test_no_gpu_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "find_gpu", lambda: "no CUDA GPU was found")
    assert models_gpu.main(["--quick"]) == 2
    assert capsys.readouterr().err == ("bench-gpu: no CUDA GPU was found; --dry-run needs none\n")


@pytest.mark.parametrize("benchmark", [models_gpu, reductions_gpu])
def test_an_unknown_architecture_is_one_clear_line(
    benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main(["--dry-run", "--arch", "sm_1"]) == 2
    assert benchmark.main(["--dry-run", "--arch", "sm_9O"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "bench-gpu: architecture sm_1 is too old; expected sm_70 or newer"
    assert "unknown CUDA architecture 'sm_9O'; did you mean sm_90" in second


def test_without_reduction_passes_leaves_out_those_that_exist() -> None:
    every, fewer = (
        [str(step.info.name) for steps in our_phases("sm_90", on).values() for step in steps]
        for on in (True, False)
    )
    assert [name for name in every if name not in model_case.REDUCTION_PASSES] == fewer
    assert set(model_case.REDUCTION_PASSES) <= set(every)


def test_engines_that_are_absent_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        @staticmethod
        def get_available_providers() -> list[str]:
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(model_engines, "module", lambda name: Runtime)
    engine = model_engines.ByOnnxRuntime()
    assert compare.presence(engine) == (
        "ONNX Runtime has no CUDAExecutionProvider, only CPUExecutionProvider"
    )
    titles = [engine.title for engine in model_engines.model_engines("sm_90")]
    assert titles[:3] == [models_gpu.OURS, models_gpu.WITHOUT, "stock TVM"]
    assert titles[3:] == ["PyTorch", "torch.compile", "ONNX Runtime CUDA"]


class _Tensor(np.ndarray):
    """An array that has what the engine asks of tensors."""

    device = SimpleNamespace(type="cpu")

    def data_ptr(self) -> int:
        return self.ctypes.data


def test_onnx_runtime_leaves_its_results_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(shape: tuple[int, ...], dtype: str, device: object) -> _Tensor:
        return np.full(shape, np.nan, dtype).view(_Tensor)

    torch = SimpleNamespace(float32="float32", int64="int64", empty=empty)
    modules = {"torch": torch, "onnxruntime": onnxruntime}
    monkeypatch.setattr(model_engines, "module", modules.get)
    monkeypatch.setattr(model_engines, "PROVIDER", "CPUExecutionProvider")
    case = ModelCase("bert", SMALL["bert"]())
    sets = [[array.view(_Tensor) for array in case.arrays(seed)] for seed in range(2)]
    launcher = model_engines.ByOnnxRuntime().prepare(case, sets)
    launcher.all_sets()
    for number in (0, 1):
        outputs = launcher.launch(number)
        assert all(a is b for a, b in zip(outputs, launcher.launch(number), strict=True))
        for found, wanted in zip(outputs, model_case.reference(case, number), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", SMALL)
def test_the_twin_in_pytorch_computes_the_same(name: str) -> None:
    torch = pytest.importorskip("torch")
    from examples.benchmarks.gpu.onnx_torch import TorchTwin

    case = ModelCase(name, SMALL[name]())
    outputs = TorchTwin(case.model, "cpu")(*map(torch.from_numpy, case.arrays(0)))
    assert judge(model_case.reference(case, 0))(outputs)[0] < 0.02


def test_the_twin_refuses_unknown_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.benchmarks.gpu import onnx_torch

    monkeypatch.setattr(onnx_torch, "module", lambda name: None)
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])
    node = onnx.helper.make_node("Det", ["x"], ["y"])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [value], [value]))
    with pytest.raises(EngineError, match="no twin in PyTorch of the operators Det"):
        onnx_torch.TorchTwin(model, "cpu")
