# SPDX-License-Identifier: Apache-2.0
"""The script that damages models: its cases repeat, and it sees what it is for."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

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
