# SPDX-License-Identifier: Apache-2.0
"""Curves of collectives: a run of the command on two ranks, and the files that take them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_ranks import needs_mpi, run_ranks

from schedules.cost.machine import load_machine
from tvm_fusion.distributed.collective_curves import KINDS, process_group
from tvm_fusion.errors import DistributedError
from tvm_fusion.prediction.collectives import collectives_of, load_collectives

GROUP = """
import sys
from pathlib import Path
from tvm_fusion.distributed import collective_curves, process_group
with process_group.process_group("gloo", 60) as group:
    found = collective_curves.measure_collectives(
        group, (8, 100), rounds=1, kinds=process_group.KINDS, transport="gloo")
    if group.rank == 0:
        found.save(Path(sys.argv[1]))
"""

PROGRAM = Path(__file__).with_name("collectives_program.py")


@pytest.mark.slow
@needs_mpi
def test_all_kinds_are_measured_into_the_file_of_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(load_machine("v100").to_json()))
    outcome = run_ranks(3, PROGRAM, str(file))
    assert outcome.code == 0, outcome.stderr
    found = load_collectives(file)
    assert set(found.curves) == {(kind, 3) for kind in KINDS}
    for curve in found.curves.values():
        assert curve.bytes == (12, 108, 4104)  # whole elements for each of three ranks
        assert "with 3 ranks" in curve.origin and "rounds differ by" in curve.origin
    assert load_machine(file) == load_machine("v100")  # the figures are still there
    assert collectives_of(file) == found
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
def test_ranks_of_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GROUP, str(tmp_path / "gloo.json")],
            env=os.environ | rendezvous | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    found = load_collectives(tmp_path / "gloo.json")
    assert set(found.curves) == {(kind, 2) for kind in KINDS}
    for curve in found.curves.values():
        assert curve.bytes == (8, 104) and "gloo" in curve.origin and min(curve.seconds) > 0


def test_ranks_that_torchrun_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(DistributedError, match="no RANK, .* start the ranks by torchrun"):
        with process_group("gloo", 1):
            pass


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    values = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match="rank 1: PyTorch with gloo failed: "):
        with process_group("gloo", 1):
            pass


@pytest.mark.slow
@needs_mpi
def test_command(tmp_path: Path) -> None:
    file = tmp_path / "collectives.json"
    outcome = run_ranks(2, "tvm_fusion.cli", "calibrate", "--collectives", "-o", str(file))
    assert outcome.code == 0, outcome.stderr
    for curve in load_collectives(file).curves.values():
        assert (curve.bytes[0], curve.bytes[-1], len(curve.bytes)) == (8, 16 << 20, 22)
        assert curve.kind in outcome.stdout


@pytest.mark.slow
@needs_mpi
def test_one_rank(tmp_path: Path) -> None:
    file = tmp_path / "collectives.json"
    outcome = run_ranks(1, "tvm_fusion.cli", "calibrate", "--collectives", "-o", str(file))
    assert outcome.code == 1
    assert "one rank has no collectives; start at least 2 by mpiexec -n 2" in outcome.stderr
    assert not list(tmp_path.iterdir())
