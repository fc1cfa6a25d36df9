# SPDX-License-Identifier: Apache-2.0
"""Commands of networks over ranks: compile, run by mpiexec, explain, simulate; and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from mpi_ranks import needs_mpi, run_ranks
from small_onnx import small_model

import tvm_fusion
from schedules.cost.machine import Figure, Machine
from tvm_fusion.cli import command_line as cli
from tvm_fusion.distributed.calibrate import write_machine
from tvm_fusion.distributed.network_figures import read_figures
from tvm_fusion.distributed.world.numa_placement import NUMA
from tvm_fusion.errors import InvalidInputError
from tvm_fusion.machine.host import physical_cores
from tvm_fusion.machine.numa import numa_nodes
from tvm_fusion.prediction.machines import calibration_path

COMMAND = "tvm_fusion.cli"
ONE_NODE = pytest.mark.skipif(len(numa_nodes()) != 1, reason="the machine has several NUMA nodes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as ``m.onnx``, compiled for two ranks as ``r2.so``; its input and its output."""
    path = tmp_path_factory.mktemp("network")
    model = small_model(size=40)
    onnx.save(model, path / "m.onnx")
    x = np.random.default_rng(0).standard_normal((1, 3, 40, 40), dtype=np.float32)
    np.save(path / "x.npy", x)
    np.save(path / "y.npy", tvm_fusion.compile(model, threads=1)(x))
    ranks = ["--ranks", "2", "--threads", "1", "--exchange", "always"]
    command = ["compile", "m.onnx", "-o", "r2.so", *ranks]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        assert cli.main(command) == 0
    return path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Run a command in the folder; return its exit code, standard output and standard error."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.mark.slow
@needs_mpi
def test_two_processes(folder: Path) -> None:
    network = folder / "network.json"
    figures = {"parcel_seconds.in_place.1024.64.1": Figure(1e-6, "a test")}
    write_machine(Machine("ranks-2", "cpu", "two", figures), network)
    files = "--input", f"image={folder / 'x.npy'}", "--output", str(folder / "out.npz")
    arguments = "run", str(folder / "r2.so"), "--distributed", "--repeat", "3", *files, "--json"
    arguments += "--network", str(network)
    outcome = run_ranks(2, COMMAND, *arguments)
    assert outcome.code == 0, outcome.stderr
    result = json.loads(outcome.stdout)  # one rank shows it
    assert result["ranks"] == 2 and result["latency"]["repeat"] == 3
    assert result["outputs"][0]["shape"] == [1, 6, 40, 40]
    found = np.load(folder / "out.npz")["scores"]
    np.testing.assert_array_equal(found, np.load(folder / "y.npy"))


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize(
    ("ranks", "model", "extra", "message"),
    [
        (3, "r2.so", [], "the program is for 2 ranks, and this job has 3; start it by mpiexec"),
        pytest.param(
            *(
                1,
                "r2.so",
                [],
                "the program is for 2 ranks, and this job has 1; start it by mpiexec",
            ),
            marks=pytest.mark.slow,
        ),
        (2, "r2.so", ["--input", "other=x.npy"], "no input is called 'other'"),
        (2, "r2.so", ["--network", "no.json"], "rank 0 of 2 failed: no file 'no.json'; mpiexec -n"),
        (2, "r2.so", ["--network", "x.npy"], "failed: x.npy is no file of a network: not JSON: "),
        (2, "r2.so", ["--output", "r2.so"], "rank 0 of 2 failed: 'r2.so' is the model itself;"),
        pytest.param(2, "r2.so", ["--numa", "same"], "has one NUMA node; leave", marks=ONE_NODE),
    ],
)
def test_what_is_wrong_is_told_once(
    folder: Path,
    ranks: int,
    model: str,
    extra: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    output, before = folder / "none.npz", (folder / model).read_bytes()
    arguments = "run", model, "--distributed", "--output", str(output), *extra
    outcome = run_ranks(ranks, COMMAND, *arguments)
    assert outcome.code != 0 and outcome.stdout == "" and not output.exists()
    assert outcome.stderr.count(message) == 1, outcome.stderr
    assert (folder / model).read_bytes() == before


def test_options_without_effect(run: Any) -> None:
    assert run("run", "m.onnx", "--timeout", 5)[0] == 2
    assert run("run", "m.onnx", "--numa", "same")[0] == 2
    code, _, error = run("run", "m.onnx", "--network", "network.json")
    assert code == 2 and error.endswith("--network has no effect: it is for --distributed\n")
    code, _, error = run("run", "r2.so", "--distributed", "--numa", "both")
    assert code == 2 and all(repr(numa) in error for numa in NUMA)
    code, _, error = run("run", "r2.so", "--distributed", "--winograd", "never")
    assert code == 2 and "--distributed runs a model that is compiled already" in error
    code, _, error = run("run", "r2.so")
    assert code == 1 and "compiled for 2 ranks; run it by mpiexec -n 2 tvm-fusion run" in error
    assert run("explain", "m.onnx", "--network", "alpha=1us")[0] == 2
    assert run("compile", "m.onnx", "--exchange", "once")[0] == 2
    assert run("compile", "m.onnx", "--ranks", 2, "--precision", "fp16")[0] == 2
    assert run("explain", "m.onnx", "--ranks", 2, "--precision", "fp16")[0] == 2


def test_inspect(run: Any) -> None:
    assert json.loads(run("inspect", "r2.so", "--json")[1])["ranks"]["parts"][1]["function"]
    assert "ranks" in run("inspect", "r2.so")[1]


def test_explain(run: Any) -> None:
    ranks = "--ranks", 4, "--network", "alpha=0.1us,beta=100GB/s", "--exchange", "always"
    code, out, _ = run("explain", "m.onnx", *ranks, "--json")
    segments = json.loads(out)["segments"]
    assert code == 0 and segments[-1]["end"] == "gather"
    assert sum(s["bytes"] for s in segments) >= 30 * 40 * 6 * 4
    text = run("explain", "m.onnx", *ranks)[1]
    assert text.startswith("rows over 4 ranks; ") and "0: 0:10, 1: 10:20, 2: 20:30" in text
    slow = run("explain", "m.onnx", "--ranks", 4, "--network", "alpha=1s", "--json")[1]
    assert [s["end"] for s in json.loads(slow)["segments"]] == ["result"]


def test_simulate(run: Any, folder: Path) -> None:
    network = "--network", "alpha=0.1us,beta=100GB/s", "--exchange", "always"
    ranks = "--ranks", "1,...,8,4096"
    code, out, _ = run("simulate", "m.onnx", *ranks, *network, "--one-rank", 2.0, "--json")
    strong = json.loads(out)
    assert code == 0 and strong["kind"] == "strong"
    assert [p["ranks"] for p in strong["points"]] == [1, 2, 4, 8, 4096]
    one, two, *_ = strong["points"]
    assert one["seconds"] == pytest.approx(2e-3) and one["messages"] == 0
    assert two["seconds"] < one["seconds"] and all(p["beyond"] for p in strong["points"])
    segments = json.loads(run("explain", "m.onnx", "--ranks", 2, *network, "--json")[1])["segments"]
    assert two["bytes"] == sum(s["bytes"] for s in segments)
    assert two["messages"] == sum(s["messages"] for s in segments)
    auto = [
        json.loads(run("simulate", "m.onnx", "--ranks", 2, *measured, "--json")[1])["points"][0]
        for measured in ((), ("--one-rank", 1000.0))
    ]
    # The compiled ones are all the same.
    assert len({(point["messages"], point["bytes"]) for point in auto}) == 1
    drawing = folder / "weak.svg"
    weak = run("simulate", "m.onnx", "--ranks", "1,2,64", "--weak", "--draw", drawing, *network)[1]
    assert weak.startswith("weak scaling, predicted")
    assert [line.split()[0] for line in weak.splitlines()[2:5]] == ["1", "2", "64"]
    assert "weak scaling, predicted" in drawing.read_text()


@pytest.mark.slow
def test_simulate_takes_the_threads_of_a_rank_from_the_option_or_the_machine(run: Any) -> None:
    def seconds(*options: Any) -> float:
        out = run("simulate", "m.onnx", "--ranks", "1", "--target", "znver3", *options, "--json")[1]
        return float(json.loads(out)["points"][0]["seconds"])

    assert seconds("--threads", 1) > seconds("--threads", 2) > seconds("--threads", 16)
    assert seconds() == seconds("--threads", physical_cores())


@pytest.mark.slow
def test_simulate_on_a_cpu_that_nobody_measured_says_so(
    run: Any, rename_cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rename_cpu("diamondrapids")
    code, text, _ = run("simulate", "m.onnx", "--ranks", "1,2")
    [note] = json.loads(run("simulate", "m.onnx", "--ranks", "1,2", "--json")[1])["notes"]
    assert code == 0 and text.splitlines()[-1] == note
    assert "'diamondrapids': times are estimated from the figures of 'znver" in note
    assert "run `tvm-fusion calibrate`" in note
    known = run("simulate", "m.onnx", "--ranks", "1,2", "--target", "znver3", "--json")[1]
    assert json.loads(known)["notes"] == []
    figures = {"peak_flops.float32": 3e10, "bandwidth.memory": 7e9, "multiprocessors": 1}
    measured = {name: Figure(value, "measured") for name, value in figures.items()}
    path = calibration_path(1)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(Machine("diamondrapids", "cpu", "this", measured).to_json()))
    own = json.loads(run("simulate", "m.onnx", "--ranks", "1,2", "--json")[1])
    assert own["notes"] == [] and own["points"][0]["compute"] > 0


@pytest.mark.parametrize("ranks", ["0", "1,...", "...,4", "one", "4,2"])
def test_numbers_of_ranks_that_are_none(run: Any, ranks: str) -> None:
    code, _, error = run("simulate", "m.onnx", "--ranks", ranks)
    assert code != 0 and ("is not like 1,2,4" in error or "expected ascending" in error)


def test_figures(tmp_path: Path) -> None:
    network, measured = read_figures("alpha=2us, beta=3GB/s,progress=0.5")
    assert (network.latency, network.bandwidth, network.progress) == (2e-6, 3e9, 0.5)
    assert measured == 0 and not network.is_shared and read_figures(None)[0].is_shared
    file = tmp_path / "network.json"
    figures = {
        f"network.{name}": {"value": value, "origin": "measured"}
        for name, value in {"latency": 1e-6, "bandwidth": 1e9}.items()
    }
    machine = {"name": "ranks-2", "kind": "cpu", "title": "two", "figures": figures}
    for on_node, is_shared in ((1, False), (2, True)):
        figures["node.ranks"] = {"value": on_node, "origin": "measured"}
        file.write_text(json.dumps(machine))
        network, measured = read_figures(str(file))
        assert network.is_shared == is_shared and measured == 2
    with pytest.raises(InvalidInputError, match="'no.json' is no file that is there, and not a ne"):
        read_figures("no.json")
    for text in ("alpha", "alpha=1", "alpha=1GB/s", "gamma=1us", "beta=0GB/s", "alpha=1.1.1us"):
        with pytest.raises(InvalidInputError, match="not a network figure|no positive number"):
            read_figures(text)
