# SPDX-License-Identifier: Apache-2.0
"""Table of a run, in plain text: it is the last that a run prints.

    python -m examples.benchmarks.gpu.offline.table LOG [CASES]

CASES is the index of the packed cases, for the predictions beside the times.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..machine import folder_name
from .loaded import Loaded
from .stages import read_log

HEADINGS = ("case", "check", "us", "of limit", "predicted", "fastest peer", "us", "ratio", "others")
Lines = Sequence[Mapping[str, Any]]


def table(lines: Lines, index: Mapping[str, Any]) -> str:
    """Facts, one row a case, and every problem once, with the number of cases."""
    facts: dict[str, Any] = {}
    by_case: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["case"] == "device" and "begun" not in line:
            facts |= line
        elif "engine" in line:
            by_case[line["case"]].append(line)
    machine = folder_name(facts.get("gpu", {}).get("name", ""))
    rows: list[tuple[str, ...]] = [HEADINGS]
    for name, found in by_case.items():
        if all(line["engine"] != Loaded.title for line in found):
            continue  # a stage that could not run
        predicted = index.get(name, {}).get("predicted", {}).get(machine)
        rows.append(_row(name, found, facts, predicted))
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADINGS))]
    text = [_facts(facts)]
    text += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    unbuilt = [
        f"{name} was not packed: {about['problem']}"
        for name, about in index.items()
        if "problem" in about
    ]
    return "\n".join([*text, *unbuilt, *_problems(lines)])


def _facts(facts: Mapping[str, Any]) -> str:
    told = [str(facts.get("gpu", {}).get("name", "no GPU was measured"))]
    for name in ("copy", "read"):
        told += [f"{name} {facts[name] / 1e9:.0f} GB/s"] if name in facts else []
    if "peak_float16" in facts:
        told.append(f"cuBLAS float16 {facts['peak_float16'] / 1e12:.0f} TFLOP/s")
    return ", ".join(told)


def _row(
    name: str, lines: Lines, facts: Mapping[str, Any], predicted: float | None
) -> tuple[str, ...]:
    """Our time and the peers', the fastest first; ratio: how many times as long it took."""
    ours = [line for line in lines if line["engine"] == Loaded.title]
    times = [line for line in ours if "us" in line]
    peers = sorted(
        (line for line in lines if line["engine"] != Loaded.title and "us" in line),
        key=lambda line: line["us"],
    )
    ours_us = min((line["us"] for line in times), default=None)
    best = peers[0] if peers else {}
    ratio = best.get("ratio") or (best["us"] / ours_us if best and ours_us else None)
    others = ", ".join(f"{line['engine']} {line['us']:.1f}" for line in peers[1:])
    return (
        name,
        _check(ours),
        f"{ours_us:.1f}" if ours_us else "",
        _share(times[0], ours_us, facts) if ours_us else "",
        f"{predicted * 1e6:.1f}" if predicted else "",
        best.get("engine", ""),
        f"{best['us']:.1f}" if best else "",
        f"{ratio:.2f}x" if ratio else "",
        others,
    )


def _check(ours: Lines) -> str:
    """Error in units of what is allowed, or what is wrong."""
    problems = [line["problem"] for line in ours if line.get("problem")]
    if problems:
        return "WRONG" if "wrong" in problems[0] else "FAILED"
    if any(line.get("repeatable") is False for line in ours):
        return "other bits"
    errors = [line["error"] for line in ours if "error" in line]
    return f"{max(errors):.2f}" if errors else "ran" if ours else ""


def _share(line: Mapping[str, Any], own: float, facts: Mapping[str, Any]) -> str:
    """Larger share of the measured bandwidth and of the measured peak of float16."""
    bandwidth = max(facts.get("copy", 0), facts.get("read", 0))
    shares = [
        amount / (own * 1e-6) / limit
        for amount, limit in (
            (line.get("bytes", 0), bandwidth),
            (line.get("flops", 0), facts.get("peak_float16", 0)),
        )
        if limit
    ]
    return f"{max(shares):.0%}" if shares and max(shares) else ""


def _problems(lines: Lines) -> list[str]:
    cases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for line in lines:
        if line.get("problem"):
            names = cases[str(line.get("engine", line["stage"])), line["problem"]]
            names += [] if line["case"] in names else [line["case"]]
    return [
        f"{engine}: {problem} ({names[0] if len(names) == 1 else f'{len(names)} cases'})"
        for (engine, problem), names in cases.items()
    ]


def main(arguments: Sequence[str]) -> int:
    """Print the table of a log."""
    index = json.loads(Path(arguments[1]).read_text()) if len(arguments) > 1 else {}
    print(table(read_log(Path(arguments[0])), index))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
