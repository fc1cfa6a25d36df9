# SPDX-License-Identifier: Apache-2.0
"""Distributed programs between real processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mpi_ranks import needs_mpi, run_in_turn, run_ranks
from rank_networks import saved_network
from rank_stencils import CASES_OF_RANKS, one_rank

PROGRAM = Path(__file__).parents[1] / "rank_stencils.py"


def expected_bits(ranks: int, folder: Path) -> str:
    """File of what one rank computes."""
    expected: dict[str, np.ndarray] = {}
    for case in CASES_OF_RANKS[ranks]:
        expected |= one_rank(case)
    np.savez(folder / "expected.npz", **expected)
    return str(folder / "expected.npz")


@needs_mpi
def test_programs_of_two_ranks(tmp_path: Path) -> None:
    """Exchanges, stencils, reductions and a network in one job."""
    here = Path(__file__).parent
    outcome = run_in_turn(
        2,
        (here / "world" / "exchange_program.py",),
        (PROGRAM, expected_bits(2, tmp_path)),
        (here / "reduce_program.py", "few"),
        (here / "network" / "network_program.py", "run", *saved_network(2, tmp_path)),
    )
    assert outcome.code == 0, outcome.stderr
    said = {"all checked": 4, "all the same bits": 2, "ended well": 2}
    assert {text: outcome.stdout.count(text) for text in said} == said


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("ranks", [1, 3, 4, 7])
def test_same_bits(ranks: int, tmp_path: Path) -> None:
    outcome = run_ranks(ranks, PROGRAM, expected_bits(ranks, tmp_path))
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("all the same bits") == ranks
