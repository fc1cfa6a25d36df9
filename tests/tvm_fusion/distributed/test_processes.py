# SPDX-License-Identifier: Apache-2.0
"""Distributed programs between real processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mpi_ranks import needs_mpi, run_ranks
from rank_stencils import CASES_OF_RANKS, one_rank

PROGRAM = Path(__file__).parents[1] / "rank_stencils.py"


@needs_mpi
@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4, 7))]
)
def test_same_bits(ranks: int, tmp_path: Path) -> None:
    expected: dict[str, np.ndarray] = {}
    for case in CASES_OF_RANKS[ranks]:
        expected |= one_rank(case)
    np.savez(tmp_path / "expected.npz", **expected)
    outcome = run_ranks(ranks, PROGRAM, str(tmp_path / "expected.npz"))
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("all the same bits") == ranks
