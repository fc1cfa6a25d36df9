# SPDX-License-Identifier: Apache-2.0
"""Forms raced by a tuning job: their programs, their records, and models compiled by these."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
import tvm_ffi
from onnx_reference import run_onnx
from small_onnx import dense_model, depthwise_model
from tvm import tirx

import tvm_fusion
from schedules.cpu.conv2d.forms import FORMS, Form
from schedules.tuning.records import Record, Records
from tvm_fusion.cli import command_line as cli
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import RecordWarning
from tvm_fusion.tuning import job
from tvm_fusion.tuning.contest import Outcome
from tvm_fusion.tuning.database import append_line
from tvm_fusion.tuning.forms import FormTask, find_forms, form_record
from tvm_fusion.tuning.measure import Session
from tvm_fusion.tuning.record_files import fault
from tvm_fusion.tuning.tasks import import_model

TARGET = resolve("native", cores=2)
SIZE, CHANNELS = 32, 32
PLANES = Form(fused=True, planes=True)


def dense() -> onnx.ModelProto:
    return dense_model(size=20, channels=CHANNELS)


MODELS = {"depthwise": depthwise_model, "dense": dense}


def tasks_of(model: onnx.ModelProto) -> list[FormTask]:
    return find_forms(import_model(model), TARGET, pipeline.Options())


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_model_has_forms_of_layers_and_pairs() -> None:
    layer, pair = tasks_of(dense())
    titles = {layer.title(number) for number in range(len(layer.forms))}
    assert titles == {"direct", "Winograd 2x2", "Winograd 4x4"}
    assert pair.workload.residual and pair.workload.plain_data and len(pair.forms) == 4
    (pair,) = tasks_of(depthwise_model())
    assert set(pair.forms) == {Form(), Form(fused=True), PLANES}
    without = find_forms(import_model(dense()), TARGET, pipeline.Options("none", winograd="never"))
    assert without == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_all_forms_compute_the_same(name: str) -> None:
    """The race itself compares each form's numbers with those of unscheduled separate layers."""
    for task in tasks_of(MODELS[name]()):
        with Session(task, TARGET, seed=0) as session:
            outcomes, seconds = session.race(range(len(task.forms)), (3, 3), 0.0)
        assert seconds > 0
        assert all(outcome.ratio for outcome in outcomes.values()), outcomes


def optimized(model: onnx.ModelProto, *records: Record) -> tvm.IRModule:
    found = Records(("a.jsonl", record) for record in records)
    return pipeline.optimize(import_model(model), TARGET, pipeline.Options(records=found))


def kernels(mod: tvm.IRModule) -> list[dict]:
    """Workloads of the convolutions of a module."""
    texts = [(func.attrs or {}).get("tvm_fusion.workload") for func in mod.functions.values()]
    return [json.loads(str(text)) for text in texts if text is not None]


@pytest.mark.slow
def test_a_record_forces_each_form_of_a_pair() -> None:
    (task,) = tasks_of(depthwise_model())
    hashes = set()
    for form in task.forms:
        mod = optimized(depthwise_model(), form_record(task.workload, form, task.machine))
        assert len(kernels(mod)) == (1 if form.fused else 2)
        nests = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
        hashes.add(sum(tvm_ffi.structural_hash(nest) for nest in nests))
    assert len(hashes) == len(task.forms) == 3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("tile", [0, 2, 4])
def test_a_record_forces_each_form_of_a_layer(tile: int, tmp_path: Path) -> None:
    layer, pair = tasks_of(dense())
    for task, form in ((layer, Form(tile1=tile)), (pair, Form(tile1=tile))):
        line = form_record(task.workload, form, task.machine).to_line()
        append_line(tmp_path / "a.jsonl", line)
    compiled = tvm_fusion.compile(dense(), threads=2, records=tmp_path)
    assert [entry["fused"] for entry in compiled.fused] == [False]
    named = [one["knobs"] for one in compiled.records if one["template"] == FORMS.name]
    assert named == [asdict(Form(tile1=tile))] * 2
    x = np.random.default_rng().standard_normal((1, CHANNELS, 20, 20), dtype="float32")
    (wanted,) = run_onnx(dense(), {"x": x})
    np.testing.assert_allclose(compiled(x), wanted, rtol=1e-4, atol=1e-4)
    if not tile:
        return
    report = tvm_fusion.explain(dense(), TARGET, records=tmp_path)
    assert report["pairs"][0]["reason"].startswith("by record")
    sources = {one["decision"]: one["source"] for one in report["decisions"]}
    assert sources == {"fuse": "a.jsonl", "winograd": "a.jsonl"}


@pytest.mark.slow
def test_foreign_records_change_nothing() -> None:
    (task,) = tasks_of(depthwise_model())
    before = optimized(depthwise_model())
    other = next(form for form in task.forms[1:] if form.fused != task.forms[0].fused)
    good = form_record(task.workload, other, task.machine)
    for fields in ({"threads": 7}, {"cpu": "cortex-a72"}, {"vector_bits": 128}):
        foreign = Record(**{**vars(good), **fields})
        tvm.ir.assert_structural_equal(optimized(depthwise_model(), foreign), before)
    assert not tvm_ffi.structural_equal(optimized(depthwise_model(), good), before)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "times", ['{"fused": NaN}', '{"fused": -1.0}', '{"fused": 0}', "[]", '{"fused": "1"}', "null"]
)
def test_damaged_times_are_no_record(tmp_path: Path, times: str) -> None:
    (task,) = tasks_of(depthwise_model())
    record = form_record(task.workload, Form(), task.machine, times={"fused": 1e-5})
    bad = record.to_line().replace('{"fused": 1e-05}', times)
    path = tmp_path / "a.jsonl"
    path.write_text(f"{bad}\n{bad}\n")
    with pytest.warns(RecordWarning, match="line 1: .*line 2: ") as told:
        compiled = tvm_fusion.explain(depthwise_model(), TARGET, records=path)
    assert len(told) == 1
    assert not compiled["pairs"][0]["reason"].startswith("by record")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("cpu", "features", "reason"),
    [
        ("emeraldrapids", "-avx512f", ""),  # Virtual machines show it so.
        ("generic", "+avx2,+fma", ""),  # which LLVM does not know
        ("znver3", "+avx512f", "znver3 has vectors of 256 bits"),
    ],
)
def test_records_count_with_the_vectors_of_their_machine(
    cpu: str, features: str, reason: str
) -> None:
    options = f"-mtriple=x86_64-linux-gnu -mcpu={cpu} -mattr={features} -num-cores=2"
    (task,) = find_forms(
        import_model(depthwise_model()), resolve(f"llvm {options}"), pipeline.Options()
    )
    for form in task.forms:
        assert fault(form_record(task.workload, form, task.machine)) == reason


class Believed:
    """A session that measures what it is told: seconds of each form, nothing for knobs."""

    seconds: dict[str, float] = {}

    def __init__(self, task, target, seed, host) -> None:
        self.task, self.host = task, host

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def build(self, numbers) -> None:
        pass

    def end_worker(self) -> None:
        pass

    def race(self, numbers, rounds, seconds):
        times = [1.0] * 9999
        if isinstance(self.task, FormTask):
            titles = [self.task.title(number) for number in range(len(self.task.forms))]
            times = [self.seconds.get(title, 9.0) for title in titles]
        return {number: Outcome(times[number] / times[0]) for number in {0, *numbers}}, times[0]


@pytest.fixture
def _believed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(job, "Session", Believed)
    monkeypatch.setattr(Believed, "seconds", {})
    yield


@pytest.mark.slow
@pytest.mark.usefixtures("_believed")
@pytest.mark.parametrize("winner", ["fused on planes", "apart: direct, direct"])
def test_the_fastest_form_is_recorded(tmp_path: Path, monkeypatch, winner: str) -> None:
    times = {"fused": 3.0, "fused on planes": 3.1, "apart: direct, direct": 3.2} | {winner: 2.0}
    monkeypatch.setattr(Believed, "seconds", times)
    path, folder = tmp_path / "model.onnx", tmp_path / "db"
    onnx.save(depthwise_model(), path)

    def job_lines(name: str) -> list[dict]:
        options = ["--trials", "2", "--threads", "2", "--database", str(tmp_path / name)]
        assert cli.main(["tune", str(path), *options]) == 0
        found = lines(tmp_path / name / "records.jsonl")
        return [{**line, "date": ""} for line in found]

    found = job_lines("db")
    (record,) = [line for line in found if line["template"] == FORMS.name]
    assert Form(**record["knobs"]).title(2) == winner
    assert record["times"] == pytest.approx(times)
    assert record["best_seconds"] == pytest.approx(2.0)
    report = tvm_fusion.explain(depthwise_model(), TARGET, records=folder)
    assert report["pairs"][0]["fused"] is winner.startswith("fused")
    assert report["pairs"][0]["reason"].startswith(f"by record: {winner} 2000000.0 us, ")
    if winner == "fused on planes":
        return
    assert job_lines("again") == found
    out, other = tmp_path / "out.jsonl", tmp_path / "other"
    assert cli.main(["records", "export", str(folder), str(out)]) == 0
    assert cli.main(["records", "import", str(other), str(out)]) == 0
    copied = [line for line in lines(other / "records.jsonl") if line["template"] == FORMS.name]
    assert [{**line, "date": ""} for line in copied] == [record]
    assert cli.main(["records", "verify", str(other)]) == 0
    assert cli.main(["records", "list", str(other)]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("_believed")
def test_forms_race_again_only_after_their_kernels(tmp_path: Path) -> None:
    def states(**options: object) -> dict[str, str]:
        found = tvm_fusion.tune(depthwise_model(), database=tmp_path, threads=2, **options)
        return {task.about: task.status for task in found.tasks}

    first = states(trials=2)
    assert "known" not in first.values() and any(about.startswith("form") for about in first)
    assert set(states(trials=2).values()) == {"known"}
    more = states(trials=3)
    assert more[next(about for about in more if about.startswith("form"))] != "known"
    without = states(trials=2, forms=False)
    assert without and not any(about.startswith("form") for about in without)


@pytest.mark.slow
def test_a_job_races_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "BATCH_SECONDS", 0.02)
    monkeypatch.setattr(job, "FINAL_SECONDS", 0.05)
    result = tvm_fusion.tune(depthwise_model(), database=tmp_path, trials=1, threads=2)
    (pair,) = (task for task in result.tasks if task.template == FORMS.name)
    assert all(task.status in ("tuned", "default stays") for task in result.tasks)
    assert not any(task.failures for task in result.tasks)
    assert len(pair.times) == pair.settings == 3 and min(pair.times.values()) > 0
    compiled = tvm_fusion.compile(depthwise_model(), threads=2, records=tmp_path)
    assert compiled.fused[0]["fused"] is pair.knobs["fused"]
    x = np.random.default_rng().standard_normal((1, CHANNELS, SIZE, SIZE), dtype="float32")
    (wanted,) = run_onnx(depthwise_model(), {"x": x})
    np.testing.assert_allclose(compiled(x), wanted, rtol=1e-4, atol=1e-4)
