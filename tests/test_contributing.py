# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md: its map is that of the code, and every function that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import family_map
from schedules import attributes
from tests.selection import one_test

FAMILIES = ("schedules", "relay_passes", "tvm_fusion")
FACES = {
    "tvm_fusion/__init__.py",
    "tvm_fusion/plugin.py",
    "tvm_fusion/cli/command_line.py",
    "tvm_fusion/distributed/__init__.py",
}
"""Files that import what a name means when it is asked for."""

MOST_MODULES = 16
"""Modules that a folder may have beside its ``__init__``."""

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


@cache
def constants_and_calls() -> list[tuple[Path, ast.Constant | ast.Call]]:
    """Constants and calls of all modules and of what generates the pages, with their files."""
    return [
        (path, node)
        for family in (*FAMILIES, "docs/generate.py")
        for path in ([ROOT / family] if family.endswith(".py") else (ROOT / family).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant | ast.Call)
    ]


def test_names_of_attributes_stand_in_one_file() -> None:
    names = {value for name, value in vars(attributes).items() if name.isupper()}
    assert len(names) > 30
    wrong = [
        f"{path}:{node.lineno}: {node.value}"
        for path, node in constants_and_calls()
        if path != Path(attributes.__file__)
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not wrong, "take these from schedules.attributes:\n" + "\n".join(wrong)


def test_folders_are_small() -> None:
    """A reader sees a folder at a glance."""
    folders = {path.parent for family in FAMILIES for path in (ROOT / family).rglob("__init__.py")}
    sizes = {folder: len(list(folder.glob("*.py"))) - 1 for folder in folders}
    assert len(sizes) > 50
    assert not {folder: size for folder, size in sizes.items() if size > MOST_MODULES}


def test_only_faces_import_our_modules_by_a_string() -> None:
    """The linter of imports does not see strings."""
    wrong = [
        f"{path}:{node.lineno}"
        for path, node in constants_and_calls()
        if str(path.relative_to(ROOT)) not in FACES
        if isinstance(node, ast.Call) and _imports_ours(node)
    ]
    assert not wrong, "import these by a statement, or register them:\n" + "\n".join(wrong)


def _imports_ours(call: ast.Call) -> bool:
    """Return whether a call imports a module by a string that may be the name of one of ours."""
    if ast.unparse(call.func) not in ("importlib.import_module", "import_module", "__import__"):
        return False
    module = call.args[0]
    is_known = isinstance(module, ast.Constant)
    return not is_known or module.value.partition(".")[0] in ("", *FAMILIES)
