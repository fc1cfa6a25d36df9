# SPDX-License-Identifier: Apache-2.0
"""Common parts of the benchmarks: options, a series of races, atomic files of results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tvm_fusion.bench.race import TOLERANCE, Arena, EngineSpec, Plan, Progress
from tvm_fusion.cli.output import FILE_WIDTH, json_text
from tvm_fusion.cli.progress import progress_bar
from tvm_fusion.compiler.targets import required_features, resolve
from tvm_fusion.machine.host import TILE_FEATURES, host_cpu, host_features, host_info
from tvm_fusion.paths import written_aside

FOLDER = Path(os.environ.get("TVM_FUSION_RESULTS") or Path(__file__).resolve().parent / "results")
"""Folder of the results: the environment's, or the checkout's own."""


def _cpu_name() -> str:
    """LLVM's name of this CPU, and whether a hypervisor hides the tile registers that it has."""
    cpu = host_cpu()
    hidden = TILE_FEATURES.intersection(required_features(resolve(cpu))) - host_features()
    return f"{cpu}-without-tiles" if hidden else cpu


CPU_FOLDER = FOLDER / _cpu_name()

Results = dict[str, dict[str, Any]]


def output_file(text: str) -> Path:
    """Type of an option: a file that results can be written to; its folder is made.

    So a CPU that ran no benchmark before is found to have none before anything is measured. A
    default is given as text, since argparse converts no other.
    """
    path = Path(text)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    has_folder = path.parent.is_dir() and os.access(path.parent, os.W_OK)
    if path.is_dir() or not has_folder:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: no file in a writable folder")
    return path


def parser(description: str, names: Sequence[str], output: str) -> argparse.ArgumentParser:
    """Return the options that all benchmarks have; ``names`` are those of the models."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    options.add_argument("--threads", type=int, help="default: all physical cores")
    options.add_argument("--rounds", type=int, help="turns of each engine")
    options.add_argument("--quick", action="store_true", help="a few short rounds")
    options.add_argument("--resume", action="store_true", help="keep what the file already has")
    options.add_argument(
        "--output", type=output_file, default=str(CPU_FOLDER / output), metavar="FILE"
    )
    return options


def run_races(
    models: Mapping[str, Callable[[], Any]],
    engines: Sequence[EngineSpec],
    plan: Plan,
    options: argparse.Namespace,
    fresh: bool = False,
    section: str = "results",
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Results:
    """Race ``engines`` on those of ``models`` that ``options`` name, and write the file after each.

    With ``fresh``, each model has its own processes, whose peak memory then is its own. ``beside``
    makes the context of each race's turns.
    The results are a ``section`` of the file. Those that it already has are kept with ``--resume``,
    as long as they were taken with the same settings: machine, versions, threads, plan and engines.
    """
    machine = host_info()
    threads = options.threads or machine["physical_cores"]
    if options.quick:
        plan = replace(plan, rounds=5, turn_seconds=plan.turn_seconds / 2)
    plan = replace(plan, rounds=options.rounds or plan.rounds)
    settings = {"machine": machine, "threads": threads, "plan": asdict(plan)}
    settings["engines"] = [asdict(engine) for engine in engines]
    settings["options"] = {key: getattr(options, key, None) for key in ("image_size", "batch")}
    stored = _load(options.output, settings)
    results: Results = stored.get(section, {}) if options.resume else {}
    missing = [name for name in options.only if name in models and name not in results]
    groups = [[name] for name in missing] if fresh else [missing]
    number = 0
    with progress_bar() as progress:
        for group in groups:
            with Arena(engines, threads) as arena:
                for name in group:
                    number += 1
                    report = _prefixed(progress, f"{name} ({number} of {len(missing)})")
                    result = arena.race(
                        models[name](), name, plan=plan, progress=report, beside=beside()
                    )
                    results[name] = json.loads(json_text(result.to_json()))
                    saved = {"settings": settings, **stored, section: results}
                    save(options.output, saved)
    return {name: results[name] for name in models if name in results}


def engines_table(results: Results, title: str, models: str, *headings: str) -> Table:
    """Return an empty table of models: a column an engine, ratios to peers, other figures."""
    first = next(iter(results.values()))["engines"]
    table = Table(title=title)
    table.add_column(models)
    ratios = [f"ratio to {engine['title']}" for engine in first[1:]]
    for heading in (*(engine["title"] for engine in first), *ratios, *headings):
        table.add_column(heading, justify="right")
    return table


def peer_table(results: Results, title: str, models: str) -> Table:
    """Return a table with one row a model: latencies of two engines, their ratio, and the error."""
    table = engines_table(results, f"{title}, medians in ms", models, "relative error")
    for name, result in results.items():
        ours, peer = result["engines"]
        table.add_row(
            name,
            *(f"{engine['median_ms']:.2f}" for engine in (ours, peer)),
            f"{peer['ratio']:.2f}x",
            f"{float(ours['relative_error']):.1e}",
        )
    table.add_section()
    ratios = [result["engines"][1]["ratio"] for result in results.values()]
    table.add_row("geometric mean", "", "", geometric_mean(ratios))
    return table


def finish(
    table: Table, results: Results, options: argparse.Namespace, tolerance: float = TOLERANCE
) -> int:
    """Print the table; the exit code is 1 if an engine's outputs are wrong."""
    console = Console()
    console = console if console.is_terminal else Console(width=FILE_WIDTH)
    first = next(iter(results.values()))
    packages = ", ".join(f"{key} {text}" for key, text in first["machine"]["packages"].items())
    table.caption = (
        f"Ratio: how many times as fast {first['engines'][0]['title']} is, "
        "median over alternating rounds."
    )
    console.print(table)
    console.print(f"{first['machine']['cpu']}, {first['threads']} threads, {packages}")
    console.print(f"Written to {options.output}")
    return 0 if largest_error(results) <= tolerance else 1


def largest_error(results: Results) -> float:
    """Return the largest relative error of the first engine in any race."""
    return max(float(result["engines"][0]["relative_error"]) for result in results.values())


def geometric_mean(values: Iterable[float]) -> str:
    """Return the geometric mean of ratios, as text."""
    return f"{statistics.geometric_mean(values):.2f}x"


def _prefixed(progress: Progress, prefix: str) -> Progress:
    return lambda text, done, total: progress(f"{prefix}: {text}", done, total)


def _load(path: Path, settings: dict[str, Any]) -> dict[str, Results]:
    """Return the sections of a file, if there is one and it has the same settings."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    same = stored.pop("settings") == json.loads(json_text(settings))
    return stored if same else {}


def save(path: Path, record: Mapping[str, Any] | str) -> None:
    """Write a record as JSON, or as text; a CPU that ran no benchmark before has no folder yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = record if isinstance(record, str) else json_text(dict(record)) + "\n"
    with written_aside(path) as aside:
        aside.write_text(text)
