# SPDX-License-Identifier: Apache-2.0
"""Race of tuned pairs of convolutions with their defaults and with MetaSchedule.

    python examples/benchmarks/tuning.py [--only mv2_2_1] [--pieces ours race] [--minutes 2.5]

Twelve pairs of Table 3.2 of the dissertation on layer fusion, each in five pieces, which go on
where they ended when the command is repeated:

- ours: a tuning job of tvm-fusion, with the forms of the pair;
- template: MetaSchedule's evolutionary search on the template of the default kernels, with as many
  trials, whose winner becomes a record of ours;
- stock: MetaSchedule as it is on the two layers, as many trials for each;
- race: all winners and the default take turns, three times in fresh processes;
- again: a second job of ours with another seed and an empty database, whose winner takes turns with
  that of the first and with the default, three times, too.

They race in a model of several such pairs, with weights of their own: as in a network, and in a
tuning job, the weights of a pair are no longer in the caches when it runs.

Prints a table and writes results/CPU/tuning.json, a piece at a time. Databases are kept in --work.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tvm
from rich.console import Console
from rich.table import Table
from tvm.s_tir import meta_schedule as ms

import tvm_fusion
from tvm_fusion.bench.race import Arena, EngineSpec, Plan
from tvm_fusion.cli.output import FILE_WIDTH, json_text
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.machine.host import host_info
from tvm_fusion.tuning.meta_schedule import (
    knob_features,
    nest_builder,
    search_space,
    stock_builder,
)
from tvm_fusion.tuning.meta_schedule_records import import_records
from tvm_fusion.tuning.tasks import extract_tasks, import_model
from tvm_fusion.tuning.worker import WEIGHT_BYTES

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import CPU_FOLDER, geometric_mean, output_file, save  # noqa: E402
from examples.benchmarks.tuning_engines import TUNED, separate_functions  # noqa: E402
from examples.layers import DEPTHWISE_PAIRS, build_pair  # noqa: E402

NAMES = (
    "mv1_1",
    "mv1_3",
    "mv1_7-11",
    "mv2_2_1",
    "mv2_3_2",
    "mv2_6_2",
    "mna1_4_1",
    "mna1_7",
    "res_2x",
    "res_3x",
    "res_4x_s2",
    "res_3x_b2",
)
BATCH = 8
POPULATION = 64
"""Population of the evolutionary search on a template; more is slow where mutators are Python."""
PLAN = Plan(rounds=15, runs=30, turn_seconds=0.06)
RACES = 3
"""Races of each comparison, each in fresh processes: equal models differ by 2 % in some."""
MOST_COPIES = 16
"""Copies of a pair in a race; there are fewer where their weights exceed the caches."""
TITLES = ("tuned", "default", "MetaSchedule, template", "MetaSchedule, apart")
TWICE = ("tuned", "tuned again", "default")

Result = dict[str, Any]


def ours(name: str, folder: Path, options: argparse.Namespace) -> Result:
    """Run or go on with a tuning job."""
    return _job(name, folder / "ours", options, options.seed)


def again(name: str, folder: Path, options: argparse.Namespace) -> Result:
    """Run or go on with a second job, and race its winner with the first one's."""
    found = _job(name, folder / "again", options, options.seed + 1)
    if found["done"]:
        databases = [*(str(folder / part) for part in ("ours", "again")), "none"]
        choices = [("tvm-fusion", {"records": database}) for database in databases]
        found["engines"] = _turns(name, TWICE, choices, options)
    return found


def _job(name: str, database: Path, options: argparse.Namespace, seed: int) -> Result:
    tuned = tvm_fusion.tune(
        build_pair(name),
        database=database,
        trials=options.trials,
        minutes=options.minutes,
        threads=options.threads,
        seed=seed,
    )
    forms = [{"about": task.about, "times": task.times} for task in tuned.tasks if task.times]
    return {
        "seconds": tuned.seconds,
        "trials": sum(task.trials for task in tuned.tasks),
        "done": not tuned.interrupted and all(is_done(task, options) for task in tuned.tasks),
        "forms": forms,
    }


def is_done(task: tvm_fusion.TaskState, options: argparse.Namespace) -> bool:
    """Return whether a task was not cut short by the limit; the next go finds it known."""
    enough = task.trials >= min(options.trials, task.settings - 1)
    return options.minutes is None or enough or task.status == "known"


def import_intrinsics() -> None:
    """Import what MetaSchedule needs; TVM's parser would search all modules for each function."""
    with patch.object(inspect, "getmodule", lambda *_: None):
        importlib.import_module("tvm.s_tir.tensor_intrin")


def template(name: str, folder: Path, options: argparse.Namespace) -> Result:
    """Let MetaSchedule search the default kernels' templates, and import its winners."""
    import_intrinsics()
    target = resolve("native", cores=options.threads)
    begin, trials, folders = time.monotonic(), 0, []
    for number, task in enumerate(extract_tasks(build_pair(name), target)):
        folders.append(folder / f"template-{number}")
        count = min(options.trials, len(task.settings))
        trials += count
        ms.tune_tir(
            tvm.IRModule({"main": task.func}),
            target,
            str(folders[-1]),
            count,
            num_trials_per_iter=BATCH,
            builder=nest_builder(),
            space=search_space(target),
            strategy=ms.search_strategy.EvolutionarySearch(
                population_size=POPULATION, init_min_unmeasured=BATCH
            ),
            cost_model=ms.cost_model.XGBModel(extractor=knob_features(), num_warmup_samples=BATCH),
            num_tuning_cores=1,
            seed=options.seed + 1,
        )
    taken, _ = import_records(folder / "template", folders)
    seconds = time.monotonic() - begin
    return {"seconds": seconds, "trials": trials, "done": taken == len(folders)}


def stock(name: str, folder: Path, options: argparse.Namespace) -> Result:
    """Let MetaSchedule tune the layers apart, with its own schedules."""
    import_intrinsics()
    target = resolve("native", cores=options.threads)
    mod = separate_functions(import_model(build_pair(name)), target)
    begin = time.monotonic()
    with target:
        ms.relax_integration.tune_relax(
            mod,
            {},
            target,
            str(folder / "stock"),
            2 * options.trials,
            options.trials,
            num_trials_per_iter=2 * BATCH,
            builder=stock_builder(),
            seed=options.seed + 1,
        )
    return {"seconds": time.monotonic() - begin, "trials": 2 * options.trials, "done": True}


def race(name: str, folder: Path, options: argparse.Namespace) -> Result:
    """Let the winners and the default take turns."""
    choices = [
        ("tvm-fusion", {"records": str(folder / "ours")}),
        ("tvm-fusion", {"records": "none"}),
        ("tvm-fusion", {"records": str(folder / "template")}),
        (TUNED, {"database": str(folder / "stock")}),
    ]
    return {"engines": _turns(name, TITLES, choices, options), "done": True}


def _turns(
    name: str,
    titles: Sequence[str],
    choices: Sequence[tuple[str, Result]],
    options: argparse.Namespace,
) -> list[Result]:
    """Race engines, each with its options; of the races keep the medians, in ms for one pair."""
    engines = [
        EngineSpec(engine, title, given)
        for title, (engine, given) in zip(titles, choices, strict=True)
    ]
    copies = min(MOST_COPIES, 1 + WEIGHT_BYTES // build_pair(name).ByteSize())
    model = build_pair(name, copies=copies)
    races: list[list[Result]] = []
    for _ in range(RACES):
        with Arena(engines, options.threads) as arena:
            found = arena.race(model, name, plan=PLAN).to_json()["engines"]
        races.append([engine | {"median_ms": engine["median_ms"] / copies} for engine in found])
    kept = ("median_ms", "ratio", "relative_error")
    return [
        {"title": title}
        | {key: statistics.median(race[position][key] for race in races) for key in kept}
        | {"ratios": [race[position]["ratio"] for race in races]}
        for position, title in enumerate(titles)
    ]


PIECES: dict[str, Callable[[str, Path, argparse.Namespace], Result]] = {
    "ours": ours,
    "template": template,
    "stock": stock,
    "race": race,
    "again": again,
}
SEARCHES = ("ours", "template", "stock")
NEEDED = {"race": SEARCHES, "again": ("ours",)}


def run(options: argparse.Namespace) -> dict[str, dict[str, Result]]:
    """Do the pieces that are not done, and write the file after each."""
    results = _stored(options)
    for name in options.only:
        pieces = results.setdefault(name, {})
        for piece in options.pieces:
            before = {} if options.redo else pieces.get(piece, {})
            if before.get("done"):
                continue
            needed = NEEDED.get(piece, ())
            if not all(pieces.get(one, {}).get("done") for one in needed):
                print(f"{name}: {piece} needs {', '.join(needed)}", file=sys.stderr)
                continue
            found = PIECES[piece](name, options.work / name, options)
            if "seconds" in found:
                found["seconds"] += before.get("seconds", 0.0)
            pieces[piece] = found
            _save(options, results)
    return results


def _settings(options: argparse.Namespace) -> Result:
    fields = {name: getattr(options, name) for name in ("threads", "trials", "seed")}
    return {"machine": host_info(), **fields, "plan": asdict(PLAN)}


def _stored(options: argparse.Namespace) -> dict[str, dict[str, Result]]:
    """Results of the file, if it has the same settings."""
    if not options.output.exists():
        return {}
    stored = json.loads(options.output.read_text())
    same = stored["settings"] == json.loads(json_text(_settings(options)))
    return stored["results"] if same else {}


def _save(options: argparse.Namespace, results: dict[str, dict[str, Result]]) -> None:
    save(options.output, {"settings": _settings(options), "results": results})


def tuning_table(results: dict[str, dict[str, Result]]) -> Table:
    """One row a pair: seconds a trial, medians, and how many times as fast the tuned pair is."""
    table = Table(title="Tuned pairs of convolutions, batch 1, NCHW")
    table.add_column("pair")
    for title in ("s a trial", "template: s a trial", "apart: s a trial"):
        table.add_column(title, justify="right")
    for title in TITLES:
        table.add_column(f"{title}, us", justify="right")
    for title in TITLES[1:]:
        table.add_column(f"ratio to {title}", justify="right")
    table.add_column("second job: time to the first's", justify="right")
    raced = {name: pieces for name, pieces in results.items() if "race" in pieces}
    for name, pieces in raced.items():
        engines = pieces["race"]["engines"]
        rates = [pieces[one]["seconds"] / max(1, pieces[one]["trials"]) for one in SEARCHES]
        table.add_row(
            name,
            *(f"{rate:.2f}" for rate in rates),
            *(f"{1e3 * engine['median_ms']:.1f}" for engine in engines),
            *(f"{engine['ratio']:.2f}x" for engine in engines[1:]),
            *(
                f"{engine['ratio']:.3f}"
                for engine in pieces.get("again", {}).get("engines", [])[1:2]
            ),
        )
    groups = {
        "depthwise": [name for name in raced if name in DEPTHWISE_PAIRS],
        "3x3": [name for name in raced if name not in DEPTHWISE_PAIRS],
        "all": list(raced),
    }
    for title, names in groups.items():
        if names:
            found = [raced[name]["race"]["engines"][1:] for name in names]
            rows = [[engine["ratio"] for engine in engines] for engines in found]
            means = [geometric_mean(column) for column in zip(*rows, strict=True)]
            table.add_row(f"geomean {title} ({len(rows)})", *[""] * 7, *means)
    return table


def main() -> int:
    """Run the pieces, and print what there is."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    options.add_argument("--threads", type=int, help="default: all physical cores")
    options.add_argument(
        "--output", type=output_file, default=str(CPU_FOLDER / "tuning.json"), metavar="FILE"
    )
    options.add_argument("--pieces", nargs="+", choices=list(PIECES), default=list(PIECES))
    options.add_argument("--trials", type=int, default=64)
    options.add_argument("--minutes", type=float, help="limit of one go of a job of ours")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "tvm-fusion-tuning"
    )
    options.add_argument("--redo", action="store_true", help="do pieces again that are done")
    chosen = options.parse_args()
    chosen.threads = chosen.threads or host_info()["physical_cores"]
    results = run(chosen)
    console = Console()
    console = console if console.is_terminal else Console(width=FILE_WIDTH)
    console.print(tuning_table(results))
    console.print(f"Written to {chosen.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
