# SPDX-License-Identifier: Apache-2.0
"""Map of the families and their imports: the picture in CONTRIBUTING.md.

    make map    # draws it again, from the code

An arrow from A to B says that modules of A import modules of B. Arrows that follow from others are
left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import grimp

STOREYS = ("tvm_fusion", "relay_passes", "schedules")
DEVICES = ("schedules.cpu", "schedules.gpu")
"""Folders that hold families themselves."""
FACE = "relay_passes"
"""Storey whose families are imported through it."""

PAGE = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
PICTURE = re.compile(r"(?<=```mermaid\n).*?(?=```)", re.DOTALL)


def draw() -> str:
    """Return the Mermaid text of the map."""
    imports = _without_implied(_imports_of_families())
    lines = ["flowchart TD"]
    for storey in STOREYS:
        inside = sorted(name for name in imports if name.startswith(f"{storey}."))
        lines += [f"  subgraph {storey}"]
        lines += [f'    {_node(name)}["{name.removeprefix(storey + ".")}"]' for name in inside]
        lines += ["  end"]
    for name in sorted(imports.keys() - {FACE}):
        lines += [f"  {_node(name)} --> {_node(other)}" for other in sorted(imports[name])]
    return "\n".join(lines) + "\n"


def _node(name: str) -> str:
    return name.replace(".", "_")


def _imports_of_families() -> dict[str, set[str]]:
    """Families that the modules of each family import."""
    graph = grimp.build_graph(*STOREYS)
    parents = (*STOREYS, *DEVICES)
    families = {
        child
        for parent in parents
        for child in graph.find_children(parent)
        if child not in DEVICES and graph.find_children(child)
    }

    def family(module: str) -> str | None:
        if module == FACE:
            return FACE
        return next((name for name in families if f"{module}.".startswith(f"{name}.")), None)

    imports: dict[str, set[str]] = {name: set() for name in (*families, FACE)}
    for module in graph.modules:
        own = family(module)
        if own is not None:
            found = map(family, graph.find_modules_directly_imported_by(module))
            imports[own].update(name for name in found if name not in (own, None))
    return imports


def _without_implied(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Imports that do not follow from a longer way (transitive reduction)."""

    def reached(name: str) -> set[str]:
        return set().union(*({other} | reached(other) for other in imports[name]))

    return {name: others - set().union(*map(reached, others)) for name, others in imports.items()}


def update(page: str) -> str:
    """Return a page with the map of today."""
    return PICTURE.sub(lambda _: draw(), page)


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text()))
