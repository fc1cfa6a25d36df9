# SPDX-License-Identifier: Apache-2.0
"""TVM's own tuner on our templates, and records in its format."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType

import onnx
import pytest
import tvm
from small_onnx import dense_model, depthwise_model, reductions_model
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace

from schedules import attributes
from schedules.tuning.records import Record
from schedules.tuning.tunable import decisions_of
from tvm_fusion.cli import command_line as cli
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import RecordWarning
from tvm_fusion.tuning.database import Database
from tvm_fusion.tuning.meta_schedule import (
    _OtherValue,
    _rule_of,
    close,
    knob_features,
    nest_builder,
    search_space,
)
from tvm_fusion.tuning.meta_schedule_records import (
    MEASUREMENTS,
    export_records,
    import_records,
)
from tvm_fusion.tuning.tasks import Task, extract_tasks

TARGET = resolve("native", cores=2)
OPTIONS = pipeline.Options("none", winograd="never")


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return extract_tasks(dense_model(size=10, channels=32), TARGET, None, OPTIONS)


@pytest.fixture
def _intrinsics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import what the tuner needs; TVM's parser would search all modules for each function."""
    with monkeypatch.context() as patched:
        patched.setattr(inspect, "getmodule", lambda *_: None)
        importlib.import_module("tvm.s_tir.tensor_intrin")


def tasks_by_template() -> dict[str, Task]:
    """A task of each family of templates."""
    dense, plain = dense_model(size=10, channels=32), pipeline.Options("none", winograd="never")
    cases = [
        (dense, plain),
        (dense, pipeline.Options("none", winograd="always")),
        (depthwise_model(), pipeline.Options("all")),
        (matmul_model(), pipeline.Options()),
        (reductions_model(), pipeline.Options()),
    ]
    found: dict[str, Task] = {}
    for model, options in cases:
        for task in extract_tasks(model, TARGET, None, options):
            for template in task.templates:
                found.setdefault(template.name, task)
    return found


def matmul_model() -> onnx.ModelProto:
    """A product of two inputs."""
    infos = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", [24, 96]), ("z", [96, 80]), ("y", [24, 80]))
    ]
    node = onnx.helper.make_node("MatMul", ["x", "z"], ["y"])
    graph = onnx.helper.make_graph([node], "product", infos[:2], infos[2:])
    opsets = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.slow
@pytest.mark.usefixtures("_intrinsics")
def test_the_stock_tuner_searches_our_templates(tmp_path: Path) -> None:
    found = tasks_by_template()
    families = {"cpu.conv2d", "cpu.winograd_conv2d", "cpu.fused_conv2d", "cpu.planar_conv2d"}
    families |= {"cpu.dense", "cpu.pooling", "cpu.row_chain"}
    assert families <= found.keys() and any(name.startswith("cpu.reduce_") for name in found)
    for task in {task.key: task for task in found.values()}.values():
        check_stock_tuner(task, tmp_path / task.name)


def check_stock_tuner(task: Task, folder: Path) -> None:
    """MetaSchedule measures settings of a task, which come back as a record."""
    database = ms.tune_tir(
        tvm.IRModule({"main": task.func}),
        TARGET,
        str(folder / "theirs"),
        2,
        num_trials_per_iter=2,
        builder=nest_builder(),
        space=search_space(TARGET),
        strategy="replay-func",
        num_tuning_cores=1,
        seed=3,
    )
    records = database.get_all_tuning_records()
    assert len(records) == 2, task.about
    for record in records:
        assert float(record.run_secs[0]) < 1  # MetaSchedule writes 1e10 for a failure
        opened = record.as_measure_candidate().sch.mod
        assert not decisions_of(close(opened, TARGET)["main"])
    taken, refused = import_records(folder / "ours", [folder / "theirs"])
    assert (taken, refused) == (1, 0)
    (record,) = Database(folder / "ours").records().values()
    assert record.key == task.key
    assert record.best_seconds == min(float(one.run_secs[0]) for one in records)


def decided(trace: Trace) -> list[int]:
    sampled = [inst for inst in trace.insts if inst.kind.name == "SampleCategorical"]
    return [int(trace.get_decision(inst)) for inst in sampled]


def test_a_mutation_changes_one_knob_and_features_are_the_knobs(
    tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    (space,) = _rule_of(tasks[0].func, TARGET)[0].open(
        s_tir.Schedule(tvm.IRModule({"main": tasks[0].func})), TARGET
    )
    mutator, seen = _OtherValue(), set()
    before = decided(space.trace)
    for _ in range(8):
        mutated = mutator.apply(space.trace)
        mutated.apply_to_schedule(s_tir.Schedule(tvm.IRModule({"main": tasks[0].func})), False)
        pairs = zip(before, decided(mutated), strict=True)
        seen.add(sum(one != other for one, other in pairs))
    assert seen <= {0, 1} and 1 in seen
    # A context imports all intrinsics of TVM, which takes a minute; none is needed here.
    name = "tvm.s_tir.tensor_intrin"
    monkeypatch.setitem(sys.modules, name, sys.modules.get(name, ModuleType(name)))
    candidate = ms.MeasureCandidate(space, [])
    (row,) = knob_features().extract_from(ms.TuneContext(), [candidate])
    knobs = {
        k: v for k, v in decisions_of(space.mod["main"]).items() if k.startswith(attributes.KNOB)
    }
    own = [value for value in row.numpy()[0].tolist() if value != -1]
    assert own == [
        float(knobs[attributes.KNOB + name]) for name in tasks[0].templates[0].knob_kinds()
    ]


def winner(task: Task, number: int, seconds: tuple[float, float]) -> Record:
    template, knobs = task.settings[number]
    return Record.of_key(task.key, template, knobs, seconds, trials=8)


@pytest.fixture
def exported(tasks: list[Task], tmp_path: Path) -> Path:
    """A database of MetaSchedule with a winner and a default that stays."""
    store = Database(tmp_path / "db")
    store.add_record(winner(tasks[0], 7, (3e-5, 2e-5)))
    store.add_record(winner(tasks[1], 0, (4e-5, 4e-5)))
    assert export_records(tmp_path / "db", tmp_path / "ms", tasks, TARGET) == 2
    return tmp_path / "ms"


def test_the_stock_database_reads_our_winners(exported: Path, tasks: list[Task]) -> None:
    database = ms.database.JSONDatabase(work_dir=str(exported))
    assert len(database) == 3
    for task, number in zip(tasks, (7, 0), strict=True):
        sch = database.query_schedule(tvm.IRModule({"main": task.func}), TARGET, "main")
        template, knobs = task.settings[number]
        wanted = template.write(task.func, task.workload, knobs, TARGET).mod["main"]
        closed = close(sch.mod, TARGET)["main"]
        tvm.ir.assert_structural_equal(closed.body, wanted.body, map_free_vars=True)


def test_our_winners_come_back(exported: Path, tasks: list[Task], tmp_path: Path) -> None:
    assert import_records(tmp_path / "new", [exported]) == (2, 0)
    found = Database(tmp_path / "new").records()
    for task, number, seconds in zip(tasks, (7, 0), ((3e-5, 2e-5), (4e-5, 4e-5)), strict=True):
        wanted = winner(task, number, seconds)
        record = found[task.key]
        assert (record.template, record.knobs) == (wanted.template, wanted.knobs)
        assert (record.default_seconds, record.best_seconds) == pytest.approx(seconds)


def changed(line: str, old: str, new: str) -> str:
    assert old in line
    return line.replace(old, new, 1)


def test_lines_of_strangers_are_data(exported: Path, tmp_path: Path) -> None:
    lines = (exported / MEASUREMENTS).read_text().splitlines()
    good = lines[-1]
    bad = [
        "",
        "null",
        "[" * 9999,
        "[0, [[[], []], [1.0], {}, []]]",
        "x" * 99999,
        good[:-5],
        changed(good, '"cpu.conv2d', '"cpu.other'),
        changed(good, '["b0",1],["tvm_fusion.version"', '["b0",99],["tvm_fusion.version"'),
        changed(good, '"kind":"llvm"', '"kind":"cuda"'),
        changed(good, '"num-cores":2', '"num-cores":-2'),
        changed(good, '"height\\": 10', '"height\\": 99999999'),
        changed(good, "[[[[", "[[[[0,"),
        changed(good, "]],[", "]],[-1e-5],["),
        changed(good, '["tvm_fusion.knob.pixels"]', '["tvm_fusion.knob.other"]'),
    ]
    file = tmp_path / "strange.json"
    file.write_text("\n".join([*bad, good]) + "\n")
    with pytest.warns(RecordWarning, match=r"line 1: .*; and \d+ more"):
        taken, refused = import_records(tmp_path / "new", [file])
    assert (taken, refused) == (1, len(bad))


def test_knobs_out_of_the_space_are_refused(exported: Path, tmp_path: Path) -> None:
    lines = (exported / MEASUREMENTS).read_text().splitlines()
    entry = json.loads(lines[0])
    for instruction in entry[1][0][0]:
        if instruction[0] == "SampleCategorical":
            instruction[2][0] = [999 for _ in instruction[2][0]]
    file = tmp_path / "strange.json"
    file.write_text(json.dumps(entry) + "\n")
    with pytest.warns(RecordWarning, match="not in the space"):
        assert import_records(tmp_path / "new", [file]) == (0, 1)


def test_the_commands(exported: Path, tmp_path: Path, capsys) -> None:
    onnx.save(dense_model(size=10, channels=32), tmp_path / "model.onnx")
    options = ["--threads", "2", "--fuse", "none", "--winograd", "never"]
    form = ["--format", "meta-schedule"]
    source, folder = str(tmp_path / "db"), str(tmp_path / "out")
    assert cli.main(["records", "export", source, folder, *form]) == 2
    assert "--format meta-schedule and --model need each other" in capsys.readouterr().err
    command = ["records", "export", source, folder, *form, "--model", str(tmp_path / "model.onnx")]
    assert cli.main([*command, *options]) == 0
    assert "2 records of 2 tasks" in capsys.readouterr().out
    assert cli.main(["records", "import", str(tmp_path / "more"), folder, *form]) == 0
    assert "2 records taken, 0 refused" in capsys.readouterr().out
    assert cli.main(["records", "export", source, folder]) == 2
    assert "is a folder; expected a file" in capsys.readouterr().err
    assert cli.main(["records", "import", source, str(tmp_path), *form]) == 1
    assert "cannot read" in capsys.readouterr().err
