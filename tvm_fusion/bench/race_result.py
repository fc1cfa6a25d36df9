# SPDX-License-Identifier: Apache-2.0
"""Plan and result of a race between engines, as records, JSON and a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

TOLERANCE = 1e-3
"""Relative error above which an engine does not compute the same as the reference."""


@dataclass(frozen=True)
class Plan:
    """Length of a race.

    Parameters
    ----------
    rounds : int
        Number of rounds.
    runs : int
        Timed runs of an engine's turn.
    turn_seconds : float
        A turn that has lasted this long ends early, after at least one run.
    budget_seconds : float
        An engine that has run this long skips the remaining rounds, after at least three.
    seed : int
        Seed of all inputs.
    """

    rounds: int = 20
    runs: int = 10
    turn_seconds: float = 0.5
    budget_seconds: float = 20.0
    seed: int = 0


@dataclass(frozen=True)
class EngineResult:
    """Result of one engine in a race.

    ``ratio`` is this engine's latency over the first engine's (above 1: the first one is faster),
    the median over the rounds, with the 10th and 90th percentile beside it. ``relative_error`` is
    the largest difference from the reference's outputs over their largest magnitude.
    """

    engine: str
    title: str
    version: str
    options: dict[str, Any]
    median_ms: float
    min_ms: float
    p90_ms: float
    p99_ms: float
    ratio: float
    ratio_p10: float
    ratio_p90: float
    relative_error: float
    compile_seconds: float
    peak_mib: float
    rounds: int
    runs: int
    details: dict[str, Any]


@dataclass(frozen=True)
class RaceResult:
    """The results of all engines with the context to judge them; ``engines[0]`` is the base."""

    model: str
    inputs: list[tuple[str, tuple[int, ...], str]]
    threads: int
    date: str
    machine: dict[str, Any]
    plan: Plan
    reference: str
    engines: list[EngineResult]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain dictionaries and lists."""
        return asdict(self)


def race_table(result: RaceResult) -> Table:
    """Return the result as a table with one row an engine."""
    base = result.engines[0]
    table = Table(
        title=f"{result.model}, {result.threads} threads, {result.machine['cpu']}",
        caption=(
            f"Medians of {base.rounds} rounds in turns. {base.title} is as many times as fast as "
            f"the engine of the row; relative error against {result.reference}."
        ),
    )
    table.add_column("engine")
    headings = ("median ms", "min ms", "p90 ms", f"{base.title} is", "relative error")
    for heading in (*headings, "compile s", "peak MiB"):
        table.add_column(heading, justify="right")
    for engine in result.engines:
        table.add_row(
            title_of(engine),
            *(f"{time:.3f}" for time in (engine.median_ms, engine.min_ms, engine.p90_ms)),
            "" if engine is base else f"{engine.ratio:.2f}x",
            error_text(engine, result),
            f"{engine.compile_seconds:.1f}",
            f"{engine.peak_mib:.0f}",
        )
    return table


def title_of(engine: EngineResult) -> str:
    """Return an engine's name, with the element type that it chose where it may choose."""
    chose = engine.options.get("precision") == "default"
    return f"{engine.title}, {engine.details['precision']}" if chose else engine.title


def error_text(engine: EngineResult, result: RaceResult) -> str:
    """Return an engine's relative error for a table, in red where its outputs are wrong."""
    if engine.title == result.reference:
        return "reference"
    text = f"{engine.relative_error:.1e}"
    return text if engine.relative_error <= TOLERANCE else f"[red]{text}[/red]"
