# SPDX-License-Identifier: Apache-2.0
"""Commands predict MODEL and calibrate: what they print, and what they refuse."""

import json

import onnx
import pytest
from small_onnx import small_model

from tvm_fusion.cli import command_line as cli


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    onnx.save(small_model("batch"), path)
    return path


@pytest.fixture
def run(capsys):
    def call(*arguments):
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def test_several_machines_in_one_table(run, model):
    machines = ("--machine", "znver3", "--machine", "v100")
    code, out, _ = run("predict", model, "--batch", 2, "--engine", "pytorch", *machines)
    assert code == 0
    assert "Zen 3" in out and "Tesla V100" in out and "times as fast as the first" in out
    assert "A run takes" in out and "of roofline" in out


def test_json_is_one_entry_a_machine(run, model):
    machines = ("--machine", "znver3", "--machine", "znver5")
    code, out, _ = run("predict", model, "--shape", "batch=1", *machines, "--json")
    first, second = json.loads(out)
    assert (code, first["machine"], second["machine"]) == (0, "znver3", "znver5")
    assert first["seconds"] > second["seconds"] and first["kernels"][0]["model"]


def test_a_cpu_that_nobody_measured(run, model, rename_cpu, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rename_cpu("diamondrapids")
    options = ("--batch", 1, "--what-if", "batch=2", "--json")
    [found] = json.loads(run("predict", model, *options)[1])
    notes = found["notes"], found["answers"][0]["notes"]
    assert all(any("run `tvm-fusion calibrate`" in note for note in each) for each in notes)
    code, out, _ = run("predict", model, "--batch", 1)
    shown = " ".join(out.split())
    assert code == 0 and "(diamondrapids), estimated from AMD EPYC, Zen" in shown
    assert "'diamondrapids': times are estimated from the figures of 'znver" in shown


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "similar"), [("graniterapids", "emeraldrapids"), ("a64fx", "znver")]
)
def test_a_cpu_elsewhere_that_nobody_measured(run, model, name, similar):
    code, out, _ = run("predict", model, "--batch", 1, "--machine", name, "--threads", 2)
    shown = " ".join(out.split())
    assert code == 0 and f"{name}, estimated from" in shown
    assert f"'{name}': times are estimated from the figures of '{similar}" in shown


def test_what_if_of_a_model(run, model):
    changes = ("--what-if", "graph", "--what-if", "machine=p4 and graph")
    options = (
        "predict",
        model,
        "--batch",
        4096,
        "--engine",
        "pytorch",
        "--machine",
        "v100",
        *changes,
    )
    code, out, _ = run(*options)
    assert code == 0 and "critical now" in out and "machine=p4 and" in " ".join(out.split())
    (found,) = json.loads(run(*options, "--json")[1])
    first, second = found["answers"]
    assert first["gain"] > second["gain"] and first["critical"]["op"]


@pytest.mark.parametrize(
    "arguments, code, told",
    [
        ((), 2, "expected MODEL or --traces"),
        (("MODEL",), 1, "(--shape batch=1)"),
        (("MODEL", "--batch", "1", "--machine", "abacus"), 1, "or a file, or a CPU such as"),
        (("MODEL", "--batch", "1", "--timeline", "t.json"), 2, "--timeline has no effect"),
        (("MODEL", "--batch", "1", "--check", "--machine", "v100"), 2, "--check runs here"),
        (("MODEL", "--batch", "1", "--check", "--engine", "pytorch"), 2, "--engine has no effect"),
        (("MODEL", "--batch", "1", "--check", "--what-if", "graph"), 2, "--what-if has no effect"),
    ],
)
def test_wrong_use_is_explained(run, model, arguments, code, told):
    given = [model if argument == "MODEL" else argument for argument in arguments]
    found, _, err = run("predict", *given)
    assert found == code and told in " ".join(err.split())


def test_a_calibration_needs_a_budget(run):
    code, _, err = run("calibrate", "--budget", "0")
    assert code == 2 and "--budget" in err
