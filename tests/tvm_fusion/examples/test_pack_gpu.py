# SPDX-License-Identifier: Apache-2.0
"""Measuring on a GPU machine without TVM: what is packed, and a whole run on a fake driver."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from gpu_fakes import FakeClock, fake_driver

import tvm_fusion
from examples.benchmarks import pack_gpu
from examples.benchmarks.gpu.machine import folder_name
from examples.benchmarks.gpu.offline import device_run, kernel_cases, stages
from examples.benchmarks.gpu.offline.kernel_cases import KernelCase, small_cases, timed_cases
from examples.benchmarks.gpu.offline.loaded import Loaded
from examples.benchmarks.gpu.offline.model_cases import PackedModel
from examples.benchmarks.gpu.offline.stages import Log, read_log
from examples.benchmarks.gpu.offline.table import table
from examples.benchmarks.gpu.with_tvm.onnx_case import onnx_model
from examples.benchmarks.reduction_cases import Case, Reduction

ROOT = Path(__file__).resolve().parents[3]
GPU = ROOT / "examples" / "benchmarks" / "gpu"
PYTHON = "{}.{}".format(*sys.version_info[:2])
PACKED = (
    "small/rows",
    "small/product float16",
    "small/product float16 of edges warpgroups",
    "small/attention",
    "small/attention of edges warpgroups",
    "small/convolution of edges warpgroups",
    "small/convolution strided warpgroups",
    "small/pair int8",
)
SMALL = {case.name: case for case in small_cases()}
_WITHOUT = """
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split():
            raise ImportError(f"{name} is absent")
sys.meta_path.insert(0, Absent())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def without(packages: str, *modules: str) -> None:
    """Import modules where packages are absent."""
    command = [sys.executable, "-c", _WITHOUT, packages, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_measures_needs_no_compiler() -> None:
    engines = [f"examples.benchmarks.gpu.{path.stem}" for path in sorted(GPU.glob("*.py"))]
    assert "examples.benchmarks.gpu.compare" in engines
    without("tvm", *engines)
    offline = [path.stem for path in sorted((GPU / "offline").glob("*.py"))]
    offline = [name for name in offline if name not in ("triton_rows", "torch_models")]
    absent = "tvm onnx onnxruntime torch triton rich click matplotlib scipy filelock"
    without(absent, *(f"examples.benchmarks.gpu.offline.{name}" for name in offline))


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("", "gpu"),
    ],
)
def test_results_of_a_device_have_its_folder(device: str, expected: str) -> None:
    assert folder_name(device) == expected


def test_cases_are_those_of_the_goals() -> None:
    names = [case.name for case in (*small_cases(), *timed_cases())]
    files = {case.file for case in (*small_cases(), *timed_cases())}
    assert len(names) == len(set(names)) == len(files)
    assert sum(name.startswith("reduction/paper2 ") for name in names) == 12
    assert sum(name.startswith("reduction/paper4 ") for name in names) == 4
    assert {case.group for case in timed_cases()} == set(stages.GROUPS) <= {*device_run.STAGES}
    assert {*device_run.NCU_CASES} <= {*names}
    specific = {case.group for case in timed_cases() if case.is_specific}
    assert specific == {"attention", "convolution", "product"}
    kinds = {word for name in SMALL for word in name.partition("/")[2].split()}
    assert {"softmax", "norm", "attention", "pair", "depthwise"} <= kinds
    assert {"tf32", "float16", "int8", "warpgroups"} <= kinds


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_graph_and_expression_agree(case: KernelCase) -> None:
    """Both compute the same, and the judgement notices an error of a few tolerances."""
    torch = pytest.importorskip("torch")
    inputs = stages.random_arrays(case)
    model = onnx_model(case)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found = session.run(None, dict(zip(case.inputs, inputs, strict=True)))
    tensors = [torch.from_numpy(array) for array in inputs]
    error, bound = stages.judge_kernel(case, tensors, found)
    assert error <= 1 and bound > 0 or case.reduction is not None and error == bound == 0
    worse = found[0] * 1.05 + np.copysign(0.05, found[0])
    found[0] = np.asarray(worse, found[0].dtype)
    assert stages.judge_kernel(case, tensors, found)[0] > 1
    assert case.bytes >= sum(array.nbytes for array in inputs)


@pytest.mark.slow
def test_weights_of_models_become_repetitive_and_keep_their_spread() -> None:
    from examples.models import resnet_18

    before, after = (
        {item.name: onnx.numpy_helper.to_array(item) for item in model.graph.initializer}
        for model in (resnet_18(1, 32), pack_gpu.repeated(resnet_18(1, 32)))
    )
    large = [name for name, array in before.items() if array.size > 10_000]
    assert len(large) > 10
    for name in large:
        assert after[name].std() == pytest.approx(before[name].std(), rel=0.1)
        flat, period = after[name].ravel(), kernel_cases.BLOCK.size
        np.testing.assert_array_equal(flat[period:], flat[:-period])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few kernels, packed for this Python."""
    folder = tmp_path_factory.mktemp("packed")
    assert pack(folder, *PACKED) == 0
    return folder


def pack(folder: Path, *names: str) -> int:
    given = [str(folder), "--only", *names, "--python", PYTHON]
    return pack_gpu.main([*given, "--built", str(folder / "built")])


@pytest.mark.slow
def test_a_pack_holds_no_compiler(packed: Path) -> None:
    with tarfile.open(packed / "runtime.tar.xz") as archive:
        names = archive.getnames()
    assert not [name for name in names if "compiler.so" in name]
    assert {"tvm/lib/libtvm_runtime.so", "examples/benchmarks/gpu/offline/stages.py"} <= {*names}
    with tarfile.open(packed / "cases.tar.xz") as archive:
        files = {SMALL[name].file for name in PACKED}
        assert {*archive.getnames()} == {"cases.json", *files}
    assert sum(path.stat().st_size for path in packed.glob("*.xz")) < 10_000_000
    index = json.loads((packed / "built" / "sm_90" / "cases.json").read_text())
    assert all(index["small/attention"]["predicted"][name] > 0 for name in ("h100", "h200"))


@pytest.mark.slow
def test_a_second_call_compiles_what_is_missing(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    shutil.copytree(packed, tmp_path / "again")
    monkeypatch.setattr(pack_gpu, "pack_runtime", lambda *_: None)
    compiled: list[str] = []

    def compile_nothing(case: Any, folder: Path, target: str) -> dict[str, Any]:
        compiled.append(case.name)
        return {"problem": "no time"}

    monkeypatch.setattr(pack_gpu, "_compile", compile_nothing)
    assert pack(tmp_path / "again", *PACKED) == 0 and compiled == []
    assert pack(tmp_path / "again", *PACKED, "small/softmax") == 1
    assert compiled == ["small/softmax"]
    assert "small/softmax: no time" in capsys.readouterr().err
    monkeypatch.setattr(pack_gpu, "digest_of_sources", lambda: "other")
    assert pack(tmp_path / "again", PACKED[0]) == 1 and compiled[1:] == [PACKED[0]]


@pytest.mark.slow
def test_no_case_and_too_large_a_folder(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert pack(packed, "nothing") == 1
    assert "no case matches nothing" in capsys.readouterr().err
    monkeypatch.setattr(pack_gpu, "MOST_BYTES", 1_000_000)
    monkeypatch.setattr(pack_gpu, "pack_runtime", lambda *_: None)
    assert pack(packed, *PACKED) == 1
    assert "that is more than 1 MB" in capsys.readouterr().err


def measure(packed: Path, folder: Path, *arguments: str, **environment: str) -> Any:
    """Run the script of a pack."""
    return subprocess.run(
        ["bash", str(packed / "device_run.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(folder), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_run_on_a_driver_that_computes_nothing(packed: Path, tmp_path: Path) -> None:
    """Every kernel is found in its machine code and launched; its numbers are told to be wrong."""
    pytest.importorskip("torch")
    report = tmp_path / "launches"
    done = measure(packed, tmp_path, "300", **fake_driver(tmp_path, report))
    results = tmp_path / "h100" / "run-1"
    lines = read_log(results / "run.jsonl")
    wrong = {
        line["case"]: line["problem"]
        for line in lines
        if line["stage"] == "check" and "problem" in line
    }
    assert {*wrong} == {*PACKED}, done.stdout + done.stderr
    assert all(text.startswith("wrong: ") for text in wrong.values())
    # Channels are packed before the kernel of a convolution, and unpacked behind it.
    repacked = sum("convolution" in name or "int8" in name for name in PACKED)
    assert len(report.read_text().splitlines()) == 2 * (len(PACKED) + 2 * repacked)
    assert done.returncode == 1 and "product: left out: no GPU" in done.stdout
    assert "compute-sanitizer: " in done.stdout and "ncu: " in done.stdout
    assert done.stdout.endswith((results / "table.txt").read_text())
    assert device_run.new_folder(tmp_path / "h100").name == "run-2"


@pytest.mark.slow
def test_what_a_run_needs(packed: Path, tmp_path: Path, capsys: Any) -> None:
    assert device_run.main([str(packed), str(tmp_path), "60", "coffee"]) == 2
    assert "unknown stage 'coffee'; expected one of device, check" in capsys.readouterr().out
    other = tmp_path / "other"
    shutil.copytree(packed, other)
    (other / "python-version").write_text("3.7\n")
    found = measure(other, tmp_path, "60")
    assert found.returncode == 1
    assert f"packed for Python 3.7, and this is {PYTHON}: set PYTHON" in found.stderr


class HostClock(FakeClock):
    """The clock of the host, on which everything runs."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


@pytest.fixture
def on_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cases of each group that has peers, compiled for this CPU."""
    pytest.importorskip("torch")
    sums = Case("sums", (7, 33), "float32", (Reduction("sum", (1,), ("mul 1",)),), 2)
    cases = [
        kernel_cases.product("product/tiny", 8, 16, 24, "float32"),
        kernel_cases.reduction(sums),
        kernel_cases.layer_norm("norm/tiny", 5, 32),
        kernel_cases.pair("convolution/tiny", 1, (4, 8, 8), 6, dtype="float32"),
    ]
    for case in cases:
        model = tvm_fusion.compile(onnx_model(case), threads=1, cache=False)
        model.save(tmp_path / case.file)
    monkeypatch.setattr(stages, "timed_cases", lambda: cases)
    monkeypatch.setattr(stages, "PLAN", stages.PLAN.quick())
    return tmp_path


@pytest.mark.slow
def test_races(on_host: Path) -> None:
    """Our outputs are right, and every peer that can be there is timed in the same race."""
    path = on_host / "run.jsonl"
    expected = {
        "reduction": {"PyTorch"},
        "product": {"cuBLAS"},
        "norm": {"PyTorch"},
        "convolution": {"cuDNN NCHW", "cuDNN NHWC"},
    }
    for group, peers in expected.items():
        log = Log(path, group)
        stages.race_kernels(on_host, log, group, time.monotonic() + 600, HostClock())
        lines = [line for line in read_log(path) if line["stage"] == group and "engine" in line]
        ours = [line for line in lines if line["engine"] == Loaded.title]
        assert all("problem" not in line and line["error"] <= 1 for line in ours), ours
        assert len(ours) == 2 and all(line["repeatable"] and line["us"] > 0 for line in ours)
        timed = {line["engine"] for line in lines if line.get("ratio", 0) > 0}
        assert peers <= timed


@pytest.mark.slow
def test_a_stage_goes_on_behind_what_was_begun(on_host: Path) -> None:
    path = on_host / "run.jsonl"
    [name] = [case.name for case in stages.timed_cases() if case.group == "product"]
    Log(path, "product").put(name, begun=True)
    stages.race_kernels(on_host, Log(path, "product"), "product", math.inf, HostClock())
    assert [line["case"] for line in read_log(path)] == [name]
    stages.race_kernels(on_host, Log(path, "norm"), "norm", 0.0, HostClock())
    assert read_log(path)[-1]["problem"] == "no time was left"


@pytest.mark.slow
def test_models_are_compared_with_stored_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    case = PackedModel("model/tiny", "wide_and_deep", {"batch": 2})
    model = pack_gpu.ZOO[case.builder](2, rows=50, embedding=4, layers=(16, 8))
    tvm_fusion.compile(model, threads=1, cache=False).save(tmp_path / case.file)
    pack_gpu.save_outputs(model, tmp_path / f"{case.file}.npz")
    monkeypatch.setattr(stages, "MODELS", (case,))
    path = tmp_path / "run.jsonl"
    stages.race_models(tmp_path, Log(path, "model"), math.inf, HostClock())
    ours, *peers = [line for line in read_log(path) if "engine" in line]
    assert ours["us"] > 0 and ours["error"] <= 1 and "problem" not in ours
    assert {line["problem"] for line in peers} == {
        "EngineError: no model of PyTorch for wide_and_deep"
    }


@pytest.mark.slow
def test_models_of_pytorch_have_the_sizes_of_ours() -> None:
    pytest.importorskip("torch")
    from examples.benchmarks.gpu.offline import torch_models

    counts = {
        name: sum(each.numel() for each in torch_models.make(name).parameters())
        for name in ("resnet_50", "bert_base")
    }
    assert counts["resnet_50"] == 25_557_032
    assert counts["bert_base"] == pytest.approx(109.5e6, rel=0.01)


_DYING = """
import json, sys
path, turn = sys.argv[1], sum('begun' in line for line in open(sys.argv[1]))
with open(path, 'a') as file:
    file.write(json.dumps({'stage': 'norm', 'case': f'case {turn}', 'begun': True}) + '\\n')
sys.exit(0 if turn == 2 else 7)
"""


def test_a_stage_that_dies_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = device_run.Run(tmp_path, tmp_path, 100)
    run.path.touch()
    command = [sys.executable, "-c", _DYING, str(run.path)]
    monkeypatch.setattr(run, "command", lambda *_: command)
    assert run.stage("norm", 100) == 0
    lines = read_log(run.path)
    dead = [(line["case"], line["problem"]) for line in lines if "problem" in line]
    assert dead == [(f"case {n}", "the process ended with 7") for n in range(2)]
    assert run.call(["sleep", "100"], 0.1, tmp_path / "log.txt") is None


def test_table() -> None:
    lines = [
        {"stage": "device", "case": "device", "begun": True},
        {"stage": "device", "case": "device", "gpu": {"name": "NVIDIA H200"}},
        {"stage": "device", "case": "device", "copy": 4e12, "read": 4.2e12, "peak_float16": 7e14},
        {"stage": "norm", "case": "norm/a", "engine": "tvm-fusion", "us": 10.0, "error": 0.25}
        | {"bytes": 2.1e7, "flops": 0.0},
        {"stage": "norm", "case": "norm/a", "engine": "PyTorch", "us": 12.0, "ratio": 1.2},
        {"stage": "norm", "case": "norm/a", "engine": "QuACK", "us": 9.0, "ratio": 0.9},
        {"stage": "norm", "case": "norm/a", "engine": "Triton", "problem": "absent"},
        {"stage": "norm", "case": "norm/b", "engine": "tvm-fusion", "problem": "wrong: 3"},
        {"stage": "model", "case": "model", "engine": "PyTorch", "problem": "absent"},
    ]
    index = {"norm/a": {"predicted": {"h200": 8e-6}}, "norm/c": {"problem": "no rule"}}
    facts, _, first, second, *rest = table(lines, index).splitlines()
    assert facts == "NVIDIA H200, copy 4000 GB/s, read 4200 GB/s, cuBLAS float16 700 TFLOP/s"
    assert first.split() == "norm/a 0.25 10.0 50% 8.0 QuACK 9.0 0.90x PyTorch 12.0".split()
    assert second.split() == ["norm/b", "WRONG"]
    assert rest == [
        "norm/c was not packed: no rule",
        "Triton: absent (norm/a)",
        "tvm-fusion: wrong: 3 (norm/b)",
        "PyTorch: absent (model)",
    ]
