# SPDX-License-Identifier: Apache-2.0
"""Exchanges and collectives between real processes, and the session around them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mpi_ranks import ROOT, needs_mpi, run_ranks

PROGRAM = Path(__file__).with_name("exchange_program.py")


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 7])
def test_exchanges(ranks: int) -> None:
    outcome = run_ranks(ranks, PROGRAM)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("all checked") == ranks
    assert outcome.lines == []


def test_only_the_communicator_imports_mpi() -> None:
    found = set()
    storeys = ("tvm_fusion", "relay_passes", "schedules")
    for path in (path for storey in storeys for path in (ROOT / storey).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names.append(node.module)
            if any(name.split(".")[0] == "mpi4py" for name in names):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == {"tvm_fusion/distributed/world/communicator.py"}
