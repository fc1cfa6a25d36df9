# SPDX-License-Identifier: Apache-2.0
"""The script that damages all input: its cases repeat, and it sees what it is for."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from small_onnx import dense_model, small_model

import tvm_fusion
from tests.fuzz import arguments, files, models, options, run
from tests.fuzz.damage import BYTE_DAMAGES, damaged_bytes, damaged_json
from tests.fuzz.mutations import MUTATIONS, damaged
from tests.fuzz.outcomes import WrongResultError, outcome_of
from tvm_fusion.errors import RecordWarning


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models, which take no time to make."""
    monkeypatch.setattr(models, "corpus", lambda: (small_model(), dense_model()))


def test_damaged_models_differ_and_repeat() -> None:
    model = small_model()
    variants = [damaged(model, seed) for seed in range(60)]
    assert variants == [damaged(model, seed) for seed in range(60)]
    assert len(set(variants)) > 50 and len(MUTATIONS) > 15
    assert model == small_model()


@pytest.mark.parametrize("damage", [*BYTE_DAMAGES, damaged_bytes, damaged_json])
def test_damaged_files_differ_and_repeat(damage: Any) -> None:
    data = json.dumps({"a": [1, 2, {"b": None}], "c": "text " * 20}).encode()

    def variant(seed: int) -> bytes:
        rng, changed = random.Random(seed), bytearray(data)
        if damage in BYTE_DAMAGES:
            damage(changed, rng, b"another file")
            return bytes(changed)
        return damage(data, rng)

    variants = [variant(seed) for seed in range(40)]
    assert variants == [variant(seed) for seed in range(40)]
    assert len(set(variants)) > 10 and len(set(variants) - {data}) > 10


def test_kinds_of_cases_have_their_shares() -> None:
    kinds = Counter(map(run.kind_of, range(4000)))
    assert set(kinds) == set(run.KINDS)
    for kind, share in run.KINDS.items():
        assert kinds[kind] == pytest.approx(400 * share, rel=0.2)


@pytest.mark.quick_cases("tests.fuzz.arguments-150-outcomes2", "tests.fuzz.files-60-outcomes1")
@pytest.mark.usefixtures("small_corpus")
@pytest.mark.parametrize(
    ("kind", "count", "outcomes"),
    [
        (models, 20, {"refused", "result"}),
        (files, 60, {"refused", "read"}),
        (arguments, 150, {"refused call", "result"}),
        (options, 20, {"refused", "result"}),
    ],
)
def test_cases_end_well(kind: ModuleType, count: int, outcomes: set[str]) -> None:
    found = [kind.attempt(number) for number in range(count)]
    assert [one for one in found if one[0] not in run.RIGHT] == []
    assert outcomes <= {outcome for outcome, _ in found}


@pytest.mark.usefixtures("small_corpus")
def test_a_foreign_exception_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tvm_fusion, "compile", lambda *_, **__: 1 // 0)
    outcome, where = models.attempt(0)
    assert outcome == "failed" and "ZeroDivisionError" in where


def test_what_is_wrong_or_warned_of_is_a_failure() -> None:
    def wrong() -> str:
        raise WrongResultError("1 instead of 2")

    assert outcome_of(wrong)[0] == "wrong"

    def warned(category: type[Warning]) -> str:
        warnings.warn("something", category, stacklevel=1)
        return "read"

    assert outcome_of(lambda: warned(UserWarning))[0] == "failed"
    assert outcome_of(lambda: warned(RecordWarning)) == ("read", "")


def test_a_call_with_wrong_numbers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = arguments.subjects()[0]
    wrong = subject._replace(model=CallsWrong(subject.model))
    monkeypatch.setattr(arguments, "subjects", lambda: (wrong,))
    assert {arguments.attempt(number)[0] for number in range(5)} == {"wrong"}


class CallsWrong:
    """A model whose first number is off."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **named: Any) -> np.ndarray:
        found = self._model(*args, **named).copy()
        found.flat[0] += 1
        return found


def test_a_saved_model_with_other_numbers_is_found(tmp_path: Path) -> None:
    data, inputs, expected = files.saved_model(files.GRAPHS[0])
    (tmp_path / "model.so").write_bytes(data)
    files._runs(inputs, expected)(tmp_path / "model.so")
    with pytest.raises(WrongResultError):
        files._runs(inputs, [expected[0] + 1])(tmp_path / "model.so")


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
