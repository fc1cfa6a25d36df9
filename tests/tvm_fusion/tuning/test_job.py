# SPDX-License-Identifier: Apache-2.0
"""Tuning jobs from a model to records, and back into compiled models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from importlib import util
from pathlib import Path

import numpy as np
import onnx
import pytest
from filelock import FileLock, Timeout
from onnx_reference import run_onnx
from small_onnx import dense_model, reductions_model, small_model
from without_torch import WITHOUT_TORCH

import tvm_fusion
from schedules.cpu.conv2d.conv2d import Conv2DTemplate
from tvm_fusion.cli import command_line as cli
from tvm_fusion.cli.commands.tune import seconds_left, tune_table
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import InvalidInputError, TargetError, TuningError
from tvm_fusion.onnx.frontend import import_onnx
from tvm_fusion.tuning import job
from tvm_fusion.tuning.contest import Outcome
from tvm_fusion.tuning.database import Database, append_line, measuring, measuring_lock
from tvm_fusion.tuning.record_files import prune
from tvm_fusion.tuning.search import Search
from tvm_fusion.tuning.tasks import extract_tasks

ROOT = Path(__file__).resolve().parents[3]
TRIALS = 4


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "BATCH_SECONDS", 0.02)
    monkeypatch.setattr(job, "FINAL_SECONDS", 0.05)


def model(size: int = 20) -> onnx.ModelProto:
    return dense_model(size=size, channels=32)


def tune(folder: Path, **options: object) -> tvm_fusion.TuneResult:
    options = {"trials": TRIALS, "threads": 2, "fuse": "none", "winograd": "never"} | options
    return tvm_fusion.tune(model(), database=folder, **options)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_job_records_each_task_and_compile_follows_the_records(tmp_path: Path) -> None:
    told: list[str] = []
    result = tune(tmp_path, progress=lambda state: told.extend(t.status for t in state.tasks))
    assert [task.status for task in result.tasks if task.status in ("tuned", "default stays")]
    assert {"waiting", "searching", "confirming"} <= set(told)
    assert sum(task.share for task in result.tasks) == pytest.approx(1)
    records = lines(tmp_path / "records.jsonl")
    assert len(records) == len(result.tasks) == 2
    for record, task in zip(records, result.tasks, strict=True):
        assert record["knobs"] == json.loads(json.dumps(task.knobs))
        assert record["default_seconds"] >= record["best_seconds"] > 0
        assert record["trials"] == task.trials == TRIALS
    compiled = tvm_fusion.compile(
        model(), threads=2, fuse="none", winograd="never", records=tmp_path
    )
    assert [entry["template"] for entry in compiled.records] == ["cpu.conv2d"] * 2
    x = np.random.default_rng().standard_normal((1, 32, 20, 20), dtype="float32")
    (wanted,) = run_onnx(model(), {"x": x})
    np.testing.assert_allclose(compiled(x), wanted, rtol=1e-4, atol=1e-4)
    compiled.save(tmp_path / "model.so")
    assert tvm_fusion.load(tmp_path / "model.so", threads=2).records == compiled.records
    report = tvm_fusion.explain(
        model(), resolve("native", 2), fuse="none", winograd="never", records=tmp_path
    )
    named = [use["record"]["source"] for use in report["functions"] if use["record"]]
    assert named == ["records.jsonl"] * 2


@pytest.mark.slow
def test_records_of_other_options_and_a_job_that_goes_on(tmp_path: Path) -> None:
    tune(tmp_path)
    other = tvm_fusion.compile(model(), threads=1, fuse="none", records=tmp_path)
    assert other.records == []
    none = tvm_fusion.compile(model(), threads=2, fuse="none", winograd="never", records="none")
    assert none.records == []
    tune(tmp_path, trials=TRIALS + 2)  # goes on where the first job ended
    trials = lines(tmp_path / "trials.jsonl")
    assert len(trials) == 2 * (TRIALS + 2)
    assert len({(trial["task"], json.dumps(trial["knobs"])) for trial in trials}) == len(trials)


@pytest.mark.slow
def test_kernels_of_ranks_are_tasks_whose_records_compile_follows(tmp_path: Path) -> None:
    result = tune(tmp_path, ranks=2, threads=1)
    # Windows need a row of the other rank, pixels do not.
    sizes = sorted(task.about.split()[-1] for task in result.tasks)
    assert sizes == ["10x20", "11x20", "11x20"]
    options = {"ranks": 2, "threads": 1, "fuse": "none", "winograd": "never"}
    parts = tvm_fusion.compile(model(), records=tmp_path, **options)
    assert [entry["template"] for entry in parts.records] == ["cpu.conv2d"] * sum(
        task.calls for task in result.tasks
    )


@pytest.mark.slow
def test_reductions_are_tasks_whose_records_compile_follows(tmp_path: Path) -> None:
    given = reductions_model()
    result = tvm_fusion.tune(given, database=tmp_path, trials=2, threads=2)
    templates = {record["template"] for record in lines(tmp_path / "records.jsonl")}
    assert {"cpu.pooling", "cpu.row_chain"} <= templates
    assert any(name.startswith("cpu.reduce_") for name in templates)
    assert not [failure for task in result.tasks for failure in task.failures]
    compiled = tvm_fusion.compile(given, threads=2, records=tmp_path)
    assert {entry["template"] for entry in compiled.records} == templates
    x = np.random.default_rng().standard_normal((1, 16, 28, 28), dtype="float32")
    for found, wanted in zip(compiled(x), run_onnx(given, {"x": x}), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_ctrl_c_keeps_all_and_the_next_job_repeats_nothing(tmp_path: Path) -> None:
    def stop(state: tvm_fusion.TuneResult) -> None:
        if state.tasks[0].trials:
            raise KeyboardInterrupt

    # The last report, of the stopped job, must not be interrupted again.
    calls = iter([stop, stop, *[lambda _: None] * 99])
    stopped = tune(tmp_path, progress=lambda state: next(calls)(state))
    assert stopped.interrupted
    assert stopped.tasks[0].status == "stopped"
    before = lines(tmp_path / "trials.jsonl")
    assert len(before) == TRIALS
    assert not (tmp_path / "records.jsonl").exists()
    done = tune(tmp_path)
    assert not done.interrupted
    trials = lines(tmp_path / "trials.jsonl")
    assert trials[:TRIALS] == before
    seen = Counter((trial["task"], json.dumps(trial["knobs"])) for trial in trials)
    assert max(seen.values()) == 1 and len(trials) == 2 * TRIALS
    again = tune(tmp_path)
    assert [task.status for task in again.tasks] == ["known", "known"]
    assert lines(tmp_path / "trials.jsonl") == trials
    assert len(lines(tmp_path / "records.jsonl")) == 2


@pytest.mark.slow
def test_failed_settings_are_counted_and_shown(tmp_path: Path, monkeypatch) -> None:
    write, broken = Conv2DTemplate.write, []

    def fail_sometimes(self, func, workload, knobs, target):
        default = self.default(workload, job_machine())
        if knobs != default and (not broken or knobs in broken):
            broken.append(knobs)
            raise ValueError("no such nest")
        return write(self, func, workload, knobs, target)

    monkeypatch.setattr(Conv2DTemplate, "write", fail_sometimes)
    result = tune(tmp_path)
    failures = [failure for task in result.tasks for failure in task.failures]
    assert failures and failures[0]["failure"] == "compile"
    assert failures[0]["knobs"] == asdict(broken[0])
    table = str(job.TuneResult.to_json(result))
    assert "no such nest" in table


def job_machine():
    from schedules.cpu.core.machine import CPUInfo

    return CPUInfo.from_target(resolve("native", 2))


@pytest.mark.slow
def test_a_batch_that_fails_whole_ends_the_job(tmp_path: Path, monkeypatch) -> None:
    write = Conv2DTemplate.write

    def fail(self, func, workload, knobs, target):
        if knobs != self.default(workload, job_machine()):
            raise ValueError("no such nest")
        return write(self, func, workload, knobs, target)

    monkeypatch.setattr(Conv2DTemplate, "write", fail)
    with pytest.raises(TuningError, match=r"all 4 candidates of .* failed; .*no such nest"):
        tune(tmp_path)
    assert all("failure" in trial for trial in lines(tmp_path / "trials.jsonl"))


class Believed:
    """A session that measures what it is told: a ratio for each race."""

    search_ratio, final_ratio = 0.8, 0.8
    states: tuple[float, ...] = ()

    def __init__(self, task, target, seed, host) -> None:
        self.task, self.host, self.fresh = task, host, False

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def build(self, numbers) -> None:
        pass

    def end_worker(self) -> None:
        self.fresh = True

    def race(self, numbers, rounds, seconds):
        ratio = self.final_ratio if self.fresh else self.search_ratio
        found = {number: Outcome(ratio, states=self.states) for number in numbers}
        return found | {0: Outcome(1.0)}, 1e-3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("search", "final", "status", "gain"),
    [
        (0.8, 0.9, "tuned", 1 / 0.9),
        (0.8, 0.995, "default stays", 1.0),
        (0.8, 1.2, "default stays", 1.0),
        (1.1, 0.5, "default stays", 1.0),  # nothing to race again
    ],
)
def test_only_a_second_race_decides(
    tmp_path: Path, monkeypatch, search: float, final: float, status: str, gain: float
) -> None:
    monkeypatch.setattr(job, "Session", Believed)
    monkeypatch.setattr(Believed, "search_ratio", search)
    monkeypatch.setattr(Believed, "final_ratio", final)
    result = tune(tmp_path)
    assert {task.status for task in result.tasks} == {status}
    for record in lines(tmp_path / "records.jsonl"):
        assert record["default_seconds"] / record["best_seconds"] == pytest.approx(gain)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("states", "status"), [((0.6, 1.005), "tuned"), ((0.6, 1.1), "stays")])
def test_a_winner_loses_in_no_state(tmp_path: Path, monkeypatch, states, status: str) -> None:
    monkeypatch.setattr(job, "Session", Believed)
    monkeypatch.setattr(Believed, "states", states)
    assert {task.status.split()[-1] for task in tune(tmp_path).tasks} == {status}


@pytest.mark.slow
def test_a_search_that_promises_nothing_ends_with_the_neighbours(
    tmp_path: Path, monkeypatch
) -> None:
    ended: list[Search] = []
    monkeypatch.setattr(job, "Session", Believed)
    monkeypatch.setattr(Believed, "search_ratio", 1.1)  # the default is the best
    monkeypatch.setattr(job, "_promises_little", lambda search: search.trials >= 16)
    explore = job._Job._explore

    def note(self, session, task, search, state, until) -> None:
        explore(self, session, task, search, state, until)
        ended.append(search)

    monkeypatch.setattr(job._Job, "_explore", note)
    result = tune(tmp_path, trials=999)
    for task, search in zip(result.tasks, ended, strict=True):
        assert 24 <= task.trials < task.settings - 1  # twice in a row, then the neighbours
        assert not search.neighbours()
    again = tune(tmp_path, trials=999)
    assert [task.status for task in again.tasks] == ["known", "known"]


def test_the_time_limit_leaves_each_task_its_share(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(job, "Session", Believed)
    result = tune(tmp_path, trials=999, minutes=1e-9)
    assert result.interrupted
    assert [task.status for task in result.tasks] == ["waiting", "waiting"]


def test_the_table_says_how_long_a_job_will_take() -> None:
    states = [job.TaskState("f", "conv", 1, 0.25, status=job.WAITING) for _ in range(4)]
    result = job.TuneResult(states, "db", "llvm", seconds=30.0)
    assert seconds_left(result) is None and "left" not in str(tune_table(result).caption)
    states[0].status, states[1].status, states[2].status = job.TUNED, job.KNOWN, job.SEARCHING
    assert seconds_left(result) == 60.0
    assert str(tune_table(result).caption).startswith("30 s, about 60 s left")
    result.minutes = 2.0
    assert str(tune_table(result).caption).startswith("30 s, 90 s left")


def test_one_job_measures_at_a_time() -> None:
    with measuring():
        with pytest.raises(Timeout):
            FileLock(measuring_lock()).acquire(timeout=0.05)
    with FileLock(measuring_lock()).acquire(timeout=5):
        pass


def test_tasks_are_deduplicated_and_sorted_by_their_share() -> None:
    target = resolve("native", 2)
    tasks = extract_tasks(model(), target, None, pipeline.Options("none", winograd="never"))
    assert [task.calls for task in tasks] == [1, 1]
    assert tasks[0].share > tasks[1].share
    assert len({task.key for task in tasks}) == 2
    module = import_onnx(small_model(), None).mod
    fused = extract_tasks(module, target, None, pipeline.Options("all"))
    assert any(task.templates[0].name != "cpu.conv2d" for task in fused)
    assert not any(task.wide for task in fused)


@pytest.mark.slow
def test_a_wide_space_is_for_all_tasks(tmp_path: Path) -> None:
    options = pipeline.Options("none", winograd="never")
    tasks = extract_tasks(model(), resolve("native", 2), None, options, wide=True)
    assert all(task.wide for task in tasks)
    result = tune(tmp_path, space="wide", trials=1)  # these templates have no wider space
    assert [task.trials for task in result.tasks] == [1, 1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"trials": 0}, InvalidInputError, "trials is 0; expected at least 1"),
        ({"space": "all"}, InvalidInputError, "space is 'all'; expected 'default' or 'wide'"),
        ({"minutes": -1}, InvalidInputError, "minutes is -1; expected a positive number"),
        ({"ranks": 0}, InvalidInputError, "ranks is 0; expected a positive integer"),
        ({"ranks": 2, "target": "cuda -arch=sm_90"}, TargetError, "ranks compute on CPUs"),
        ({"target": "cortex-a72"}, TargetError, "this machine"),
        ({"target": "x86-64"}, TargetError, "the target is a x86-64 and this machine a"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        tune(tmp_path, **options)


def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TuningError, match="cannot write the database .*file"):
        tune(tmp_path / "file" / "folder")


def plain_model() -> onnx.ModelProto:
    """A model without anything to tune."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 3])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )


def test_a_model_without_tasks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="nothing to tune"):
        tvm_fusion.tune(plain_model(), database=tmp_path, threads=2)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--database", "db", "--trials", "0"], 2, "0 is not in the range x>=1"),
        (["--database", "db", "--minutes", "0"], 2, "0.0 is not in the range x>0"),
        (["--database", "plain.onnx/db"], 1, "cannot write the database"),
        (["--database", "db"], 1, "the model has nothing to tune"),
        (["--database", "db", "--target", "cortex-a72"], 1, "this machine"),
        (["--database", "db", "--runner", "here"], 1, "expected 'local' or 'rpc://"),
    ],
)
def test_the_command_says_in_one_sentence_what_is_wrong(
    tmp_path: Path, monkeypatch, capsys, options: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(plain_model(), "plain.onnx")
    assert cli.main(["tune", "plain.onnx", "--threads", "2", *options]) == code
    told = capsys.readouterr().err.splitlines()
    assert message in told[-1] and told[-1].startswith("Error: ")


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch) -> None:
    found = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "xgboost" else found(name))
    with pytest.raises(TuningError, match=r"needs xgboost; .*pip install 'tvm-fusion\[tune\]'"):
        tune(tmp_path)
    path = tmp_path / "records.jsonl"
    path.write_text("rubbish\n")
    assert prune(path) == (0, 1)  # does not learn
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(TuningError, match=r"needs filelock; .*pip install 'tvm-fusion\[tune\]'"):
        prune(path)


WRITER = f"""{WITHOUT_TORCH}
from pathlib import Path
from tvm_fusion.tuning.database import append_line
for number in range(200):
    append_line(Path(sys.argv[1]), " ".join([sys.argv[2], str(number), "x" * 3000]))
"""


@pytest.mark.slow
def test_two_writers_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    command = [sys.executable, "-c", WRITER, str(path)]
    both = [subprocess.Popen([*command, name], cwd=ROOT) for name in ("a", "b")]
    assert [process.wait() for process in both] == [0, 0]
    found = [tuple(line.split()[:2]) for line in path.read_text().splitlines()]
    assert sorted(found) == sorted((name, str(n)) for name in ("a", "b") for n in range(200))


def test_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"half": ')
    append_line(path, "{}")
    assert path.read_text() == '{"half": \n{}\n'


def test_a_damaged_log_is_read_as_far_as_it_can_be(tmp_path: Path) -> None:
    task = extract_tasks(model(), resolve("native", 2))[0]
    database = Database(tmp_path)
    good = {"template": "cpu.conv2d", "version": 1, "knobs": {}, "ratio": 0.5}
    database.add_trial(task.key, good)
    for text in ("[" * 9999, "null", "{}", '{"task": 1, "ratio": "x"}', "\x00"):
        append_line(tmp_path / "trials.jsonl", text)
    database.add_trial(task.key, good | {"ratio": -1.0})
    assert len(database.trials(task.key)) == 1


@pytest.mark.slow
def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = tmp_path / "model.onnx", tmp_path / "db"
    onnx.save(model(), path)
    options = ["--threads", "2", "--fuse", "none", "--winograd", "never"]
    more = ["--database", str(folder), "--trials", "2", "--json"]
    assert cli.main(["tune", str(path), *more, *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [task["trials"] for task in told["tasks"]] == [2, 2]
    assert cli.main(["records", "verify", str(folder)]) == 0
    assert "2 good, 0 bad" in capsys.readouterr().out
    append_line(folder / "records.jsonl", "rubbish")
    foreign = lines_text(folder)[0].replace('"pixels": ', '"pixels": 9')
    append_line(folder / "records.jsonl", foreign)
    assert cli.main(["records", "verify", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["good"], [bad["line"] for bad in found["bad"]]) == (2, [3, 4])
    assert "not in the space" in found["bad"][1]["reason"]
    with pytest.warns(tvm_fusion.errors.RecordWarning, match="line 3"):
        assert cli.main(["records", "list", str(folder)]) == 0
    assert "conv 3x3 32->32" in capsys.readouterr().out
    assert cli.main(["records", "prune", str(folder)]) == 0
    assert "2 records kept, 2 lines removed" in capsys.readouterr().out
    assert cli.main(["records", "export", str(folder), str(tmp_path / "out.jsonl")]) == 0
    assert cli.main(["records", "import", str(tmp_path / "new"), str(tmp_path / "out.jsonl")]) == 0
    merged = tmp_path / "all.jsonl"
    assert cli.main(["records", "merge", str(merged), str(folder), str(tmp_path / "new")]) == 0
    assert len(merged.read_text().splitlines()) == 2
    capsys.readouterr()
    compiled = ["compile", str(path), "-o", str(tmp_path / "m.so"), "--records", str(merged)]
    assert cli.main([*compiled, "--json", *options]) == 0
    assert len(json.loads(capsys.readouterr().out)["records"]) == 2
    assert cli.main(["explain", str(path), "--records", str(tmp_path / "absent")]) == 1
    assert "no records at" in capsys.readouterr().err


def lines_text(folder: Path) -> list[str]:
    return (folder / "records.jsonl").read_text().splitlines()
