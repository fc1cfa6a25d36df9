# SPDX-License-Identifier: Apache-2.0
"""Writing of fitted figures into the files of machines that come with the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from schedules.cost import machine as machines
from schedules.cost.machine import Figure, Machine
from tvm_fusion.paths import written_aside


def write_figures(machine: Machine, fitted: Mapping[str, Figure], prefix: str) -> None:
    """Replace all figures of a known machine whose names begin with ``prefix``."""
    kept = {n: f for n, f in machine.figures.items() if not n.startswith(prefix)}
    lines = ",\n".join(
        f'    "{name}": {{"value": {_number(name, figure.value)}, "origin": "{figure.origin}"}}'
        for name, figure in {**kept, **fitted}.items()
    )
    head = {"name": machine.name, "kind": machine.kind, "title": machine.title}
    text = json.dumps(head, indent=2)[:-2] + f',\n  "figures": {{\n{lines}\n  }}\n}}\n'
    path = Path(machines.__file__).with_name("machines") / f"{machine.name}.json"
    with written_aside(path) as aside:
        aside.write_text(text)


def _number(name: str, value: float) -> str:
    if value.is_integer() and value < 1e12:
        return str(int(value))
    return f"{value:.4g}" if name.startswith("time.") else repr(value).replace("e+", "e")
