# SPDX-License-Identifier: Apache-2.0
"""Reductions over real processes: every operator, type and form, empty parts, bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi_ranks import needs_mpi, run_ranks

PROGRAM = Path(__file__).with_name("reduce_program.py")


@needs_mpi
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(3, "some")]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((3, "all"), (5, "few"))],
)
def test_reductions(ranks: int, cases: str) -> None:
    outcome = run_ranks(ranks, PROGRAM, cases)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("all checked") == ranks
