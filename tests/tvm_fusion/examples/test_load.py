# SPDX-License-Identifier: Apache-2.0
"""The race beside processes that compute: these run as long as the turns, and its table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from small_onnx import dense_model

from examples.benchmarks import load


def test_processes_that_spin_end_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen] = []
    start = subprocess.Popen

    def popen(command: list[str]) -> subprocess.Popen:
        started.append(start(command))
        return started[-1]

    class Lost(Exception):
        pass

    monkeypatch.setattr(load.subprocess, "Popen", popen)
    with pytest.raises(Lost), load.spinning(2):
        assert [program.poll() for program in started] == [None, None]
        raise Lost
    assert len(started) == 2 and None not in [program.poll() for program in started]


@pytest.mark.slow
def test_a_race_has_rows_for_each_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load, "MODELS", {"small": dense_model})
    output = str(tmp_path / "load.json")
    arguments = ["load.py", "--rounds", "1", "--threads", "1", "--beside", "0", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--output", output])
    assert load.main() == 0
    rows = [
        line.split("│")[1:4] for line in capsys.readouterr().out.splitlines() if "small" in line
    ]
    found = {(int(beside), engine.strip()) for _, beside, engine in rows}
    assert {(0, "tvm-fusion"), (1, "tvm-fusion"), (0, "ONNX Runtime"), (1, "ONNX Runtime")} <= found
    assert Path(output).exists()
