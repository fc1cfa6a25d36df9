# SPDX-License-Identifier: Apache-2.0
"""Curves of collectives: a run of the command on two ranks, and the files that take them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mpi_ranks import needs_mpi, run_ranks

from schedules.cost.machine import load_machine
from tvm_fusion.distributed.collective_curves import KINDS
from tvm_fusion.prediction.collectives import collectives_of, load_collectives

PROGRAM = Path(__file__).with_name("collectives_program.py")


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
@needs_mpi
def test_command(tmp_path: Path) -> None:
    file = tmp_path / "collectives.json"
    outcome = run_ranks(2, "tvm_fusion.cli", "calibrate", "--collectives", "-o", str(file))
    assert outcome.code == 0, outcome.stderr
    for curve in load_collectives(file).curves.values():
        assert (curve.bytes[0], curve.bytes[-1], len(curve.bytes)) == (8, 16 << 20, 22)
        assert curve.kind in outcome.stdout


@needs_mpi
def test_one_rank(tmp_path: Path) -> None:
    file = tmp_path / "collectives.json"
    outcome = run_ranks(1, "tvm_fusion.cli", "calibrate", "--collectives", "-o", str(file))
    assert outcome.code == 1
    assert "one rank has no collectives; start at least 2 by mpiexec -n 2" in outcome.stderr
    assert not list(tmp_path.iterdir())
