# SPDX-License-Identifier: Apache-2.0
"""No slow path is silent: a rule that fails is told of by ``compile`` and shown by ``explain``."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from rich.console import Console
from small_onnx import small_model
from without_torch import WITHOUT_TORCH

import tvm_fusion
from examples.zoo import ZOO
from schedules import cpu, gpu
from schedules.cpu.conv2d import conv2d
from schedules.schedule_rule import STRICT
from tvm_fusion.cli import command_line as cli
from tvm_fusion.compiler.explain import (
    explain,
    explain_kernels,
    explain_kernels_table,
    explain_table,
)
from tvm_fusion.errors import CompilationError, SlowPathWarning

ROOT = Path(__file__).resolve().parents[3]
TRANSFORMER = {"layers": 1, "sequence": 12, "width": 32, "heads": 4, "vocabulary": 99}
ZOO_SIZES: dict[str, dict[str, Any]] = {
    "mobilenet_v2": {"image_size": 64},
    "resnet_18": {"image_size": 64},
    "mobilenet_v3_large": {"image_size": 32, "layers": 5},
    "convnext_tiny": {"image_size": 32, "width": 16, "depths": (1, 2, 1)},
    "inception_v3": {"image_size": 75, "unit": 1},
    "bert_base": TRANSFORMER,
    "gpt2": TRANSFORMER,
    "wide_and_deep": {"rows": 50, "embedding": 4, "layers": (24, 16), "crosses": 7},
}


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set nothing, as for a user."""
    monkeypatch.delenv(STRICT)


@pytest.fixture
def broken_conv2d(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of single convolutions fails half-way through its kernel."""

    def fail(*_: object) -> None:
        raise IndexError("no such tile")

    monkeypatch.setattr(conv2d, "_nest", fail)


def text_of(table: object) -> str:
    console = Console(width=250, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


@pytest.mark.usefixtures("lenient", "broken_conv2d")
def test_a_model_is_compiled_without_the_rule_that_fails() -> None:
    model = small_model()
    with pytest.warns(SlowPathWarning) as caught:
        compiled = tvm_fusion.compile(model, fuse="none", threads=1)
    assert sorted(str(warning.message) for warning in caught) == [
        f"the schedule rule Conv2D failed on the kernel {kernel!r}: IndexError: no such tile; "
        "it is compiled without this rule, and may be slow: please report the model"
        for kernel in ("conv2d", "conv2d1", "conv2d2")
    ]
    feed = np.random.default_rng(0).standard_normal((1, 3, 12, 12), dtype=np.float32)
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"image": feed})
    np.testing.assert_allclose(compiled(feed), want, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("lenient", "broken_conv2d")
@pytest.mark.filterwarnings("ignore::schedules.errors.SlowPathWarning")
def test_explain_shows_on_which_kernels_a_rule_failed() -> None:
    report = explain(small_model(), fuse="none")
    slow = [use for use in report["functions"] if use["slow"]]
    assert [use["rule"] for use in slow] == ["Fallback", "Fallback", "Dense"]
    for use in slow:
        assert use["failed"] == {"Conv2D": "IndexError: no such tile"}
        assert use["slow"] == "Conv2D failed: IndexError: no such tile"
    text = text_of(explain_table(report, "small"))
    assert "kernels likely to be slow" in text
    lines = [line for line in text.splitlines() if "no such tile" in line]
    for use, line in zip(slow, lines, strict=True):
        assert use["name"] in line and use["rule"] in line and use["slow"] in line


@pytest.mark.slow
@pytest.mark.usefixtures("lenient", "broken_conv2d")
@pytest.mark.filterwarnings("ignore::schedules.errors.SlowPathWarning")
def test_the_command_line_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.onnx"
    onnx.save(small_model(), path)
    assert cli.main(["explain", str(path), "--fuse", "none", "--json"]) == 0
    functions = json.loads(capsys.readouterr().out)["functions"]
    assert {"Conv2D": "IndexError: no such tile"} in [use["failed"] for use in functions]
    assert cli.main(["explain", str(path), "--fuse", "none"]) == 0
    assert "Conv2D failed: IndexError: no such tile" in capsys.readouterr().out


@pytest.mark.usefixtures("broken_conv2d")
def test_strictly_the_kernel_and_the_rule_are_named() -> None:
    message = "rule Conv2D failed on the kernel 'conv2d': IndexError: no such tile; its arguments "
    for act in (tvm_fusion.compile, explain):
        with pytest.raises(CompilationError, match=message):
            act(small_model(), fuse="none")


@pytest.mark.slow
def test_a_process_of_its_own_tells_a_user_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(STRICT)
    onnx.save(small_model(), tmp_path / "small.onnx")
    program = (
        "import sys, tvm_fusion\n"
        "from schedules.cpu.conv2d import conv2d\n"
        "del conv2d.block_runs\n"
        "tvm_fusion.compile(sys.argv[1], fuse='none')\n"
    )
    command = [sys.executable, "-c", WITHOUT_TORCH + program, str(tmp_path / "small.onnx")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    told = [line for line in done.stderr.splitlines() if "SlowPathWarning: " in line]
    assert len(told) == 3 and all("NameError: name 'block_runs'" in line for line in told)
    monkeypatch.setenv(STRICT, "1")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "CompilationError: the schedule rule Conv2D" in done.stderr


def running_sum() -> onnx.ModelProto:
    """A model with a kernel that no rule takes: it writes its whole body itself."""
    nodes = [
        helper.make_node("CumSum", ["x", "axis"], ["total"]),
        helper.make_node("Relu", ["total"], ["y"]),
    ]
    kind, shape = TensorProto.FLOAT, [4, 30]
    values = [helper.make_tensor_value_info(name, kind, shape) for name in ("x", "y")]
    axis = helper.make_tensor("axis", TensorProto.INT64, [], [1])
    graph = helper.make_graph(nodes, "sums", values[:1], values[1:], [axis])
    opsets = [helper.make_operatorsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def test_explain_shows_what_no_rule_takes() -> None:
    report = explain(running_sum())
    slow = [(use["rule"], use["slow"]) for use in report["functions"] if use["slow"]]
    assert slow == [("none", "no rule takes it")]
    assert all(use["failed"] == {} for use in report["functions"])
    assert "no rule takes it" in text_of(explain_table(report))


def test_explain_shows_what_is_left_to_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    fallback = cpu.RULES[-1]
    monkeypatch.setattr("tvm_fusion.compiler.phases.cpu.rules", lambda _: (fallback,))
    report = explain(small_model(), fuse="none")
    kernels = [use for use in report["functions"] if use["rule"] == "Fallback"]
    assert kernels and all(use["slow"] == "no other rule takes it" for use in kernels)
    assert "no other rule takes it" in text_of(explain_table(report))


@pytest.mark.slow
@pytest.mark.usefixtures("lenient")
def test_explain_for_gpus_shows_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = next(rule for rule in gpu.RULES if isinstance(rule, gpu.Conv2D))

    def fail(*_: object) -> None:
        raise ValueError("no tile")

    monkeypatch.setattr(rule, "schedule", fail)
    with pytest.warns(SlowPathWarning, match="rule Conv2D failed on the kernel '.*: no tile; "):
        report = explain_kernels(small_model(), "opencl", fuse="none")
    failed = [use for use in report["functions"] if use["failed"]]
    assert failed and all(use["rule"] != "Conv2D" for use in report["functions"])
    assert all(use["slow"] == "Conv2D failed: ValueError: no tile" for use in failed)
    text = text_of(explain_kernels_table(report))
    assert "kernels likely to be slow" in text and "Conv2D failed: ValueError: no tile" in text


@pytest.mark.slow
@pytest.mark.usefixtures("lenient")
def test_what_no_rule_of_ours_takes_on_a_gpu_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_fusion.compiler.phases.gpu.RULES", ())
    report = explain_kernels(small_model(), "opencl", fuse="none")
    assert {use["slow"] for use in report["functions"]} == {"none of our rules takes it"}
    assert all(use["rule"].startswith("dlight.") for use in report["functions"])


@pytest.mark.usefixtures("lenient")
def test_nothing_is_told_of_a_model_whose_rules_work() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowPathWarning)
        tvm_fusion.compile(small_model(), threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO_SIZES)
@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "cortex-a72"])
def test_no_rule_fails_on_the_models_of_the_examples(name: str, target: str) -> None:
    functions = explain(ZOO[name](2, **ZOO_SIZES[name]), target)["functions"]
    assert functions and not any(use["failed"] for use in functions)
    # A space may lie before the nest of a reduction.
    rules = {use["rule"].split()[0] for use in functions}
    of_ops = {"CheckIndices"}  # legalization writes their kernels
    assert rules - of_ops <= {type(rule).__name__ for rule in cpu.RULES}
