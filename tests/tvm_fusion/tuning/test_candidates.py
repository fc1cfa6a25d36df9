# SPDX-License-Identifier: Apache-2.0
"""Candidates that are compiled here, race elsewhere, and become records here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gpu_fakes import fake_driver
from onnx import TensorProto, helper, numpy_helper

from schedules.tuning.records import Key, Record
from tvm_fusion.cli import command_line as cli
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.record_reader import choose_records, used_records
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import TargetError, TuningError
from tvm_fusion.onnx.frontend import import_onnx
from tvm_fusion.runtime.tvm_runtime import DeviceInfo
from tvm_fusion.tuning import candidates
from tvm_fusion.tuning.database import Database
from tvm_fusion.tuning.export import export_candidates
from tvm_fusion.tuning.measure import library
from tvm_fusion.tuning.record_files import import_measured, verify

SM_90 = "cuda -arch=sm_90"
H100 = DeviceInfo("cuda", "NVIDIA H100", "sm_90", 1024, 49152, 132)
TRIALS = 3


def sums() -> onnx.ModelProto:
    """One long sum of rows."""
    info = helper.make_tensor_value_info
    nodes = [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)]
    axes = onnx.numpy_helper.from_array(np.array([1]), "axes")
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", TensorProto.FLOAT, [3, 5000])],
        [info("y", TensorProto.FLOAT, [3])],
        [axes],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "new"
    [(_, count)] = export_candidates(sums(), folder, SM_90, trials=TRIALS)
    assert count == TRIALS
    return folder


@pytest.mark.slow
def test_an_export_describes_itself(exported: Path) -> None:
    read = json.loads((exported / candidates.TASKS).read_text())
    [task] = read["tasks"]
    assert read["kind"] == "cuda" and task["outputs"] == 1
    shapes = [(shape, dtype) for shape, dtype, _ in task["tensors"]]
    assert shapes == [([3, 5000], "float32"), ([3], "float32")]
    assert task["tensors"][0][2] == pytest.approx(1, rel=0.1)
    assert len(task["candidates"]) == 1 + TRIALS
    for one in task["candidates"]:
        assert b"\x7fELF" in (exported / one["program"]["library"]).read_bytes()[64:]
        assert {*one["program"]} == {"library", "calls", "constants", "buffers"}
        assert all((exported / name).exists() for name in one["program"]["constants"])
    candidates.check_device(H100, Key(*task["key"]))
    with pytest.raises(TargetError, match="sm_90 with 132 multiprocessors, and this machine"):
        candidates.check_device(replace(H100, multiprocessors=114), Key(*task["key"]))


@pytest.fixture
def on_host(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same tasks with libraries for this CPU, as if it were the device.

    The second candidate is wrong, the third does not end its process well.
    """
    import tvm
    from tvm.script import tirx as T

    def program(factor: float, repeats: int) -> tvm.IRModule:
        @T.prim_func(private=True)
        def rows(x: T.Buffer((3, 5000), "float32"), y: T.Buffer((3,), "float32")):
            for row in range(3):
                y[row] = T.float32(0)
                for _ in range(repeats):
                    y[row] = T.float32(0)
                    for column in range(5000):
                        y[row] = y[row] + T.float32(factor) * x[row, column]

        return tvm.IRModule({"main": rows.with_attr("global_symbol", "main")})

    read = json.loads((exported / candidates.TASKS).read_text())
    [task] = read["tasks"]
    own = resolve("native", 1)
    for number, (factor, repeats) in enumerate([(1.0, 40), (1.5, 1), (1.0, 1), (1.0, 60)]):
        name = f"own-{number}.so"
        library(program(factor, repeats), own, tmp_path / name)
        about = {"library": name, "calls": [["main", [0, 1]]], "constants": [], "buffers": []}
        task["candidates"][number]["program"] = about
    task["reference"] = {**about, "library": "own-2.so"}
    task["candidates"].append({**task["candidates"][1], "program": None, "reason": "no registers"})
    read["kind"] = "cpu"
    (tmp_path / candidates.TASKS).write_text(json.dumps(read))
    monkeypatch.setattr(candidates, "find_device", lambda kind: H100)
    for name in ("BATCH_SECONDS", "FINAL_SECONDS"):
        monkeypatch.setattr(candidates, name, 0.0)
    return tmp_path


@pytest.mark.slow
def test_what_races_there_becomes_records_here(on_host: Path, tmp_path: Path, capsys: Any) -> None:
    [task] = json.loads((on_host / candidates.TASKS).read_text())["tasks"]
    file, database = tmp_path / "measured.jsonl", tmp_path / "database"
    assert candidates.main([str(on_host), str(file), "600"]) == 0
    assert "4 candidates raced" in capsys.readouterr().out
    *trials, record = [json.loads(line) for line in file.read_text().splitlines()]
    assert [trial.get("failure") for trial in trials] == ["wrong", None, None, "compile"]
    assert trials[1]["ratio"] < 0.5 < 1 < trials[2]["ratio"]
    assert record["knobs"] == task["candidates"][2]["knobs"] and record["machine"] == "NVIDIA H100"
    assert record["best_seconds"] < record["default_seconds"]
    assert cli.main(["tune", "--import", str(file), "--database", str(database)]) == 0
    told = capsys.readouterr().out
    assert "1 records and 4 trials taken, 0 lines refused" in told
    assert verify(database / "records.jsonl") == (1, [])
    store = Database(database)
    [(key, kept)] = store.records().items()
    assert key == Key(*task["key"]) and isinstance(kept, Record) and kept.gain > 1.01
    assert len(store.trials(key)) == 4


@pytest.mark.slow
def test_a_wrong_default_is_told(on_host: Path, tmp_path: Path, capsys: Any) -> None:
    read = json.loads((on_host / candidates.TASKS).read_text())
    read["tasks"][0]["candidates"][0]["program"]["library"] = "own-1.so"
    (on_host / candidates.TASKS).write_text(json.dumps(read))
    assert candidates.main([str(on_host), str(tmp_path / "measured.jsonl")]) == 1
    assert "the default of" in capsys.readouterr().out
    assert not (tmp_path / "measured.jsonl").exists()


def test_another_device_is_refused(exported: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(candidates, "find_device", lambda _: replace(H100, arch="sm_80"))
    assert candidates.main([str(exported), "file"]) == 2
    assert "this machine's GPU is sm_80" in capsys.readouterr().out


def test_strange_lines_are_refused(exported: Path, tmp_path: Path, capsys: Any) -> None:
    [task] = json.loads((exported / candidates.TASKS).read_text())["tasks"]
    good = record_of(task)
    setting = {name: getattr(good, name) for name in ("template", "version", "knobs")}
    lines = [
        good.to_line(),
        replace(good, knobs={**good.knobs, "threads": 7}).to_line(),
        replace(good, version=good.version + 1).to_line(),
        json.dumps({"task": "ab", **setting, "ratio": 0.5}),
        json.dumps({"task": "ab", **setting, "ratio": -0.5}),
        json.dumps({"task": "ab", **setting, "ratio": 0.5, "code": "import os"}),
        "[1, 2]",
        "__import__('os')",
    ]
    file, database = tmp_path / "measured.jsonl", tmp_path / "database"
    file.write_text("\n".join(lines))
    assert import_measured(database, file) == (1, 1, 6)
    assert cli.main(["tune", "--import", str(file), "--database", str(database)]) == 1
    assert "6 lines refused" in capsys.readouterr().out


def test_what_an_export_needs(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="exported for GPUs, and the target is 'llvm'"):
        export_candidates(sums(), tmp_path / "new", "native")
    with pytest.raises(TuningError, match="exists already, and is no empty folder"):
        export_candidates(sums(), exported, SM_90)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m.onnx", "--import", "f"], "needs --database, and neither MODEL nor --export"),
        (["m.onnx", "--export", "e", "--database", "d"], "--export measures nothing"),
        (["m.onnx"], "Missing option '--database'"),
        (["--database", "d"], "Missing argument 'MODEL'"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(sums(), "m.onnx")
    Path("f").touch()
    assert cli.main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_exports(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(sums(), "m.onnx")
    given = ["--export", "e", "--target", SM_90, "--trials", "1"]
    assert cli.main(["tune", "m.onnx", *given]) == 0
    assert capsys.readouterr().out.strip().endswith(": 1 candidates")
    assert (tmp_path / "e" / candidates.TASKS).exists()


def layers(dtype: str, nodes: list, shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    """Nodes that read the inputs ``x`` and ``m``, weights ``w...`` and each other."""
    rng = np.random.default_rng(3)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weights = [
        numpy_helper.from_array((rng.standard_normal(shape) / 9).astype(dtype), name)
        for name, shape in shapes.items()
        if name.startswith("w")
    ]
    inputs = [helper.make_tensor_value_info(name, kind, shapes[name]) for name in "xm"]
    names = [node.output[0] for node in nodes if node.output[0].startswith("y")]
    outputs = [helper.make_tensor_value_info(name, kind, None) for name in names]
    graph = helper.make_graph(nodes, "layers", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def conv(data: str, weight: str, result: str, pads: int = 1, group: int = 1) -> onnx.NodeProto:
    return helper.make_node("Conv", [data, weight], [result], pads=[pads] * 4, group=group)


FLOAT32 = layers(
    "float32",
    [
        conv("x", "w1", "y1"),
        conv("x", "w2", "y2", group=32),
        conv("x", "w3", "c", group=32),
        helper.make_node("Relu", ["c"], ["r"]),
        conv("r", "w4", "y3", pads=0),
        helper.make_node("MatMul", ["m", "w5"], ["y4"]),
    ],
    {"x": (2, 32, 14, 14), "m": (64, 48), "w1": (40, 32, 3, 3), "w2": (32, 1, 3, 3)}
    | {"w3": (32, 1, 3, 3), "w4": (64, 32, 1, 1), "w5": (48, 80)},
)
FLOAT16 = layers(
    "float16",
    [conv("x", "w1", "y1"), helper.make_node("MatMul", ["m", "w2"], ["y2"])],
    {"x": (8, 64, 28, 28), "m": (1024, 512), "w1": (128, 64, 3, 3), "w2": (512, 1024)},
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "target", "templates"),
    [
        (
            FLOAT32,
            SM_90,
            {"gpu.conv2d", "gpu.depthwise_conv2d", "gpu.fused_conv2d", "gpu.matmul_tiles"},
        ),
        (FLOAT16, f"{SM_90}a", {"gpu.conv2d_warpgroups", "gpu.matmul_warpgroups"}),
    ],
    ids=["float32", "float16"],
)
def test_convolutions_and_products_travel(
    model: onnx.ModelProto, target: str, templates: set[str], tmp_path: Path, capsys: Any
) -> None:
    """Each candidate is launched on a driver that computes nothing; records of any come back."""
    folder, report, file = tmp_path / "exported", tmp_path / "launches", tmp_path / "file"
    options = pipeline.Options(fuse="all")
    counts = export_candidates(model, folder, target, trials=TRIALS, fuse=options.fuse)
    assert [count for _, count in counts] == [TRIALS] * len(templates)
    command = [sys.executable, "-m", "tvm_fusion.tuning.candidates", str(folder), str(file)]
    fake = fake_driver(tmp_path, report)
    done = subprocess.run(command, env=fake, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == len(templates)
    assert all(line.endswith("failed (wrong): relative error nan") for line in told), done.stdout
    tasks = json.loads((folder / candidates.TASKS).read_text())["tasks"]
    tried = [one["knobs"] for task in tasks for one in task["candidates"]]
    launches = sum(1 + (knobs.get("splits", 1) > 1) for knobs in tried)
    assert len(report.read_text().splitlines()) == launches
    file.write_text("\n".join(record_of(task).to_line() for task in tasks))
    database = tmp_path / "database"
    assert cli.main(["tune", "--import", str(file), "--database", str(database)]) == 0
    assert f"{len(templates)} records and 0 trials taken, 0 lines" in capsys.readouterr().out
    resolved = resolve(target)
    options = replace(options, records=choose_records(database, resolved))
    mod = pipeline.optimize(import_onnx(model, None).mod, resolved, options)
    assert {one["template"] for one in used_records(mod)} == templates


def record_of(task: dict) -> Record:
    """The record that the last candidate of a task wins."""
    key = Key(*task["key"])
    setting = {name: task["candidates"][-1][name] for name in ("template", "version", "knobs")}
    return Record(
        **setting,
        workload=json.loads(key.workload),
        cpu=key.cpu,
        vector_bits=key.vector_bits,
        threads=key.threads,
        default_seconds=2.0,
        best_seconds=1.0,
        trials=TRIALS,
    )
