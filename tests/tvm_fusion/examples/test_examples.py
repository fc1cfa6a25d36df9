# SPDX-License-Identifier: Apache-2.0
"""The examples run, print what they promise, and the benchmarks keep their results."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from mpi_ranks import needs_mpi, run_ranks
from opencl import opencl_context
from small_onnx import small_model
from tvm import s_tir, tirx

from examples import (
    coalesced_reduction,
    cooperative_blur,
    demo,
    distributed_blur,
    distributed_network,
    relay_pipeline,
)
from examples.benchmarks import (
    campaign,
    cooperative,
    distributed,
    distributed_choices,
    distributed_networks,
    exchanges,
    networks,
    pairs,
    reductions_cpu,
    rooflines,
    stencil_peers,
)
from examples.stencils import STENCILS
from tvm_fusion.bench.race import EngineSpec, Plan
from tvm_fusion.compiler import pipeline, targets
from tvm_fusion.distributed import compile as compile_ranks
from tvm_fusion.distributed import run_ranks as threads_of_ranks
from tvm_fusion.distributed.accelerator.device import open_driver
from tvm_fusion.distributed.world.local_world import LocalWorld
from tvm_fusion.errors import DistributedError
from tvm_fusion.machine.host import usable_processors

PLAN = Plan(rounds=1, runs=1)
ENGINES = [EngineSpec("tvm-fusion"), EngineSpec("onnxruntime")]


def models(batch: int = 1, image_size: int = 12) -> Any:
    return small_model(batch, min(image_size, 12))


def options(path: Path, *arguments: str) -> argparse.Namespace:
    parser = campaign.parser("Test.", ["one", "two"], "unused.json")
    return parser.parse_args(["--threads", "1", "--output", str(path), *arguments])


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the races by records of their names."""
    raced: list[str] = []

    class FakeResult:
        def __init__(self, name: str) -> None:
            self.name = name

        def to_json(self) -> dict[str, Any]:
            engines = [{"relative_error": float("inf") if self.name == "two" else 1e-6}]
            return {"model": self.name, "engines": engines}

    class FakeArena:
        def __init__(self, engines: Any, threads: int) -> None:
            assert threads == 1
            raced.append("new")

        def __enter__(self) -> FakeArena:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def race(self, model: Any, name: str, plan: Plan, **_: Any) -> FakeResult:
            if name == "broken":
                raise RuntimeError("no engine")
            raced.append(f"{name} {plan.rounds}")
            return FakeResult(name)

    monkeypatch.setattr(campaign, "Arena", FakeArena)
    return raced


BUILDERS = {name: (lambda: None) for name in ("one", "two", "broken")}


def test_a_folder_of_results_is_there_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "CPU_FOLDER", tmp_path / "results" / "new-cpu")
    given = campaign.parser("Test.", ["one"], "races.json").parse_args([])
    assert given.output == tmp_path / "results" / "new-cpu" / "races.json"
    assert given.output.parent.is_dir() and not given.output.exists()
    (tmp_path / "file").touch()
    for wrong in (tmp_path, tmp_path / "file" / "races.json"):
        with pytest.raises(SystemExit):
            options(wrong)
        assert "no file in a writable folder" in capsys.readouterr().err


def test_every_benchmark_checks_its_output_first() -> None:
    """Whatever it measures, and however its other options are read."""
    for file in sorted(Path(campaign.__file__).parent.glob("*.py")):
        found = re.findall(r'"--output",\s*type=(\w+)', file.read_text())
        assert set(found) <= {"output_file"}, file.name


def test_campaign_resumes_what_has_the_same_settings(races: list[str], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    first = options(path, "--only", "one")
    campaign.run_races(BUILDERS, ENGINES, PLAN, first)
    both = campaign.run_races(BUILDERS, ENGINES, PLAN, options(path, "--resume"))
    assert races == ["new", "one 1", "new", "two 1"] and list(both) == ["one", "two"]
    campaign.run_races(BUILDERS, ENGINES, PLAN, options(path, "--resume", "--rounds", "4"))
    assert races[4:] == ["new", "one 4", "two 4"]
    campaign.run_races(BUILDERS, ENGINES, PLAN, options(path, "--quick"))
    assert races[7:] == ["new", "one 5", "two 5"]
    stored = json.loads(path.read_text())
    assert stored["settings"]["plan"]["rounds"] == 5 and stored["settings"]["threads"] == 1
    assert [engine["engine"] for engine in stored["settings"]["engines"]] == [
        "tvm-fusion",
        "onnxruntime",
    ]


def test_fresh_processes_are_made_for_each_model(races: list[str], tmp_path: Path) -> None:
    asked = options(tmp_path / "results.json")
    campaign.run_races(BUILDERS, ENGINES, PLAN, asked, fresh=True)
    assert races == ["new", "one 1", "new", "two 1"]


def test_the_first_file_of_a_cpu_makes_its_folder(tmp_path: Path) -> None:
    for record in ({"a": 1}, '{"a": 1}'):
        path = tmp_path / type(record).__name__ / "some.json"
        campaign.save(path, record)
        assert json.loads(path.read_text()) == {"a": 1}


def test_campaign_keeps_what_was_done_before_a_failure(races: list[str], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    asked = options(path)
    asked.only = ["one", "broken", "two"]
    with pytest.raises(RuntimeError, match="no engine"):
        campaign.run_races(BUILDERS, ENGINES, PLAN, asked)
    assert list(json.loads(path.read_text())["results"]) == ["one"]
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_campaign_counts_wrong_outputs(races: list[str], tmp_path: Path) -> None:
    results = campaign.run_races(BUILDERS, ENGINES, PLAN, options(tmp_path / "r.json"))
    assert campaign.largest_error(results) == float("inf")
    assert campaign.largest_error({"one": results["one"]}) == 1e-6


@pytest.mark.slow
def test_demo_prints_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(demo.MODELS, "mobilenet_v2", models)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--threads", "1", "--rounds", "3"])
    assert demo.main() == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == [
        "stock TVM",
        "ONNX Runtime",
        "tvm-fusion",
    ]
    assert "of 2" in rows[2] and "reference" in rows[1]


@pytest.mark.slow
def test_networks_prints_its_table_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(networks, "MODELS", {"tiny": models, "other": models})
    path = tmp_path / "networks.json"
    arguments = "--only tiny --against onnxruntime --rounds 2 --quick --threads 1"
    arguments += " --batch 3 --image-size 8 --output"
    monkeypatch.setattr(sys, "argv", ["networks.py", *arguments.split(), str(path)])
    assert networks.main() == 0
    (result,) = json.loads(path.read_text())["results"].values()
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "│ tiny" in line)
    assert f"{result['engines'][0]['median_ms']:.2f}" in row
    assert f"{result['engines'][1]['ratio']:.2f}x" in row
    peaks = [f"{engine['peak_mib']:.0f}" for engine in result["engines"]]
    assert ", ".join(peaks) in [cell.strip() for cell in row.split("│")]
    assert result["model"] == "tiny" and result["engines"][1]["rounds"] == 2
    assert result["inputs"][0][1] == [3, 3, 8, 8]
    assert "│ geometric mean" in out and str(path) in out.replace("\n", "")


@pytest.mark.slow
def test_pairs_prints_its_table_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(pairs, "ENGINES", pairs.ENGINES[:3] + pairs.ENGINES[4:5])
    path = tmp_path / "pairs.json"
    arguments = "--only mv2_6_2 rgy_4 --rounds 2 --threads 1 --output"
    monkeypatch.setattr(sys, "argv", ["pairs.py", *arguments.split(), str(path)])
    assert pairs.main() == 0
    stored = json.loads(path.read_text())
    assert {key: list(stored[key]) for key in ("results", "groups")} == {
        "results": ["mv2_6_2"],
        "groups": ["rgy_4"],
    }
    result = stored["results"]["mv2_6_2"]
    titles = [engine["title"] for engine in result["engines"]]
    assert titles == ["tvm-fusion", "fused", "unfused", "ONNX Runtime"]
    assert [engine["details"]["fused"] for engine in result["engines"][1:3]] == [1, 0]
    out = capsys.readouterr().out
    assert "│ mv2_6_2 " in out and "depthwise (1)" in out and "all (1)" in out
    assert "│ rgy_4 " in out and "groups (1)" in out


def test_faster_peer_is_the_smallest_ratio_of_peers() -> None:
    engines = [
        {"engine": engine, "ratio": ratio}
        for engine, ratio in [("tvm-fusion", 1), ("tvm-fusion", 0.5), ("a", 1.4), ("b", 1.2)]
    ]
    assert pairs.faster_peer(engines) == 1.2


def test_the_gain_by_fusion_is_that_of_fused_over_unfused() -> None:
    engines = [{"engine": "tvm-fusion", "ratio": ratio} for ratio in (1, 0.8, 1.2)]
    assert pairs.gain([*engines, {"engine": "a", "ratio": 3}]) == pytest.approx(1.5)


@pytest.mark.slow
def test_rooflines_prints_its_table_and_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(rooflines, "MODELS", {"tiny": lambda: small_model(size=64, channels=32)})
    engines = [
        {"title": "tvm-fusion", "details": {"fused": 1}, "median_ms": 0.1},
        {"title": "ONNX Runtime", "details": {}, "median_ms": 0.2},
    ]
    stored = {"results": {"mv2_6_2": {"engines": engines}}}
    (tmp_path / "pairs.json").write_text(json.dumps(stored))
    arguments = ["--threads", "1", "--runs", "2", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["rooflines.py", *arguments])
    assert rooflines.main() == 0
    record = json.loads((tmp_path / "rooflines.json").read_text())
    assert any(
        "conv 3x3 3->32" in kernel["operator"] for kernel in record["tiny"]["fused"]["kernels"]
    )
    for name in ("rooflines_networks.png", "rooflines_pairs.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    row = next(line for line in capsys.readouterr().out.splitlines() if "│ tiny" in line)
    assert "conv" in row and "%" in row


def test_an_engine_that_fuses_nothing_moves_more_bytes() -> None:
    engines = [
        {"title": title, "details": {"fused": fused}, "median_ms": 1.0}
        for title, fused in (("fused", 1), ("unfused", 0))
    ]
    fused, unfused = rooflines.pair_points({"mv2_6_2": {"engines": engines}})
    assert fused.intensity > unfused.intensity
    assert fused.flops_per_second == unfused.flops_per_second


@pytest.mark.slow
def test_relay_pipeline_shows_every_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert relay_pipeline.main() == 0
    lines = capsys.readouterr().out.splitlines()
    starts = ["the module", "SimplifyInference", "FuseConv2D", "FuseEpilogue", "PackLayout"]
    assert [line[:18].strip() for line in lines[:5]] == starts
    assert "batch_norm" in lines[0] and "batch_norm" not in lines[1]
    assert "tvm_fusion.fused_conv2d" in lines[2] and lines[2].count("relax.nn.conv2d") == 1
    assert "tvm_fusion.conv2d" in lines[3] and "relax.nn.conv2d" not in lines[3]
    assert "tvm_fusion.pack" in lines[4]


@pytest.mark.slow
def test_coalesced_reduction_prints_its_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert coalesced_reduction.main() == 0
    out = capsys.readouterr().out
    (functions,) = [line for line in out.splitlines() if line.startswith("functions:")]
    *fused, main = functions.split()[1:]
    assert main == "main" and len(fused) == 2
    names = re.findall(r"__global__ .*?(\w+)_kernel\(", out)  # a declaration, then the kernel
    assert len(names) == 2 and len(set(names)) == 1  # Both sums are one on a GPU.
    assert names[0].count("coalesced_sum") == 2 and "blockIdx.x" in out


def test_distributed_blur(capsys: pytest.CaptureFixture[str]) -> None:
    assert distributed_blur.main(["--ranks", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("loops r over 3 ranks; 8224 bytes in 4 messages")
    assert "largest error of 3 ranks: " in out
    assert "rows (0, 125) on the CPU, (125, 1000) on the GPU" in out
    assert out.count("__global__") == 4 and "blockIdx.y" in out  # declarations, then kernels


@pytest.mark.slow
@needs_mpi
def test_distributed_blur_of_processes() -> None:
    outcome = run_ranks(2, Path(distributed_blur.__file__), "--mpi")
    assert outcome.code == 0, outcome.stderr
    assert "largest error of 2 ranks: " in outcome.stdout


@pytest.mark.slow
def test_cooperative_blur(capsys: pytest.CaptureFixture[str]) -> None:
    opencl_context()  # chooses the OpenCL of the tests
    assert cooperative_blur.main(["--split", "400", "600", "--chunks", "3"]) == 0
    out = capsys.readouterr().out
    assert "opencl:0 meanwhile: 400:1000 in 3 chunks" in out and "largest error: " in out
    assert cooperative_blur.main(["--device", "opencl:99"]) == 2
    assert "no device opencl:99; it has opencl:0" in capsys.readouterr().err


@pytest.mark.slow
def test_cooperative_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--dry-run", "--only", "blur", "--size", "64", "32", "--device", "opencl"]
    assert cooperative.main(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"4/16 .* 16 .* -", out) and "model" in out
    assert cooperative.splits_of(64)["4/16"] == [16, 48]
    ratios = {"0/16": 2.0, "8/16": 1.0, "16/16": 3.0, "model": 1.1, "device, 1 chunk": 4.0}
    turns = {  # other work makes all slower by turns
        title: [cooperative.Turn(ratio * slow, slow) for slow in (1e-3, 5e-3, 2e-3)]
        for title, ratio in ratios.items()
    }
    seconds = cooperative.typical(turns)
    assert seconds == pytest.approx({title: ratio * 2e-3 for title, ratio in ratios.items()})
    told = "to the best split: model 1.10x; best split to one side alone: 2.00x"
    found = {title: {cooperative.TYPICAL: ms * 1e3} for title, ms in seconds.items()}
    assert cooperative.verdict(found) == told


@pytest.mark.slow
def test_cooperative_sweep_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opencl_context()
    path = tmp_path / "cooperative.json"
    arguments = ["--only", "blur", "--size", "32", "32", "--device", "opencl", "--rounds", "1"]
    assert cooperative.main([*arguments, "--output", str(path)]) == 0
    splits = json.loads(path.read_text())["results"]["blur"]["splits"]
    assert len(splits) == 21 and splits["16/16"]["cpu_rows"] == 32
    assert list(splits)[-2:] == ["device, 1 chunk", "device, 8 chunks"]
    assert "measured" in capsys.readouterr().out


@pytest.mark.slow
def test_cooperative_sweep_on_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opencl_context()
    if usable_processors() < 2:
        pytest.skip("the device needs a core of its own")
    monkeypatch.setattr("tvm_fusion.distributed.program.open_driver", open_driver)  # put back after
    path = tmp_path / "cooperative.json"
    arguments = ["--only", "heat2d", "--size", "64", "32", "--device", "opencl", "--rounds", "1"]
    before = os.sched_getaffinity(0)
    assert cooperative.main([*arguments, "--threads=1", "--one-core-each", f"--output={path}"]) == 0
    assert os.sched_getaffinity(0) == before
    found = json.loads(path.read_text())["results"]["heat2d"]
    assert found["device"].startswith("opencl on one core of this CPU")
    assert len(found["splits"]) == 19


def test_distances_of_choices() -> None:
    turns = {"overlap never": [4.0], "overlap always": [5.0], "every 2": [2.0], "every 4": [3.0]}
    chosen = {"overlap": "overlap never", "every": "every 4"}
    found = distributed_choices.distances({"chosen": chosen, "turns_ms": turns})
    assert found["overlap"] == ("overlap never", "overlap never", 1.0)
    assert found["every"] == ("every 4", "every 2", 1.5)
    networks = {"chosen": {"exchange": "auto"}, "turns_ms": {"once": [1.0], "auto": [1.1]}}
    assert distributed_choices.distances(networks)["exchange"] == ("auto", "once", 1.1)
    halo = {"chosen": {"packing": "slot"}, "turns_ms": {"slot": [1.5], "in place": [1.0]}}
    assert distributed_choices.distances(halo)["packing"] == ("slot", "in place", 1.5)


def test_shapes_of_halos() -> None:
    shapes = {name: tuple(case.parcel) for name, case in exchanges.HALOS.items()}
    assert shapes["row of 4 KB"] == (4096, 4096, 1)
    assert shapes["corner of 2 x 2"] == (16, 8, 1)
    assert shapes["256 pieces of 12 B"] == (256 * 12, 12, 1)
    assert shapes["64 pieces of 4 KB"] == (64 * 4096, 4096, 1)
    assert shapes["plane of a cube, second axis"] == (64 * 256, 256, 1)
    assert shapes["2 rows of 16 KB"] == (2 << 14, 1 << 14, 2)


@needs_mpi
@pytest.mark.slow
def test_distributed_choices(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    path = tmp_path / "choices.json"
    monkeypatch.setenv(distributed.SMALL, "1")
    halos = ["row of 4 KB", "64 pieces of 448 B"]
    arguments = ["--rounds", "1", "--output", str(path), "--only", "heat2d", "small", *halos]
    assert distributed_choices.main(arguments) == 0
    results = json.loads(path.read_text())["results"]
    assert set(results["heat2d"]["chosen"]) == {"overlap", "every"}
    assert list(results["small"]["turns_ms"]) == ["always", "once", "auto"]
    assert results[halos[0]]["chosen"] == {"packing": "in place"}
    assert list(results[halos[1]]["turns_ms"]) == ["slot", "packed", "in place"]
    assert "to the best" in capsys.readouterr().out


@pytest.mark.slow
def test_distributed_network(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["mobilenet_v3_large", "image_size=32", "layers=1"]
    assert distributed_network.main(["--ranks", "2", "--exchange", "once", *sizes]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rows over 2 ranks; ") and "gather" in out
    assert "2 ranks and one rank have the same bits" in out
    assert "strong scaling, predicted" in out


@needs_mpi
@pytest.mark.slow
def test_distributed_stencils(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    path = tmp_path / "distributed.json"
    monkeypatch.setenv(distributed.SMALL, "1")
    arguments = ["--rounds", "1", "--output", str(path), "--only", "heat2d", "wave2d"]
    assert distributed.main(arguments) == 0
    results = json.loads(path.read_text())["results"]
    waves, jobs = (results[name]["jobs"] for name in ("wave2d", "heat2d"))
    assert waves["2 ranks"]["bytes"] > 0
    ranks = jobs["2 ranks"]
    rows = ranks["bytes"] / 2 / 4 / ranks["exchange_every"]
    assert ranks["exchange_every"] > 1 and 46 <= rows <= 48  # the first step needs no corners
    assert jobs["1 rank, 2 threads"]["messages"] == 0
    assert "2 ranks to 1 rank with 2 threads" in capsys.readouterr().out


def test_peers_of_stencils(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Peers that fail, and cases that they cannot express, are left out."""
    monkeypatch.setattr(distributed, "launch", lambda *_: "[]")
    with pytest.raises(DistributedError, match="some-python can import none of numba, jax, devito"):
        distributed.engines_of("some-python")
    given: list[list[str]] = []

    def launch(ranks: int, arguments: list[str], *_: Any) -> str:
        given.append(arguments)
        return '{"run_ms": 5.0}\n{"run_ms": 5.0}'

    monkeypatch.setattr(distributed, "launch", lambda *_: '{"run_ms": null}')
    assert distributed.run_peer("halide", "heat2d", "python") is None
    monkeypatch.setattr(distributed, "launch", launch)
    for name, dtype in (("blur", "float32"), ("sobel_uint8", "uint8")):
        assert distributed.run_peer("jax", name, "python") == 5
        assert given[-1][-2:] == ["--dtype", dtype]

    def fails(*_: Any) -> str:
        raise DistributedError("blur by jax failed")

    monkeypatch.setattr(distributed, "launch", fails)
    assert distributed.run_peer("jax", "blur", "python") is None
    assert "blur by jax failed" in capsys.readouterr().err


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("stencil", "dtype"),
    [
        *((name, "float32") for name in stencil_peers.ARRAYS),
        *((name, "uint8") for name in stencil_peers.ARRAYS if name != "blur"),
    ],
)
def test_stencils_in_array_notation(stencil: str, dtype: str) -> None:
    """Peers compute the same as ours, so that races compare like with like."""
    sizes = stencil_peers.Sizes(30, 20, 1, dtype)
    a = stencil_peers.random_input(stencil, sizes)
    pixels = {} if dtype == "float32" else {"dtype": dtype}
    program = compile_ranks(STENCILS[stencil](30, 20, **pixels), 1)

    def work(world: LocalWorld) -> np.ndarray:
        local = program.on(world)
        local.input("A").owned[...] = a
        if stencil == "convolution":
            local.input("W").owned[...] = stencil_peers.WEIGHTS
        local()
        return local.output.owned

    (found,) = threads_of_ranks(1, work)
    expected = stencil_peers.applied(stencil, np, a)
    assert found.dtype == expected.dtype == dtype
    error = np.abs(found.astype(np.float64) - expected)
    # A level that is rounded may lie on either side of a half.
    assert error.max() <= (1 if dtype == "uint8" else 1e-5 * np.abs(expected).max())
    stencil_peers.check(stencil, sizes, a, 0, found)
    found[-1, -1] = np.where(found[-1, -1] > 3, 0, 9)
    with pytest.raises(AssertionError):
        stencil_peers.check(stencil, sizes, a, 0, found)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("stencil", stencil_peers.HEAT)
def test_heat_in_array_notation(stencil: str) -> None:
    sizes = stencil_peers.Sizes(30, 20, 3)
    a = stencil_peers.random_input(stencil, sizes)
    program = compile_ranks(STENCILS[stencil](30, 20), 1, repeat="A")

    def work(world: LocalWorld) -> np.ndarray:
        local = program.on(world)
        local.input("A").owned[...] = a
        local(steps=3)
        return local.output.owned

    (found,) = threads_of_ranks(1, work)
    stencil_peers.check(stencil, sizes, a, 0, found)
    found[-2, -2] += 1
    with pytest.raises(AssertionError):
        stencil_peers.check(stencil, sizes, a, 0, found)


@needs_mpi
@pytest.mark.slow
def test_exchanges(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "exchanges.json"
    only = ["64 pieces of 448 B", "2 rows of 16 KB"]
    assert exchanges.main(["--rounds", "1", "--output", str(path), "--only", *only]) == 0
    result = json.loads(path.read_text())["results"][only[0]]
    assert result["bytes"] == 64 * 448
    assert all(result[key][0] > 0 for key in ("ours_us", "bare_us", "hand_us", "typed_us"))
    assert "ours to bare: " in capsys.readouterr().out


@needs_mpi
@pytest.mark.slow
def test_distributed_networks(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "networks.json"
    arguments = ["--rounds", "1", "--repeat", "1", "--output", str(path), "--only", "small"]
    assert distributed_networks.main(arguments) == 0
    result = json.loads(path.read_text())["results"]["small"]
    assert list(result["jobs"]) == list(distributed_networks.JOBS) and result["messages"] > 0
    assert result["predicted_ms"] > 0
    assert "to 2 threads" in capsys.readouterr().out


@pytest.mark.quick_cases(14)
@pytest.mark.parametrize("case", reductions_cpu.CASES, ids=lambda case: case.name)
def test_reductions_are_one_kernel_of_their_rule(case: reductions_cpu.Case) -> None:
    mod = pipeline.optimize(reductions_cpu.relax_module(case, True), targets.resolve("native", 2))
    (kernel,) = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    assert kernel.attrs["tirx.is_scheduled"]
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(kernel.body, (s_tir.SBlock, blocks.append))
    assert "task" in [block.name_hint for block in blocks]


@pytest.mark.slow
def test_reductions_prints_its_table_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = reductions_cpu.Case("tiny", (64, 70), "float16", "mean", (1,), "cast")
    monkeypatch.setattr(reductions_cpu, "CASES", [small])
    path = tmp_path / "reductions.json"
    arguments = ["--threads", "1", "--quick", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["reductions_cpu.py", *arguments])
    assert reductions_cpu.main() == 0
    stored = json.loads(path.read_text())
    engines = stored["results"]["tiny"]["engines"]
    assert [engine["title"] for engine in engines] == ["tvm-fusion", "numpy", "stock TVM"]
    assert all(engine["relative_error"] < 1e-5 for engine in engines)
    assert stored["settings"]["threads"] == 1 and engines[0]["rounds"] == 2
    out = capsys.readouterr().out
    assert "│ tiny" in out and f"{engines[1]['ratio']:.2f}x" in out
