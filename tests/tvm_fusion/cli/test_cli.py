# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, what it writes, how it ends."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from small_onnx import small_model
from without_torch import importing_from, python

import tvm_fusion
from tvm_fusion.cli import command_line as cli
from tvm_fusion.cli import options as cli_options
from tvm_fusion.cli import output as cli_output
from tvm_fusion.cli import progress as cli_progress
from tvm_fusion.cli.progress import progress_bar
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import EngineError, TargetError, TVMFusionError
from tvm_fusion.runtime.tvm_runtime import DeviceInfo

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    onnx.save(small_model(), path)
    return path


@pytest.fixture(scope="module")
def library(model_path: Path) -> Path:
    path = model_path.with_suffix(".so")
    assert cli.main(["compile", str(model_path), "-o", str(path), "--threads", "1"]) == 0
    return path


Run = Any
ERASE = "\r\x1b[2K"
"""Text that takes the line of the progress away."""
ERROR_FIELDS = {"type", "message", "exit_code"}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; return its exit code, standard output and standard error."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def test_help_names_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in ("compile", "run", "inspect", "bench", "explain", "tune"):
        assert f"\n  {command} " in out
        code, text, _ = run(command, "-h")
        assert code == 0 and "--json" in text and text.startswith(f"Usage: tvm-fusion {command}")


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"tvm-fusion, version {tvm_fusion.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["melt"], "No such command 'melt'"),
        (["compile"], "Missing argument 'MODEL'"),
        (["compile", "no/such.onnx"], "File 'no/such.onnx' does not exist"),
        (["compile", "{model}", "--fuse", "some"], "'some' is not one of"),
        (["compile", "{model}", "--winograd", "some"], "'some' is not one of"),
        (["compile", "{model}", "--threads", "0"], "0 is not in the range"),
        (
            ["compile", "{model}", "--outputs", "x", "--ranks", "2"],
            "--outputs has no effect: it is",
        ),
        (["compile", "{model}", "--shape", "image"], "'image' is not like input=1,3,224,224"),
        (["compile", "{model}", "--shape", "image=1,x"], "is not like"),
        (["compile", "{model}", "--shape", "image=1,0"], "is not like"),
        (["compile", "{model}", "--shape", "a=1", "--shape", "a=2"], "names a more than once"),
        (["bench", "{model}", "--against", "tvm,caffe"], "caffe: expected some of onnxruntime"),
        (["bench", "{model}", "--against", ","], "expected some of"),
        (["bench", "{model}", "--profile", "--rounds", "3"], "--rounds has no effect"),
        (["run", "{model}", "--input", "image=no.npy"], "with an existing file"),
        (["run", "{library}", "--fuse", "all"], "--fuse has no effect: small.so is compiled"),
        (["run", "{library}", "--winograd", "never"], "--winograd has no effect: small.so"),
        (["bench", "{model}", "--compiled", "{library}", "--target", "native"], "has no effect"),
        (["bench", "{model}", "--profile", "--target", "opencl"], "--profile is for CPUs"),
        (["explain", "{model}", "--resources"], "--resources has no effect: it is for --target"),
        (["explain", "{model}", "--target", "opencl", "--winograd", "never"], "has no effect"),
    ],
)
def test_wrong_usage_exits_2(
    run: Run, model_path: Path, library: Path, arguments: list[str], message: str
) -> None:
    filled = [argument.format(model=model_path, library=library) for argument in arguments]
    code, out, err = run(*filled)
    assert code == 2 and out == ""
    assert message in err and "Traceback" not in err


@pytest.mark.parametrize(("rank", "told"), [("0", 1), ("3", 0), ("?", 1)])
def test_ranks_of_a_job_tell_wrong_usage_once(
    run: Run, rank: str, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMI_RANK", rank)
    code, out, err = run("run", "no.so", "--distributed")
    assert (code, out, err.count("'no.so' does not exist")) == (2, "", told)


def test_compile_writes_a_library_that_runs(run: Run, model_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "compiled.so"
    code, out, _ = run("compile", model_path, "-o", output, "--threads", 1, "--fuse", "all")
    assert code == 0
    assert out.startswith(f"{output}: ") and "1 of 2 pairs fused" in out
    feed = np.random.default_rng(0).standard_normal((1, 3, 12, 12), dtype=np.float32)
    got = np.asarray(tvm_fusion.load(output)(feed))
    (want,) = onnxruntime.InferenceSession(model_path).run(None, {"image": feed})
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.slow
def test_compile_writes_beside_the_user_by_default(
    run: Run, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ("--fuse", "none", "--threads", 1, "--outputs", "scores")
    code, out, _ = run("compile", model_path, "--json", *given)
    result = json.loads(out)
    assert code == 0 and result["output"] == "small.so" and Path("small.so").is_file()
    assert (result["fused"], result["pairs"]) == (0, 2)
    assert result["inputs"] == [{"name": "image", "shape": [1, 3, 12, 12], "dtype": "float32"}]


def test_run_shows_outputs_and_saves_them(
    run: Run, library: Path, model_path: Path, tmp_path: Path
) -> None:
    feed = np.random.default_rng(1).standard_normal((1, 3, 12, 12), dtype=np.float32)
    np.save(tmp_path / "feed.npy", feed)
    given = f"image={tmp_path / 'feed.npy'}"
    options = (
        "--input",
        given,
        "--output",
        tmp_path / "out.npz",
        "--iterations",
        2,
        "--threads",
        1,
    )
    code, out, _ = run("run", library, *options)
    assert code == 0
    (want,) = onnxruntime.InferenceSession(model_path).run(None, {"image": feed})
    with np.load(tmp_path / "out.npz", allow_pickle=False) as saved:
        assert np.abs(saved["scores"] - want).max() <= 1e-5 * np.abs(want).max()
    lines = out.splitlines()
    assert lines[0] == "scores: float32 1x6x12x12"
    best = np.argsort(-want.ravel())[:5]
    assert [int(line.split()[0]) for line in lines[1:6]] == best.tolist()
    assert lines[6].startswith("latency: median ") and lines[6].endswith("2 runs, 1 threads")


@pytest.mark.slow
def test_run_takes_an_onnx_file_and_draws_the_same_inputs(run: Run, model_path: Path) -> None:
    command = ("run", model_path, "--json", "--repeat", 1, "--threads", 1, "--seed")
    first, again, other = (json.loads(run(*command, seed)[1]) for seed in (3, 3, 4))
    assert first["outputs"] == again["outputs"] != other["outputs"]
    assert first["inputs"][0]["from"] == "random, seed 3"
    assert 0 < first["latency"]["min_ms"] <= first["latency"]["median_ms"]


@pytest.mark.slow
def test_run_counts_the_calls_of_several_streams(run: Run, library: Path) -> None:
    code, out, _ = run("run", library, "--streams", 2, "--threads", 1, "--json")
    found = json.loads(out)["throughput"]
    assert code == 0
    assert (found["streams"], found["threads"]) == (2, 1)
    assert found["calls"] >= 2 and found["calls_per_second"] > 0


@pytest.mark.slow
def test_a_model_from_standard_input(model_path: Path, library: Path, tmp_path: Path) -> None:
    command = command_line("compile", "-", "--threads", 1)
    environment = importing_from(ROOT)
    with model_path.open("rb") as file:
        subprocess.run(command, stdin=file, cwd=tmp_path, env=environment, check=True)
    x = np.random.default_rng(6).standard_normal((1, 3, 12, 12), dtype=np.float32)
    piped = tvm_fusion.load(tmp_path / "model.so", threads=1)
    np.testing.assert_array_equal(piped(x), tvm_fusion.load(library, threads=1)(x))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("library", ["run", "-", "--iterations", "1"]),
        ("library", ["inspect", "-"]),
        ("library", ["bench", "{model}", "--compiled", "-", "--rounds", "1", "--runs", "1"]),
        ("model", ["explain", "-"]),
        ("model", ["predict", "-"]),
        ("model", ["simulate", "-", "--ranks", "1,2"]),
    ],
)
def test_every_model_may_come_from_standard_input(
    run: Run,
    model_path: Path,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    arguments: list[str],
) -> None:
    data = {"library": library, "model": model_path}[source].read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    filled = [argument.format(model=model_path) for argument in arguments]
    code, out, err = run(*filled, "--json")
    assert code == 0, out + err
    shown = json.loads(out)
    if isinstance(shown, dict) and "model" in shown:
        assert not Path(shown["model"]).exists(), "the copy of standard input is left"


def test_errors_name_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"no model")))
    code, _, err = run("inspect", "-")
    assert code == 1 and re.search(r"standard-input-\w+/model' is not a compiled model", err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["compile", "{model}", "-o", "{output}"],
        ["run", "{model}", "--output", "{output}"],
        ["simulate", "{model}", "--draw", "{output}"],
        ["calibrate", "-o", "{output}"],
        ["predict", "{model}", "--timeline", "{output}"],
        ["predict", "{model}", "--save-overheads", "{output}"],
        ["records", "merge", "{output}", "{model}"],
        ["records", "export", "{model}", "{output}"],
    ],
)
def test_a_folder_that_is_not_there_is_refused_before_anything_is_done(
    run: Run, model_path: Path, tmp_path: Path, arguments: list[str]
) -> None:
    output = tmp_path / "none" / "file.svg"
    filled = [argument.format(model=model_path, output=output) for argument in arguments]
    code, out, err = run(*filled)
    assert (code, out) == (1, "") and not output.parent.exists()
    assert err == f"Error: cannot write {str(output)!r}: no such folder, or not a writable one\n"
    if arguments[:2] != ["records", "export"]:
        (tmp_path / "none" / "file.svg").mkdir(parents=True)
        code, out, err = run(*filled)
        assert (code, out) == (2, "") and "is a directory" in err


@pytest.mark.slow
def test_inspect_shows_a_model_for_another_machine(
    run: Run, model_path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.so"
    assert run("compile", model_path, "-o", other, "--target", "cortex-a76")[0] == 0
    code, out, _ = run("inspect", other)
    assert code == 0
    assert "image: float32[1, 3, 12, 12]" in out and "cortex-a76, aarch64" in out
    found = json.loads(run("inspect", other, "--json")[1])
    assert found["arch"] == "aarch64"
    assert found["bytes"] == other.stat().st_size
    assert run("inspect", model_path)[0] == 1


def test_open_dimension_gets_its_size(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "open.onnx"
    onnx.save(small_model("batch"), path)
    code, out, err = run("run", path, "--threads", 1)
    assert code == 1 and out == "" and "batch" in err
    code, out, _ = run("run", path, "--json", "--repeat", 1, "--threads", 1, "--shape", "batch=2")
    assert code == 0 and json.loads(out)["outputs"][0]["shape"] == [2, 6, 12, 12]
    shape = ("--shape", "image=3,3,12,12")
    code, out, _ = run("explain", path, "--json", *shape)
    assert code == 0 and json.loads(out)["pairs"][0]["input_shape"][0] == 3


def test_explain_prints_every_pair(
    run: Run, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_output, "PIPE_WIDTH", 200)
    code, out, _ = run("explain", model_path, "--json", "--fuse", "all")
    report = json.loads(out)
    pairs = report["pairs"]
    assert code == 0 and len(pairs) == 2
    assert [pair["fused"] for pair in pairs] == [False, True]
    code, out, _ = run("explain", model_path, "--fuse", "all")
    assert code == 0 and "1 of 2 pairs fused" in out
    for pair in pairs:
        assert any(pair["layer1"] in line and pair["layer2"] in line for line in out.splitlines())
    assert {use["rule"] for use in report["functions"]} >= {"FusedConv2D", "Conv2D"}
    assert not any(use["slow"] or use["failed"] for use in report["functions"])
    assert "likely to be slow" not in out


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", ["opencl", "cuda -arch=sm_90"])
def test_models_are_compiled_for_gpus_anywhere(
    run: Run, model_path: Path, tmp_path: Path, target: str
) -> None:
    output = tmp_path / "gpu.so"
    code, out, _ = run("compile", model_path, "-o", output, "--target", target)
    assert code == 0 and f"for {target.replace('-arch=', '')}, " in out
    assert output.stat().st_size > 0


@pytest.mark.slow
def test_explain_lists_the_kernels_of_a_gpu(run: Run, model_path: Path) -> None:
    command = ("explain", model_path, "--target", "opencl")
    code, out, _ = run(*command, "--json")
    report = json.loads(out)
    assert code == 0 and report["launches"] >= len(report["functions"]) >= 2
    code, out, _ = run(*command)
    assert code == 0 and f"{report['launches']} kernels a call" in out
    assert all(use["name"] in out for use in report["functions"])


@pytest.mark.slow
def test_explain_tells_several_targets_one_by_one(run: Run, model_path: Path) -> None:
    command = ("explain", model_path, "--target", "x86-64-v3,opencl")
    code, out, _ = run(*command, "--json")
    cpu, gpu = json.loads(out)
    assert code == 0 and "x86-64-v3" in cpu["target"] and gpu["launches"] >= 2
    code, out, _ = run(*command)
    assert code == 0 and out.index("x86-64-v3") < out.index("pairs fused") < out.index("opencl\n")
    code, _, err = run("simulate", model_path, "--target", "x86-64-v3,x86-64-v4")
    assert code == 1 and "expected one target" in err


NO_GPU = "no NVIDIA driver"


@pytest.mark.parametrize("command", ["run", "bench", "compile", "explain"])
def test_without_a_gpu_plain_cuda_is_refused_at_once(
    run: Run, model_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def find(kind: str) -> None:
        raise TargetError(f"{NO_GPU} for {kind}")

    monkeypatch.setattr("tvm_fusion.compiler.targets.find_device", find)
    code, out, err = run(command, model_path, "--target", "cuda")
    assert (code, out) == (1, "")
    assert f"{NO_GPU} for cuda; to compile for another machine" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "bench"])
def test_a_gpu_of_another_generation_is_refused_before_compiling(
    run: Run, model_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    a40 = DeviceInfo("cuda", "A40", "sm_86", 1024, 49152, 84)
    monkeypatch.setattr("tvm_fusion.runtime.tvm_runtime.find_device", lambda kind: a40)
    fail_with(monkeypatch, AssertionError("compiled"))
    code, _, err = run(command, model_path, "--target", "cuda -arch=sm_90")
    assert code == 1 and "compiled for sm_90, and this machine's GPU (A40) is sm_86" in err


@pytest.mark.slow
def test_bench_profiles_the_kernels(run: Run, model_path: Path) -> None:
    command = ("bench", model_path, "--profile", "--runs", 2, "--threads", 1)
    code, out, _ = run(*command, "--json")
    result = json.loads(out)
    assert code == 0
    assert any("conv 3x3" in kernel["operator"] for kernel in result["kernels"])
    assert result["limits"]["threads"] == 1
    code, out, _ = run(*command)
    assert code == 0 and "conv 3x3" in out and "of limit" in " ".join(out.split())


@pytest.mark.slow
def test_bench_of_a_model_for_a_gpu_races_on_that_gpu(
    run: Run, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "gpu.so"
    assert run("compile", model_path, "--target", "cuda -arch=sm_80", "-o", output)[0] == 0
    monkeypatch.setattr("tvm_fusion.runtime.artifact.check_device", lambda needs: None)
    raced: list[Any] = []

    def race(model: Any, engines: Any, **_: Any) -> None:
        raced.extend(engines)
        raise EngineError("enough")

    monkeypatch.setattr("tvm_fusion.bench.race.race", race)
    command = ("bench", model_path, "--compiled", output, "--against", "tvm,onnxruntime")
    assert "enough" in run(*command)[2]
    ours, stock, runtime = raced
    assert ours.options == {"artifact": str(output.resolve())}
    target = resolve(stock.options["target"])
    assert (target.kind.name, target.attrs["arch"]) == ("cuda", "sm_80")
    assert "provider" in runtime.options


@pytest.mark.slow
def test_bench_races_a_compiled_model(run: Run, model_path: Path, library: Path) -> None:
    command = ("bench", model_path, "--compiled", library, "--against", "onnxruntime")
    command += ("--rounds", 2, "--runs", 2, "--threads", 1)
    code, out, _ = run(*command, "--json")
    result = json.loads(out)
    assert code == 0
    assert [engine["engine"] for engine in result["engines"]] == ["tvm-fusion", "onnxruntime"]
    assert result["engines"][0]["relative_error"] < 1e-5
    assert result["engines"][0]["details"]["pairs"] == 2
    code, out, _ = run(*command)
    assert code == 0 and "ONNX Runtime" in out and "reference" in out


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (b"junk", ["compile", "{bad}"], "not ONNX"),
        (b"", ["explain", "{bad}"], "not an ONNX model|not ONNX"),
        (b"junk", ["bench", "{bad}", "--against", "onnxruntime"], "not ONNX"),
        (b"\x7fELFjunk", ["run", "{bad}"], "Error: "),
        (None, ["compile", "{model}", "-o", "no/such/folder.so"], "cannot write 'no/such/folder"),
        (None, ["compile", "{model}", "-o", "{model}"], "is the model itself; give --output"),
        (None, ["run", "{model}", "--output", "{model}"], "is the model itself; give --output"),
        (None, ["run", "{library}", "--output", "{library}"], "is the model itself; give"),
        (None, ["compile", "{model}", "--target", "nonsense"], "nonsense"),
        (None, ["explain", "{model}", "--shape", "other=1,2"], "other"),
        (None, ["explain", "{model}", "--target", "cuda -arch=sm_52"], "sm_52 is too old"),
        (None, ["explain", "{model}", "--target", "opencl", "--resources"], "known for 'cuda'"),
        (
            None,
            ["compile", "{model}", "--target", "native,cuda -arch=sm_90"],
            "several targets in one file are CPUs, and 'cuda' is a GPU: compile for it alone",
        ),
        (None, ["compile", "{model}", "--target", "cuda -arch=sm_91"], "did you mean sm_90"),
        (
            None,
            ["compile", "{model}", "--target", "opencl", "--winograd", "always"],
            "no effect on",
        ),
        (None, ["compile", "{model}", "--fast-math"], "fast_math=True has no effect on"),
        (None, ["compile", "{model}", "--cuda-graph"], "cuda_graph=True is for CUDA, not for"),
        (None, ["run", "{model}", "--target", "opencl"], "has no OpenCL runtime"),
        (None, ["bench", "{model}", "--target", "opencl"], "has no OpenCL runtime"),
        (None, ["run", "{library}", "--input", "other={npy}"], "no input is called 'other'"),
        (None, ["run", "{library}", "--input", "image={npy}"], "image"),
        (None, ["run", "{library}", "--input", "image={model}"], "as a .npy file"),
        (None, ["run", "{library}", "--input", "image={pickle}"], "as a .npy file"),
        (None, ["run", "{library}", "--input", "image={cut}"], "as a .npy file"),
        (b"PK\x03\x04", ["run", "{library}", "--input", "image={bad}"], "as a .npy file"),
        (None, ["run", "{library}", "--input", "image={npz}"], "holds several arrays"),
        (None, ["run", "{library}", "--output", "no/folder.npz"], "cannot write 'no/folder.npz'"),
        (None, ["run", "{library}", "--output", "{npy}/y.npz"], "no such folder, or not a"),
    ],
)
def test_our_errors_exit_1_with_one_line(
    run: Run,
    model_path: Path,
    library: Path,
    tmp_path: Path,
    make: bytes | None,
    arguments: list[str],
    message: str,
) -> None:
    names = {"model": model_path, "library": library}
    names |= {name: tmp_path / f"x.{name}" for name in ("npy", "npz", "bad", "pickle", "cut")}
    np.save(names["npy"], np.zeros((2, 2), np.float32))
    names["cut"].write_bytes(names["npy"].read_bytes().replace(b"(2, 2)", b"(2, (("))
    np.savez(names["npz"], a=np.zeros(2), b=np.zeros(2))
    with names["pickle"].open("wb") as file:
        np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    names["bad"].write_bytes(make or b"")
    code, out, err = run(*(argument.format(**names) for argument in arguments))
    assert code == 1 and out == ""
    assert err.startswith("Error: ") and err.count("\n") == 1
    assert any(part in err for part in message.split("|"))
    assert "unexpected" not in err


@pytest.mark.parametrize("command", ["compile", "run"])
def test_weights_of_the_model_are_not_overwritten(
    run: Run, model_path: Path, tmp_path: Path, command: str
) -> None:
    path, weights = tmp_path / "model.onnx", tmp_path / "model.bin"
    model = onnx.load(model_path)
    onnx.save(model, path, save_as_external_data=True, location=weights.name, size_threshold=0)
    before = weights.read_bytes()
    code, _, err = run(command, path, "--output", weights)
    assert code == 1 and "is a file of the model's weights; give --output another name" in err
    assert weights.read_bytes() == before


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(tvm_fusion, "compile", fail)


def test_unexpected_error_is_one_line_too(
    run: Run, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cli.DEBUG, raising=False)
    fail_with(monkeypatch, RuntimeError("first\nsecond"))
    code, out, err = run("compile", model_path)
    assert (code, out) == (1, "")
    assert err == "Error: unexpected RuntimeError: first (set TVM_FUSION_DEBUG=1 to see where)\n"
    monkeypatch.setenv(cli.DEBUG, "1")
    with pytest.raises(RuntimeError, match="second"):
        run("compile", model_path)


def test_long_message_of_ours_stays_on_one_line(
    run: Run, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cli.DEBUG, raising=False)
    fail_with(monkeypatch, TVMFusionError("one\n  two"))
    assert run("compile", model_path) == (1, "", "Error: one two\n")


def test_ctrl_c_exits_130(run: Run, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    code, out, err = run("compile", model_path)
    assert (code, out) == (130, "") and err.endswith("Interrupted.\n")


def command_line(*arguments: Any) -> list[str]:
    return python("tvm_fusion.cli", *map(str, arguments))


@pytest.mark.slow
def test_real_ctrl_c_ends_the_workers_of_a_race(model_path: Path, library: Path) -> None:
    command = command_line("bench", model_path, "--compiled", library, "--rounds", 100000)
    command += ["--against", "onnxruntime", "--threads", "1"]
    options: dict[str, Any] = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    # Tests that run in the background of a shell ignore the signal, and their children would too.
    options["preexec_fn"] = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **options) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for _ in range(600):
            if not children.exists() or len(children.read_text().split()) == 2:
                break
            time.sleep(0.05)
        workers = children.read_text().split() if children.exists() else []
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err and err.endswith("Interrupted.\n")
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in workers)


@pytest.mark.quick_cases("arguments1")
@pytest.mark.parametrize("arguments", [["explain", "{model}"], ["--version"]])
def test_reader_that_leaves_early_ends_it_silently(model_path: Path, arguments: list[str]) -> None:
    command = command_line(*(argument.format(model=model_path) for argument in arguments))
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(
            command, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1 and done.stderr == ""


@pytest.mark.slow
def test_warnings_are_sentences(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("rubbish\n")
    command = command_line("records", "list", path)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.startswith(f"Warning: {path} has lines that are not records: line 1: ")
    assert done.stderr.count("\n") == 1


def test_program_does_without_pytorch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "argv", ["tvm-fusion", "--version"])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    assert cli.program() == 0 and "tvm-fusion" in capsys.readouterr().out
    with pytest.raises(ModuleNotFoundError, match="does without PyTorch"):
        importlib.import_module("torch")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("image=1,3,224,224", ("image", (1, 3, 224, 224))),
        ("batch=4", ("batch", 4)),
        ("vector=4,", ("vector", (4,))),
        ("odd=name:0=2,2", ("odd=name:0", (2, 2))),
    ],
)
def test_shapes_are_read(text: str, parsed: Any) -> None:
    assert cli_options.Shape().convert(text, None, None) == parsed


def test_file_of_an_input_with_an_equals_sign(tmp_path: Path) -> None:
    path = tmp_path / "a=b.npy"
    path.touch()
    assert cli_options.NamedFile().convert(f"x=y={path}", None, None) == ("x=y", path)


def test_peers_are_named_once() -> None:
    convert = cli_options.EngineList().convert
    assert convert("tvm, onnxruntime,tvm", None, None) == ["tvm", "onnxruntime"]


def test_progress_is_drawn_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress_bar() as progress:
        progress("working", 1, 2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar() as progress:
        progress("working", 1, 2)
    out, err = capsys.readouterr()
    assert out == "" and "working [==========          ] 0:00" in err and err.endswith(ERASE)
    monkeypatch.setenv("COLUMNS", "30")
    with progress_bar() as progress:
        progress("text that is too long", 0, 0)
    assert all(len(part) < 30 for part in capsys.readouterr().err.split(ERASE))
    monkeypatch.setenv("TERM", "dumb")
    with progress_bar() as progress:
        progress("working", 1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("clock", [True, False])
def test_a_clock_moves_but_where_it_would_disturb(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(cli_progress, "TICK", 0.01)
    line = cli_progress._Line("waiting", has_clock=not clock)
    monkeypatch.setattr(cli_progress, "_line", line)
    with progress_bar(clock):
        capsys.readouterr()
        time.sleep(0.1)
        drawn = capsys.readouterr().err.count("waiting")
    assert (drawn > 0) == clock
    cli_progress.end()
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_terminal_shows_the_command_before_it_shows_the_result(
    library: Path, tmp_path: Path
) -> None:
    """The line goes before the result comes, and errors and help stand on lines of their own."""
    for arguments, shown, result in (
        (["inspect", str(library)], True, "small.so"),
        (["inspect", str(tmp_path)], True, "is a directory"),
        (["inspect", "--help"], False, "Usage:"),
    ):
        text = on_terminal(command_line(*arguments))
        assert ("tvm-fusion inspect 0:0" in text) == shown
        assert result in text.rpartition(ERASE)[2]
        assert text.count(ERASE) >= 2 * shown


def on_terminal(command: list[str]) -> str:
    """All that a command writes to a terminal of 80 columns."""
    leader, follower = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stdout=follower, stderr=follower, env=environment):
        os.close(follower)
        parts = []
        with contextlib.suppress(OSError):  # the terminal's end
            while part := os.read(leader, 65536):
                parts.append(part)
    os.close(leader)
    return b"".join(parts).decode()


@pytest.mark.slow
def test_tables_keep_to_the_width(run: Run, library: Path, model_path: Path) -> None:
    for arguments in (["inspect", library], ["explain", model_path], ["predict", model_path]):
        _, out, _ = run(*arguments)
        assert max(map(len, out.splitlines())) <= cli_output.PIPE_WIDTH == 100
        assert "\u2026" not in out, "a word is cut off"
    text = on_terminal(command_line("inspect", str(library))).rpartition(ERASE)[2]
    lines = re.sub(r"\x1b\[\d*m", "", text).splitlines()
    assert 60 < max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("arguments", "code", "error", "message"),
    [
        (["compile", "{bad}"], 1, "InvalidModelError", "not ONNX"),
        (["inspect", "{bad}"], 1, "ArtifactError", "is not a compiled model"),
        (["run", "{model}", "--target", "nonsense"], 1, "TargetError", "nonsense"),
        (["explain", "no/such.onnx"], 2, "BadParameter", "'no/such.onnx' does not exist"),
        (["predict"], 2, "UsageError", "expected MODEL or --traces"),
        (["compile", "{model}", "--melt"], 2, "NoSuchOption", "--melt"),
    ],
)
def test_errors_are_json_too(
    run: Run, model_path: Path, tmp_path: Path, arguments: list, code: int, error: str, message: str
) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"junk")
    filled = [argument.format(model=model_path, bad=bad) for argument in arguments]
    found, out, err = run(*filled, "--json")
    told = json.loads(out)["error"]
    assert found == told["exit_code"] == code and err == ""
    assert told["type"] == error and message in told["message"] and set(told) == ERROR_FIELDS


def test_ctrl_c_and_faults_are_json_too(
    run: Run, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cli.DEBUG, raising=False)
    for error, code in ((KeyboardInterrupt(), 130), (ZeroDivisionError("x"), 1)):
        fail_with(monkeypatch, error)
        found, out, _ = run("compile", model_path, "--json")
        told = json.loads(out)["error"]
        assert found == told["exit_code"] == code and told["type"] == type(error).__name__
