# SPDX-License-Identifier: Apache-2.0
"""Exchanges and collectives between real processes, and the session around them."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mpi_ranks import ROOT, needs_mpi, run_ranks

from tvm_fusion.distributed.world.communicator import World
from tvm_fusion.errors import DistributedError

PROGRAM = Path(__file__).with_name("exchange_program.py")


@pytest.mark.slow  # two ranks have them in test_processes.py
@needs_mpi
@pytest.mark.parametrize("ranks", [1, 3, 4, 7])
def test_exchanges(ranks: int) -> None:
    outcome = run_ranks(ranks, PROGRAM)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("all checked") == ranks
    assert outcome.lines == []


def test_a_failure_of_mpi_at_the_start_names_the_exchange() -> None:
    class Refused:
        def Start(self) -> None:  # noqa: N802 - MPI's name
            raise OSError("no memory")

    request: Any = Refused()
    mpi = SimpleNamespace(BYTE=None, Exception=OSError)
    record: Any = SimpleNamespace(say=lambda text: None)
    world = World(mpi, SimpleNamespace(rank=0, size=2), record, {}, 1.0)
    prepared: Any = SimpleNamespace(
        name="in exchange 3",
        inside=b"",
        fits=lambda *_: True,
        incoming=[(request, None, None)],
        outgoing=[],
        requests=[(request, 1)],
    )
    world._prepared[3] = [prepared]
    exchange: Any = SimpleNamespace(id=3)
    with pytest.raises(DistributedError, match="MPI failed in exchange 3 with rank 1: no memory"):
        world.start(exchange, {})


def test_a_message_waits_until_the_last_one_was_taken_from_its_slot() -> None:
    done: list[str] = []

    class Outgoing:
        def Test(self, status: object = None) -> bool:  # noqa: N802 - MPI's name
            done.append("asked")
            return len(done) > 2

        def Start(self) -> None:  # noqa: N802 - MPI's name
            done.append("sent")

    request: Any = Outgoing()
    parcel: Any = SimpleNamespace(slot=object(), peer=1, pack=lambda: done.append("packed"))
    mpi = SimpleNamespace(BYTE=None, Exception=OSError)
    record: Any = SimpleNamespace(say=lambda text: None)
    world = World(mpi, SimpleNamespace(rank=0, size=2), record, {}, 1.0)
    prepared: Any = SimpleNamespace(
        name="in exchange 3",
        inside=b"",
        fits=lambda *_: True,
        incoming=[],
        outgoing=[(request, parcel)],
    )
    world._prepared[3] = [prepared]
    exchange: Any = SimpleNamespace(id=3)
    world.start(exchange, {})
    assert done == ["asked", "asked", "asked", "packed", "sent"]


@pytest.mark.slow
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
