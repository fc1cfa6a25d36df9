# SPDX-License-Identifier: Apache-2.0
"""Presentation of the GPU comparison: a table, a record and a plot."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.benchmarks.reduction_cases import Case
from tvm_fusion.cli.output import json_text
from tvm_fusion.paths import written_aside

from .protocol import Summary, Verdict

FORMS = ("all", "x", "y")


@dataclass(frozen=True)
class Result:
    """A case and its results."""

    case: Case
    verdicts: tuple[Verdict, ...]
    state: Mapping[str, str]
    """State of the GPU just before: clocks and temperature."""

    def to_json(self) -> dict[str, Any]:
        """A record for :meth:`from_json`."""
        case = {"bytes": self.case.bytes, "form": self.case.form} | asdict(self.case)
        verdicts = [
            asdict(verdict) | {"bytes_per_second": verdict.bandwidth(self.case.bytes)}
            for verdict in self.verdicts
        ]
        return {"case": case, "state": dict(self.state), "verdicts": verdicts}

    @classmethod
    def from_json(cls, record: Mapping[str, Any], case: Case) -> Result:
        """Read a record of ``case``."""
        return cls(
            case, tuple(read_verdict(entry) for entry in record["verdicts"]), record["state"]
        )


def results_table(results: Sequence[Result], limit: float, title: str) -> Table:
    """One row a case: microseconds of each engine, and percent of ``limit`` bytes a second."""
    engines = list(dict.fromkeys(v.engine for result in results for v in result.verdicts))
    table = Table(title=title)
    table.add_column("case")
    table.add_column("form")
    table.add_column("MB", justify="right")
    for engine in engines:
        table.add_column(engine, justify="right")
    for result in results:
        cells = {
            verdict.engine: cell(verdict, result.case.bytes, limit) for verdict in result.verdicts
        }
        table.add_row(
            result.case.name,
            result.case.form,
            f"{result.case.bytes / 1e6:.3g}",
            *(cells.get(engine, "") for engine in engines),
        )
    table.caption = (
        "Device microseconds of one launch, median, and percent of the measured bandwidth; "
        "(host: until the caller has the result); * taken without a graph or on the host."
    )
    return table


def launches_table(results: Sequence[Result], title: str) -> Table:
    """One row a short case: microseconds of a launch by each engine, from a graph and without."""
    short = [result for result in results if any(v.stream for v in result.verdicts)]
    engines = list(dict.fromkeys(v.engine for result in short for v in result.verdicts))
    table = Table(title=title)
    table.add_column("case")
    for engine in engines:
        table.add_column(f"{engine}, graph", justify="right")
        table.add_column("stream", justify="right")
    for result in short:
        row = [result.case.name]
        for engine in engines:
            verdict = next(v for v in result.verdicts if v.engine == engine)
            times = (verdict.device, verdict.stream)
            row += ["" if time is None else f"{time.median * 1e6:.1f}" for time in times]
        table.add_row(*row)
    table.caption = (
        "Device microseconds of a launch, median; stream: with the gaps between launches."
    )
    return table


def cell(verdict: Verdict, moved: int, limit: float) -> str:
    """Table cell of one engine on one case."""
    if verdict.problem:
        return "wrong" if math.isfinite(verdict.bound) and not verdict.error <= 1 else "none"
    if verdict.device is None:
        return ""
    percent = verdict.bandwidth(moved) / limit
    text = f"{verdict.device.median * 1e6:.1f} ({percent:.0%})"
    if verdict.host is not None:
        text += f" host {verdict.host.median * 1e6:.0f}"
        text += "" if verdict.how == "graph" else " *"
    return text + (" NOT REPEATABLE" if verdict.repeatable is False else "")


def problems(results: Iterable[Result]) -> list[str]:
    """Reasons why engines have no time, each once with the number of cases."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for result in results:
        for verdict in result.verdicts:
            if verdict.problem:
                counts[verdict.engine, verdict.problem] += 1
    return [
        f"{engine}: {problem} ({count} case{'s' * (count > 1)})"
        for (engine, problem), count in counts.items()
    ]


def failures(results: Iterable[Result], engine_prefix: str) -> list[str]:
    """Cases on which engines of that prefix are wrong, or not repeatable as promised."""
    return [
        f"{result.case.name}: {verdict.engine}: {verdict.problem or 'other bits in another run'}"
        for result in results
        for verdict in result.verdicts
        if verdict.engine.startswith(engine_prefix)
        and (bool(verdict.problem) or verdict.repeatable is False)
    ]


def save(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside:
        aside.write_text(json_text(dict(record)) + "\n")


def draw(results: Sequence[Result], limit: float, title: str, path: Path) -> None:
    """Plot percent of ``limit`` over size, a panel a form; lines join medians of powers of two."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 5), dpi=110)
    panels = figure.subplots(1, len(FORMS), sharey=True)
    engines = list(dict.fromkeys(v.engine for result in results for v in result.verdicts))
    colours = {engine: f"C{number}" for number, engine in enumerate(engines)}
    for form, axes in zip(FORMS, panels, strict=True):
        for engine in engines:
            points = percents(results, form, engine, limit)
            if not points:
                continue
            line = power_medians(points)
            colour = colours[engine]
            axes.plot(*zip(*line, strict=True), color=colour, label=engine)
            axes.scatter(*zip(*points, strict=True), color=colour, s=8, alpha=0.4)
        axes.set(xscale="log", xlabel="compulsory bytes", title=f"form {form}")
        axes.grid(alpha=0.2)
        if axes.lines:
            axes.legend(fontsize=7)
    panels[0].set_ylabel("percent of the measured bandwidth")
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside:
        figure.savefig(aside, format="png")


def draw_bars(results: Sequence[Result], title: str, path: Path) -> None:
    """Plot microseconds of short cases as bars, those from graphs above those without."""
    bars = {result.case.name: result.verdicts for result in results}
    panels = (("device", "us of a launch, graph or long"), ("stream", "us of a launch, no graph"))
    _draw_panels(bars, panels, 1e6, title, path)


def draw_models(results: Mapping[str, Sequence[Verdict]], title: str, path: Path) -> None:
    """Plot milliseconds of whole models as bars: on the device, and until the result is there."""
    panels = (("device", "device ms of a call"), ("host", "host ms of a call"))
    _draw_panels(results, panels, 1e3, title, path)


def _draw_panels(
    bars: Mapping[str, Sequence[Verdict]],
    panels: Sequence[tuple[str, str]],
    scale: float,
    title: str,
    path: Path,
) -> None:
    """A panel for each time of the verdicts: a group of bars a name, a colour an engine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 9), dpi=110)
    rows = figure.subplots(len(panels), 1, sharex=True)
    engines = list(dict.fromkeys(v.engine for verdicts in bars.values() for v in verdicts))
    width = 0.8 / max(1, len(engines))
    for axes, (field, label) in zip(rows, panels, strict=True):
        for place, engine in enumerate(engines):
            times = [
                (number + place * width, getattr(verdict, field).median * scale)
                for number, verdicts in enumerate(bars.values())
                for verdict in verdicts
                if verdict.engine == engine and getattr(verdict, field) is not None
            ]
            axes.bar([x for x, _ in times], [y for _, y in times], width, label=engine)
        axes.set(yscale="log", ylabel=label)
        axes.grid(alpha=0.2, axis="y")
    rows[0].legend(fontsize=7)
    middle = width * (len(engines) - 1) / 2
    rows[-1].set_xticks([number + middle for number in range(len(bars))], [*bars])
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside:
        figure.savefig(aside, format="png")


def percents(
    results: Iterable[Result], form: str, engine: str, limit: float
) -> list[tuple[float, float]]:
    """Bytes and percent of the limit for every measured time of an engine, by size."""
    return sorted(
        (float(result.case.bytes), 100 * verdict.bandwidth(result.case.bytes) / limit)
        for result in results
        for verdict in result.verdicts
        if result.case.form == form and verdict.engine == engine and verdict.device is not None
    )


def power_medians(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The medians of points whose sizes round to the same power of two."""
    groups: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for size, percent in points:
        groups[round(math.log2(size))].append((size, percent))
    return [
        (statistics.median(size for size, _ in group), statistics.median(p for _, p in group))
        for _, group in sorted(groups.items())
    ]


def read_verdict(entry: Mapping[str, Any]) -> Verdict:
    """A verdict from its record."""
    fields = {key: value for key, value in entry.items() if key != "bytes_per_second"}
    for key in ("device", "stream", "host"):
        if fields.get(key) is not None:
            fields[key] = Summary(**fields[key])
    for key in ("error", "bound"):
        fields[key] = float(fields[key])
    return Verdict(**fields)
