# SPDX-License-Identifier: Apache-2.0
"""Curves of collectives: a run of the command on two ranks, and the files that take them."""

from __future__ import annotations

import json
from pathlib import Path

from mpi_ranks import needs_mpi, run_ranks

from schedules.cost.machine import load_machine
from tvm_fusion.distributed.collective_curves import KINDS
from tvm_fusion.prediction.collectives import collectives_of, load_collectives


@needs_mpi
def test_command(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(load_machine("v100").to_json()))
    job = ("tvm_fusion.cli", "calibrate", "--collectives", "--output", str(file))
    outcome = run_ranks(2, *job)
    assert outcome.code == 0, outcome.stderr
    found = load_collectives(file)
    assert set(found.curves) == {(kind, 2) for kind in KINDS}
    for (kind, _), curve in found.curves.items():
        assert len(curve.bytes) == 22 and curve.bytes[0] == 8, kind
        assert curve.seconds[-1] > 10 * curve.seconds[0], kind
        assert "with 2 ranks" in curve.origin and "rounds differ by" in curve.origin
    assert load_machine(file) == load_machine("v100")  # the figures are still there
    assert collectives_of(file) == found
    assert list(tmp_path.iterdir()) == [file]


@needs_mpi
def test_one_rank(tmp_path: Path) -> None:
    file = tmp_path / "collectives.json"
    outcome = run_ranks(1, "tvm_fusion.cli", "calibrate", "--collectives", "-o", str(file))
    assert outcome.code == 1
    assert "one rank has no collectives; start at least 2 by mpiexec -n 2" in outcome.stderr
    assert not list(tmp_path.iterdir())
