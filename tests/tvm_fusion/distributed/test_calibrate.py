# SPDX-License-Identifier: Apache-2.0
"""Calibration: the fit, the file, and a run of the command on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mpi_ranks import needs_mpi, run_ranks

from schedules.cost.machine import load_machine, machine_from_json
from schedules.distribute.cost import Network
from tvm_fusion.distributed.calibrate import SIZES, fit, write_machine
from tvm_fusion.distributed.network_figures import network_of, processor_of
from tvm_fusion.distributed.world.packing import ROUTES, ParcelShape, is_figure, packing_of
from tvm_fusion.errors import ArtifactError, PredictionError


def test_fit_finds_latency_and_bandwidth() -> None:
    latency, bandwidth = fit(SIZES, [2e-6 + size / 1e10 for size in SIZES])
    assert latency == pytest.approx(2e-6) and bandwidth == pytest.approx(1e10)


@pytest.mark.slow
@needs_mpi
def test_command(tmp_path: Path) -> None:
    file = tmp_path / "network.json"
    outcome = run_ranks(2, "tvm_fusion.cli", "calibrate", "--network", "--output", str(file))
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("network.latency") == 1
    assert outcome.stdout.count("network.progress") == 1  # also where it is nothing
    machine = load_machine(file)
    network = network_of(machine)
    assert network.latency > 0 and network.bandwidth > 0 and 0 <= network.progress <= 1
    assert network.is_shared
    assert "measured by calibrate with 2 ranks" in machine.figures["network.latency"].origin
    assert machine["exchange_seconds.16777216"] > machine["exchange_seconds.8"]
    parcels = [name for name in machine.figures if is_figure(name)]
    assert outcome.stdout.count("routes of parcels") == 1 and len(parcels) > 300
    assert set(packing_of(machine)(ParcelShape(65536, 256))) == set(ROUTES)
    processor = processor_of(machine)
    assert processor.rate > 1e8 and processor.bandwidth > 1e8 and processor.node_ranks == 2
    assert processor.node_bandwidth is not None and processor.node_bandwidth > 1e8
    assert sorted(tmp_path.iterdir()) == [file]


@pytest.mark.slow
@needs_mpi
def test_one_rank(tmp_path: Path) -> None:
    outcome = run_ranks(
        1, "tvm_fusion.cli", "calibrate", "--network", "--output", str(tmp_path / "network.json")
    )
    assert outcome.code == 1
    assert "one rank exchanges nothing; start at least 2 by mpiexec -n 2" in outcome.stderr
    assert not list(tmp_path.iterdir())


def test_files(tmp_path: Path) -> None:
    figures = {"network.latency": 2e-6, "network.bandwidth": 1e10, "network.progress": 0.5}
    named = {name: {"value": value, "origin": "a test"} for name, value in figures.items()}
    machine = machine_from_json({"name": "n", "kind": "cpu", "title": "N", "figures": named})
    write_machine(machine, tmp_path / "n.json")
    assert network_of(load_machine(tmp_path / "n.json")) == Network(2e-6, 1e10, 0.5)
    assert json.loads((tmp_path / "n.json").read_text())["name"] == "n"
    with pytest.raises(ArtifactError, match="cannot write .*: No such file or directory"):
        write_machine(machine, tmp_path / "no" / "n.json")
    with pytest.raises(PredictionError, match="no figure 'network.latency'"):
        network_of(load_machine("v100"))
    with pytest.raises(PredictionError, match="no figure 'rank.rate'"):
        processor_of(machine)
