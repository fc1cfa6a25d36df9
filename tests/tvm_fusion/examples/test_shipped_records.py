# SPDX-License-Identifier: Apache-2.0
"""The race with and without the records of the package takes the models that they touch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from small_onnx import dense_model, reductions_model

from examples.benchmarks import shipped_records
from schedules.tuning.records import Record
from tvm_fusion.compiler import record_reader
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.machine.host import host_cpu
from tvm_fusion.tuning.tasks import extract_tasks


def convolutions():
    return dense_model(size=20, channels=32)


@pytest.fixture
def _shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a record of one kernel of ``convolutions``."""
    task = extract_tasks(convolutions(), resolve("native", cores=2))[0]
    template, knobs = task.settings[1]
    record = Record.of_key(task.key, template, knobs, (2e-5, 1e-5), trials=8)
    (tmp_path / f"{host_cpu()}.jsonl").write_text(record.to_line() + "\n")
    monkeypatch.setattr(record_reader, "SHIPPED", tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("_shipped")
def test_only_models_that_follow_records_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shipped_records, "NETWORKS", {"net": reductions_model})
    monkeypatch.setattr(shipped_records, "EVERY_PAIR", {"one": convolutions, "two": convolutions})
    raced = []

    def run_races(models, engines, plan, options):
        raced.extend(models)
        machine = {"cpu": "some CPU", "packages": {}}
        return {
            name: {
                "machine": machine,
                "threads": 2,
                "engines": [
                    {"title": title, "median_ms": 1.0, "ratio": ratio, "relative_error": 0.0}
                    for title, ratio in (("with records", 1.0), ("without", ratio))
                ],
            }
            for name, ratio in zip(models, (1.25, 0.96), strict=True)
        }

    monkeypatch.setattr(shipped_records, "run_races", run_races)
    monkeypatch.setattr(sys, "argv", ["shipped_records.py", "--threads", "2"])
    assert shipped_records.main() == 0
    assert raced == ["one", "two"]
    out = capsys.readouterr().out
    assert "1.250x" in out and "geometric mean, pairs (2)" in out
    assert "more than 3 % slower with records: two" in out
    monkeypatch.setattr(sys, "argv", ["shipped_records.py", "--threads", "1"])
    assert shipped_records.main() == 0  # records count for their number of threads only
    assert raced == ["one", "two"]
    assert "no record of the package" in capsys.readouterr().out
