# SPDX-License-Identifier: Apache-2.0
"""The script that damages models: its cases repeat, and it sees what it is for."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import onnx
import pytest
from small_onnx import dense_model, small_model

import tvm_fusion
from tests.fuzz import run
from tests.fuzz.mutations import MUTATIONS, damaged


@pytest.fixture(autouse=True)
def corpus(monkeypatch: pytest.MonkeyPatch) -> list[onnx.ModelProto]:
    models = [small_model(), dense_model()]
    monkeypatch.setattr(run, "_CORPUS", models)
    return models


def test_damages_differ_and_repeat(corpus: list[onnx.ModelProto]) -> None:
    variants = [damaged(corpus[0], seed) for seed in range(60)]
    assert variants == [damaged(corpus[0], seed) for seed in range(60)]
    assert len(set(variants)) > 50 and len(MUTATIONS) > 15
    assert corpus[0] == small_model()


def test_damaged_models_end_well() -> None:
    outcomes = [run.attempt(number) for number in range(20)]
    assert {outcome for outcome, _ in outcomes} <= set(run.RIGHT)
    assert {"refused", "result"} <= {outcome for outcome, _ in outcomes}


def test_a_foreign_exception_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tvm_fusion, "compile", lambda *_, **__: 1 // 0)
    outcome, where = run.attempt(0)
    assert outcome == "failed" and "ZeroDivisionError" in where


def _play(connection: Connection) -> None:
    connection.send(("ready", ""))
    for action in iter(connection.recv, None):
        if action == 1:
            os._exit(7)
        time.sleep(60 * (action == 2))
        connection.send(("result", str(action)))


def test_workers_that_die_or_hang_are_replaced() -> None:
    worker = run.Worker(1.0, _play, "fork")
    outcomes = [worker.run(action) for action in (0, 1, 3, 2, 4)]
    assert outcomes == [
        ("result", "0"),
        ("crashed", "exit code 7"),
        ("result", "3"),
        ("hung", "no end in 1 s"),
        ("result", "4"),
    ]


def test_cases_are_shared_by_workers_and_stay_in_order() -> None:
    workers = [run.Worker(60.0, _play, "fork") for _ in range(2)]
    outcomes = list(run.run_cases([3, 1, 4, 5], workers))
    assert [found.case for found in outcomes] == [3, 1, 4, 5]
    assert [found.outcome for found in outcomes] == ["result", "crashed", "result", "result"]


def _end_well(connection: Connection) -> None:
    connection.send(("ready", ""))
    while True:
        connection.send(("failed", f"at {number}") if (number := connection.recv()) == 4 else WELL)


WELL = ("refused", "an error of ours")


def test_a_log_continues_what_was_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    played = run.Worker
    monkeypatch.setattr(run, "Worker", lambda limit: played(limit, _end_well, "fork"))
    for cases, status in ((4, 0), (6, 1)):
        command = ["run.py", "--cases", str(cases), "--log", str(log), "--jobs", "2"]
        monkeypatch.setattr(sys, "argv", command)
        assert run.main() == status
        assert [found.case for found in run.read_log(log)] == list(range(cases))
    whole = log.read_bytes()
    log.write_bytes(whole[:-9])  # stopped while it wrote
    assert [found.case for found in run.read_log(log)] == list(range(5))
    assert run.main() == 1 and len(run.read_log(log)) == 6
    assert capsys.readouterr().out.count("case 4 failed: at 4") == 2
