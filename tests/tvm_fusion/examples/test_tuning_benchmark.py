# SPDX-License-Identifier: Apache-2.0
"""The benchmark of tuned pairs goes on piece by piece, and its table has what was raced."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

import tvm_fusion
from examples.benchmarks import tuning


@pytest.fixture
def options(tmp_path: Path) -> Namespace:
    return Namespace(
        only=["mv1_3", "res_2x"],
        pieces=list(tuning.PIECES),
        threads=2,
        trials=8,
        seed=0,
        minutes=1.0,
        output=tmp_path / "tuning.json",
        work=tmp_path,
        redo=False,
    )


RATIOS = tuple(zip(tuning.TITLES, (1.0, 1.1, 1.05, 1.5), strict=True))


def engine(title: str, ratio: float) -> dict[str, object]:
    return {"title": title, "median_ms": 0.1 * ratio, "ratio": ratio, "relative_error": 1e-7}


def test_pieces_go_on_where_they_ended(options: Namespace, monkeypatch) -> None:
    asked: list[tuple[str, str]] = []
    limit = ["res_2x"]  # its job is cut short once

    def piece(title: str):
        def do(name: str, folder: Path, _: Namespace) -> tuning.Result:
            asked.append((name, title))
            if title == "race":
                return {"engines": [engine(*one) for one in RATIOS], "done": True}
            is_cut = title == "ours" and name in limit
            found = {"seconds": 3.0, "trials": 6, "done": not is_cut}
            twice = [engine("tuned", 1.0), engine("tuned again", 0.987), engine("default", 1.2)]
            return found | ({"engines": twice} if title == "again" else {})

        return do

    monkeypatch.setattr(tuning, "PIECES", {title: piece(title) for title in tuning.PIECES})
    tuning.run(options)
    assert ("res_2x", "race") not in asked and ("mv1_3", "race") in asked
    assert ("res_2x", "again") not in asked and ("mv1_3", "again") in asked
    limit.clear()
    asked.clear()
    results = tuning.run(options)
    assert asked == [("res_2x", "ours"), ("res_2x", "race"), ("res_2x", "again")]
    assert results["res_2x"]["ours"]["seconds"] == 6.0
    assert json.loads(options.output.read_text())["results"].keys() == {"mv1_3", "res_2x"}
    console = Console(width=300, record=True)
    console.print(tuning.tuning_table(results))
    text = console.export_text()
    assert "geomean all (2)" in text and "1.50x" in text and "0.50" in text
    assert text.count("0.987") == 2
    options.redo, options.only = True, ["mv1_3"]
    asked.clear()
    again = tuning.run(options)
    assert asked == [("mv1_3", title) for title in tuning.PIECES]
    assert again["mv1_3"]["ours"]["seconds"] == 3.0
    options.trials = 16  # other settings: nothing is kept
    assert tuning._stored(options) == {}


@pytest.mark.parametrize("is_done", [True, False])
def test_a_second_job_has_another_seed_and_database(
    options: Namespace, monkeypatch, is_done: bool
) -> None:
    jobs, raced = [], []

    def job(name: str, database: Path, _: Namespace, seed: int) -> tuning.Result:
        jobs.append((name, database.name, seed))
        return {"seconds": 1.0, "trials": 2, "done": is_done}

    def turns(name, titles, choices, _):
        raced.append((name, [Path(given["records"]).name for _, given in choices]))
        return [engine(title, 1.0) for title in titles]

    monkeypatch.setattr(tuning, "_job", job)
    monkeypatch.setattr(tuning, "_turns", turns)
    tuning.ours("mv1_3", options.work, options)
    found = tuning.again("mv1_3", options.work, options)
    assert jobs == [("mv1_3", "ours", 0), ("mv1_3", "again", 1)]
    assert raced == ([("mv1_3", ["ours", "again", "none"])] if is_done else [])
    assert ("engines" in found) == is_done


def test_a_comparison_is_the_median_of_races_in_fresh_processes(
    options: Namespace, monkeypatch
) -> None:
    ratios = iter([(1.0, 1.3), (1.0, 0.9), (1.0, 1.1)])

    class FakeArena:
        def __init__(self, engines, threads) -> None:
            self.titles = [one.title for one in engines]

        def __enter__(self) -> FakeArena:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def race(self, model, name, plan) -> Namespace:
            engines = [engine(*one) for one in zip(self.titles, next(ratios), strict=True)]
            return Namespace(to_json=lambda: {"engines": engines})

    monkeypatch.setattr(tuning, "Arena", FakeArena)
    choices = [("tvm-fusion", {"records": "none"})] * 2
    base, other = tuning._turns("mv1_3", ("a", "b"), choices, options)
    assert (base["title"], base["ratio"]) == ("a", 1.0)
    assert (other["title"], other["ratio"], other["ratios"]) == ("b", 1.1, [1.3, 0.9, 1.1])


def test_a_task_that_was_cut_short_is_not_done(options: Namespace) -> None:
    task = tvm_fusion.TaskState("conv", "conv", 1, 1.0, settings=100, status="tuned", trials=4)
    assert not tuning.is_done(task, options)
    options.minutes = None
    assert tuning.is_done(task, options)
    options.minutes, task.trials = 1.0, 8
    assert tuning.is_done(task, options)


def test_twelve_pairs_of_the_dissertation() -> None:
    from examples.layers import PAIRS

    assert len(set(tuning.NAMES)) == 12 and set(tuning.NAMES) <= PAIRS.keys()
