# SPDX-License-Identifier: Apache-2.0
"""Races: whose turn it is, what the ratios mean, what is refused; and real ones between engines."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from small_onnx import small_model

from tvm_fusion.bench import race as benchmark
from tvm_fusion.bench.engines import ENGINES
from tvm_fusion.bench.race import (
    Arena,
    EngineSpec,
    Plan,
    available_peers,
    cpu_peers,
    gpu_peers,
    model_file,
    race,
)
from tvm_fusion.cli.output import json_text
from tvm_fusion.errors import EngineError, InvalidModelError
from tvm_fusion.runtime.host_arrays import random_inputs


class FakeWorker:
    """Answers like a worker; its latency in each round, and its outputs, come from its options."""

    log: list[tuple[str, str]] = []
    open: list[str] = []
    loaded: list[str] = []

    def __init__(self, spec: EngineSpec, threads: int) -> None:
        self.spec = spec
        self.threads = threads

    def __enter__(self) -> FakeWorker:
        self.open.append(self.spec.title)
        return self

    def __exit__(self, *exception: object) -> None:
        self.open.remove(self.spec.title)

    def call(self, method: str, **arguments: Any) -> Any:
        self.log.append((method, self.spec.title))
        return getattr(self, method)(**arguments)

    def load(self, path: str, shapes: Any, threads: int, options: Any) -> dict[str, Any]:
        self.asked = {"path": path, "shapes": shapes, "threads": threads, "options": options}
        if "artifact" in options:
            self.loaded.append(Path(options["artifact"]).read_text())
        inputs = self.spec.options.get("inputs", [("x", (2, 3), "float32")])
        return {"seconds": 1.5, "inputs": inputs, "version": "1.0", "details": {}}

    def compile(self, options: Any, output: str, **request: Any) -> float:
        Path(output).write_text(f"compiled with {options}")
        return 4.0

    def outputs(self, seed: Any) -> list[np.ndarray]:
        return [np.array([1.0, self.spec.options.get("second", 2.0)])]

    def turn(self, seed: list[int], runs: int, seconds: float, aligned: bool) -> list[float]:
        assert aligned == self.spec.aligned
        latency = self.spec.options["latency"]
        return [latency[seed[1]] if isinstance(latency, list) else latency] * runs

    def peak_bytes(self) -> int:
        return 5 << 20


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "log", [])
    monkeypatch.setattr(FakeWorker, "open", [])
    monkeypatch.setattr(FakeWorker, "loaded", [])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    monkeypatch.setattr(benchmark, "EngineWorker", FakeWorker)
    return FakeWorker


def spec(title: str, engine: str = "tvm", **options: Any) -> EngineSpec:
    return EngineSpec(engine, title, {"latency": 0.001} | options)


def test_engines_take_turns(fake: type[FakeWorker]) -> None:
    race(b"m", [spec("a"), spec("b"), spec("c")], threads=1, plan=Plan(rounds=2))
    assert [title for method, title in fake.log if method == "turn"] == list("abcabc")
    assert fake.open == []


def test_aligned_inputs_are_asked_for(fake: type[FakeWorker]) -> None:
    aligned = EngineSpec("tvm", "aligned", {"latency": 0.001}, aligned=True)
    race(b"m", [spec("a"), aligned], threads=1, plan=Plan(rounds=1))
    assert [title for method, title in fake.log if method == "turn"] == ["a", "aligned"]


def test_what_runs_beside_the_race_runs_during_its_turns_only(fake: type[FakeWorker]) -> None:
    @contextlib.contextmanager
    def beside() -> Iterator[None]:
        fake.log.append(("begin", ""))
        yield
        fake.log.append(("end", ""))

    plan = Plan(rounds=2)
    race(b"m", [spec("a"), spec("b")], threads=1, plan=plan, beside=beside())
    methods = [method for method, _ in fake.log]
    during = slice(methods.index("begin"), methods.index("end") + 1)
    assert methods[during] == ["begin", *["turn"] * 4, "end"]
    assert methods.count("turn") == 4 and methods.count("load") == 2


def test_ratio_is_the_median_of_rounds_not_of_latencies(fake: type[FakeWorker]) -> None:
    # The machine is ten times slower in every other round: both engines suffer alike.
    ours, peer = [0.001, 0.010, 0.001], [0.002, 0.020, 0.003]
    plan = Plan(rounds=3, runs=4)
    result = race(b"m", [spec("a", latency=ours), spec("b", latency=peer)], threads=1, plan=plan)
    first, second = result.engines
    assert first.ratio == 1 and second.ratio == pytest.approx(2)
    assert second.ratio_p10 == pytest.approx(2) and 2 < second.ratio_p90 <= 3
    assert (first.median_ms, first.min_ms) == (pytest.approx(1), pytest.approx(1))
    assert first.p90_ms == first.p99_ms == pytest.approx(10)
    assert (second.rounds, second.runs) == (3, 12)


def test_engine_over_its_budget_sits_out_after_three_rounds(fake: type[FakeWorker]) -> None:
    plan = Plan(rounds=6, runs=1, budget_seconds=0.5)
    result = race(b"m", [spec("a"), spec("slow", latency=1.0)], threads=1, plan=plan)
    assert [engine.rounds for engine in result.engines] == [6, 3]
    assert result.engines[1].ratio == pytest.approx(1000)


def test_shapes_of_the_first_engine_reach_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeWorker] = []

    def make(one: EngineSpec, threads: int) -> FakeWorker:
        made.append(FakeWorker(one, threads))
        return made[-1]

    monkeypatch.setattr(benchmark, "EngineWorker", make)
    race(b"m", [spec("a"), spec("b")], threads=3, shapes={"N": 2}, plan=Plan(rounds=1))
    assert [one.asked["shapes"] for one in made] == [{"N": 2}, {"x": (2, 3)}]
    assert [one.asked["threads"] for one in made] == [3, 3]
    assert made[0].asked["options"] == {"latency": 0.001}


def test_our_models_are_compiled_in_another_process_than_they_run_in(
    fake: type[FakeWorker],
) -> None:
    engines = [spec(title, "tvm-fusion", fuse=title) for title in ("all", "none")]
    with Arena(engines, threads=1) as arena:
        results = [arena.race(b"m", plan=Plan(rounds=1)) for _ in range(2)]
        assert fake.open == ["all", "none", "tvm-fusion"]
    assert fake.open == []
    one_race = [("compile", "tvm-fusion"), ("load", "all"), ("compile", "tvm-fusion")]
    one_race += [("load", "none")]
    assert [entry for entry in fake.log if entry[0] in ("compile", "load")] == 2 * one_race
    told = [f"compiled with {engine.options}" for engine in engines]
    assert fake.loaded == 2 * told
    assert results[1].engines[1].compile_seconds == 5.5
    assert results[1].engines[1].options == engines[1].options


def test_a_compiled_model_is_not_compiled_again(fake: type[FakeWorker], tmp_path: Path) -> None:
    (tmp_path / "model.so").write_text("compiled before")
    engines = [spec("a", "tvm-fusion", artifact=str(tmp_path / "model.so"))]
    race(b"m", engines, threads=1, plan=Plan(rounds=1))
    assert "compile" not in [method for method, _ in fake.log]
    assert fake.loaded == ["compiled before"]


def test_open_shapes_are_refused(fake: type[FakeWorker]) -> None:
    engines = [spec("a", inputs=[("x", ("N", 3), "float32")])]
    with pytest.raises(InvalidModelError, match=r"input 'x' has the open shape \(N, 3\)"):
        race(b"m", engines, threads=1)
    assert fake.open == []


def test_onnx_runtime_is_the_reference(fake: type[FakeWorker]) -> None:
    engines = [spec("a", second=3.0), spec("b", engine="onnxruntime"), spec("c")]
    result = race(b"m", engines, threads=1, plan=Plan(rounds=1))
    assert result.reference == "b"
    assert [engine.relative_error for engine in result.engines] == [0.5, 0, 0]


def test_last_engine_is_the_reference_without_onnx_runtime(fake: type[FakeWorker]) -> None:
    result = race(b"m", [spec("a"), spec("b", second=4.0)], threads=1, plan=Plan(rounds=1))
    assert result.reference == "b" and result.engines[0].relative_error == 0.5


def test_progress_counts_engines_and_rounds(fake: type[FakeWorker]) -> None:
    seen: list[tuple[str, int, int]] = []
    race(
        b"m",
        [spec("a"), spec("b")],
        threads=1,
        plan=Plan(rounds=2),
        progress=lambda *event: seen.append(event),
    )
    assert seen == [
        ("compiling with a", 0, 2),
        ("compiling with b", 1, 2),
        ("racing", 0, 2),
        ("racing", 1, 2),
        ("racing", 2, 2),
    ]


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "openvino" else find("numpy")
    )
    assert available_peers() == ["onnxruntime", "tvm"]
    with pytest.raises(EngineError, match="OpenVINO is not installed; .* pip install openvino"):
        Arena([EngineSpec("onnxruntime"), EngineSpec("openvino")])
    with pytest.raises(EngineError, match="a race without engines; expected some of tvm-fusion, "):
        Arena([])


def test_openvino_takes_part_in_float32_and_as_it_chooses() -> None:
    peers = cpu_peers(["openvino", "tvm"])
    assert [(spec.engine, spec.title) for spec in peers] == [
        ("openvino", "OpenVINO, float32"),
        ("openvino", "OpenVINO, its default"),
        ("tvm", "stock TVM"),
    ]
    assert [spec.options.get("precision") for spec in peers] == [None, "default", None]


@pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed"
)
def test_openvino_tells_its_precision(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(small_model(), path)
    engine = ENGINES["openvino"].make()
    engine.load(str(path), {}, 1, {})
    assert engine.details() == {"precision": "f32"}
    engine.load(str(path), {}, 1, {"precision": "default"})
    assert engine.details()["precision"] in ("f32", "bf16", "f16")


@pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed"
)
def test_openvino_gets_and_returns_bfloat16(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 17]> g (bfloat16[2, 3] x, float[3] b)
        => (bfloat16[2, 3] y, float[3] z) { y = Neg(x) z = Neg(b) }"""
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    engine = ENGINES["openvino"].make()
    engine.load(str(path), {}, 1, {})
    arrays = random_inputs(engine.inputs, 0)
    assert [arrays[name].dtype.name for name in "xb"] == ["bfloat16", "float32"]
    found = engine.run(engine.feed(arrays))
    np.testing.assert_array_equal(found[0].astype("float32"), -arrays["x"].astype("float32"))
    np.testing.assert_array_equal(found[1], -arrays["b"])


def test_model_file_of_bytes_is_temporary() -> None:
    with model_file(b"abc") as path:
        assert path.read_bytes() == b"abc"
    assert not path.exists()
    model = small_model()
    with model_file(model) as path:
        assert path.read_bytes() == model.SerializeToString()
    with model_file("some/where.onnx") as path:
        assert path == Path("some/where.onnx")


def test_engines_race_and_agree() -> None:
    plan = Plan(rounds=2, runs=2)
    engines = [EngineSpec("tvm-fusion"), EngineSpec("onnxruntime", "ORT")]
    with Arena(engines, threads=1) as arena:
        results = [arena.race(small_model(size=size), f"m{size}", plan=plan) for size in (12, 10)]
    for size, result in zip((12, 10), results, strict=True):
        assert result.model == f"m{size}"
        assert result.inputs == [("image", (1, 3, size, size), "float32")]
        assert [engine.title for engine in result.engines] == ["tvm-fusion", "ORT"]
        assert result.engines[0].relative_error < 1e-5
        assert result.engines[0].details["pairs"] == 2
        assert all(0 < e.min_ms <= e.median_ms <= e.p90_ms for e in result.engines)
        assert all((e.rounds, e.runs) == (2, 4) for e in result.engines)
        assert result.machine["cpu"] and result.machine["packages"]["onnxruntime"]
        assert json.loads(json_text(result.to_json()))["threads"] == 1


def test_peers_on_a_gpu_are_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_cuda, provider in ((True, "CUDA"), (False, "CPU")):
        monkeypatch.setattr(benchmark, "_has_cuda_provider", lambda found=has_cuda: found)
        runtime, stock = gpu_peers(["onnxruntime", "tvm"], "cuda -arch=sm_90")
        assert (runtime.title, runtime.options) == (
            f"ONNX Runtime, {provider}",
            {"provider": provider},
        )
        assert (stock.engine, stock.options) == ("tvm", {"target": "cuda -arch=sm_90"})
    assert "openvino" not in {spec.engine for spec in gpu_peers([], "cuda")}
    with pytest.raises(EngineError, match="OpenVINO takes part on CPUs only"):
        gpu_peers(["openvino"], "cuda")


def test_the_provider_of_this_onnx_runtime_is_asked() -> None:
    import onnxruntime

    expected = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    assert benchmark._has_cuda_provider() is expected
