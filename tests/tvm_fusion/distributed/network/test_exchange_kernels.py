# SPDX-License-Identifier: Apache-2.0
"""Exchanges by kernels between real processes: the bits of one rank, and failures."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tvm
from mpi_ranks import Outcome, needs_mpi, run_ranks
from rank_networks import network, network_case, saved_network

from examples.models import GraphBuilder
from examples.onnx_builder import random_inputs
from tvm_fusion import distributed
from tvm_fusion.distributed import build_network

PROGRAM = Path(__file__).with_name("network_program.py")


def run(ranks: int, mode: str, folder: Path) -> Outcome:
    return run_ranks(ranks, PROGRAM, mode, *saved_network(ranks, folder))


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_bits_of_one_rank(ranks: int, tmp_path: Path) -> None:
    """Also with more ranks than processors."""
    outcome = run(ranks, "run", tmp_path)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("ended well") == ranks
    assert outcome.lines == []


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (
            "hang",
            r"rank 0 of 2 waited 1 s for rank 1 in exchange 1; rank 1 is after exchange 7",
        ),
        ("kill", r"rank 1( of 2 was killed or crashed,)? after exchange 7 with rank 0"),
    ],
)
def test_failures_are_told_with_rank_exchange_and_peer(
    mode: str, text: str, tmp_path: Path
) -> None:
    outcome = run(2, mode, tmp_path)
    assert outcome.code != 0
    assert len(outcome.lines) == 1, outcome.stderr
    assert re.search(text, outcome.lines[0]), outcome.lines
    assert outcome.seconds < 20


@pytest.mark.slow
def test_programs_of_format_9_exchange_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_network, "CompileExchanges", lambda _: tvm.transform.Sequential([]))
    feed, expected = network_case()
    model = distributed.compile_network(network(), 2, threads=1, exchange="always")
    assert not model.plan.takes_table
    result, _ = distributed.run_ranks(2, lambda world: model.on(world)(**feed))
    np.testing.assert_array_equal(result, expected)


@pytest.mark.slow
@needs_mpi
def test_a_message_too_long_for_a_slot_beside_others(tmp_path: Path) -> None:
    """Rank 0 gathers 800 KB, which the kernel of rank 1 puts into a slot, and 1.2 MB by MPI."""
    shape = 1, 1, 7, 100_000
    net = GraphBuilder("wide", shape, 1)
    wide = net.finish(net.activation(net.input, "relu"), list(shape))
    model = distributed.compile_network(wide, 3, threads=1, exchange="always")
    model.save(tmp_path / "model.so")
    [(name, x)] = random_inputs(wide, 3).items()
    np.savez(tmp_path / "arrays.npz", expected=np.maximum(x, 0), **{name: x})
    files = str(tmp_path / "model.so"), str(tmp_path / "arrays.npz")
    outcome = run_ranks(3, PROGRAM, "mixed", *files)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("ended well") == 3
