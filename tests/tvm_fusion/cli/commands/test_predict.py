# SPDX-License-Identifier: Apache-2.0
"""Command `tvm-fusion predict --traces`."""

from __future__ import annotations

import json

import pytest
from small_traces import training_step

from tvm_fusion.cli import main


@pytest.fixture
def traces(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(2):
        training_step(rank, 40).write(folder / f"rank{rank}.json")
    return folder


def test_table(traces, capsys, monkeypatch) -> None:
    monkeypatch.setattr("tvm_fusion.cli.output.PIPE_WIDTH", 200)
    assert main(["predict", "--traces", str(traces), "--what-if", "graph"]) == 0
    text = capsys.readouterr().out
    for word in ("predicted", "measured", "idle: other rank", "critical path", "what if"):
        assert word in text


def test_json(traces, capsys) -> None:
    arguments = ["predict", "--traces", str(traces), "--json", "--what-if", "resize=mm:2"]
    assert main([*arguments, "--what-if", "resize=linear:2"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["message"] == "resize=mm: matches no operator"
    assert main([*arguments[:-1], "resize=linear:2"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert [answer["change"] for answer in result["what_if"]] == ["resize=linear:2"]
    assert result["overheads"] == "of the traces"


def test_overheads_are_shared(traces, tmp_path, capsys) -> None:
    file = tmp_path / "overheads.json"
    save = ["predict", "--traces", str(traces), "--save-overheads", str(file), "--json"]
    assert main(save) == 0
    capsys.readouterr()
    training_step().write(tmp_path / "other.json")
    use = ["predict", "--traces", str(tmp_path / "other.json"), "--overheads", str(file)]
    assert main([*use, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["overheads"] == str(file)
    assert result["unknown_ops"] == []


def test_timeline(traces, tmp_path, capsys) -> None:
    file = tmp_path / "timeline.json"
    assert main(["predict", "--traces", str(traces), "--timeline", str(file)]) == 0
    assert json.loads(file.read_text())["traceEvents"]
    training_step().write(tmp_path / "a.json")
    training_step().write(tmp_path / "b.json")
    file.unlink()
    assert main(["predict", "--traces", str(tmp_path), "--timeline", str(file)]) == 2
    assert "--timeline is of one run" in capsys.readouterr().err


def test_warnings_and_errors(traces, capsys) -> None:
    path = traces / "rank1.json"
    data = json.loads(path.read_text())
    data["traceEvents"][0]["dur"] = -1
    path.write_text(json.dumps(data))
    assert main(["predict", "--traces", str(traces)]) == 0
    assert "rank1.json: 1 events of negative duration" in capsys.readouterr().err
    path.write_text(json.dumps(data)[:900])
    assert main(["predict", "--traces", str(traces)]) == 1
    assert "rank1.json: cannot be read after" in capsys.readouterr().err
    assert main(["predict"]) == 2
