# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md: its map is that of the code, and every function that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import family_map
from tests.selection import one_test

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
STEP = re.compile(r"`([\w.]+)`\s+in\s+\[[\w.]+\]\(([\w/.]+)\)")


def test_map_is_current() -> None:
    assert "schedules_cpu_core --> " in PAGE
    assert family_map.update(PAGE) == PAGE, "draw the map again by make map"


@one_test(STEP.findall(PAGE))
def test_walk(step: tuple[str, str]) -> None:
    name, path = step
    found: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for part in name.split("."):
        definitions = (ast.FunctionDef, ast.ClassDef)
        inner = [node for node in found if isinstance(node, definitions) and node.name == part]
        assert inner, f"{path} has no {name}"
        found = inner[0].body


def test_walks_are_found() -> None:
    assert len(STEP.findall(PAGE)) > 25
