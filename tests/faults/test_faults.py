# SPDX-License-Identifier: Apache-2.0
"""The list of seeded faults, and its program on a small repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults import run
from tests.faults.seeded import FAULTS, Fault
from tests.selection import one_test

ROOT = Path(__file__).resolve().parents[2]


@one_test(FAULTS)
def test_the_text_of_a_fault_occurs_once(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1, f"{fault.file} has not this text once: {fault.old!r}"
    if fault.file.endswith(".py"):
        compile(text.replace(fault.old, fault.new), fault.file, "exec")
    assert fault.tests and all((ROOT / test).exists() for test in fault.tests)


def test_there_are_forty_by_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40


def test_faults_are_seeded_in_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\nmarkers = ["slow: not run"]\n'
    )
    (repository / "code.txt").write_text("one two")
    (repository / "test_code.py").write_text(
        "from pathlib import Path\ndef test_one(): assert 'one' in Path('code.txt').read_text()\n"
    )
    faults = (
        Fault("no one", "code.txt", "one", "none at all"[-3:], ("test_code.py",)),
        Fault("no two", "code.txt", "two", "2", ("test_code.py",)),
        Fault("rotten", "code.txt", "three", "3", ("test_code.py",)),
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # their imports take seconds
    monkeypatch.setattr(run, "ROOT", repository)
    monkeypatch.setattr(run, "FAULTS", faults)
    run.subprocess.run(["git", "init", "-q", str(repository)], check=True)
    results = tmp_path / "results.json"
    assert run.main(["--results", str(results)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  1 caught     no one: test_code.py::test_one"
    assert lines[1].startswith("  2 NOT CAUGHT no two")
    assert lines[2].startswith("  3 BROKEN     rotten: code.txt has not this text once")
    assert lines[3] == "1 of 3 caught"
    assert (repository / "code.txt").read_text() == "one two"
    monkeypatch.setattr(run, "seed", None)  # all have results
    assert run.main(["--results", str(results), "--only", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["1"]["outcome"] == "failed"
