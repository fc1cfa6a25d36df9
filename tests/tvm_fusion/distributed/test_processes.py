# SPDX-License-Identifier: Apache-2.0
"""Distributed programs between real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi_ranks import needs_mpi, run_ranks

PROGRAM = Path(__file__).with_name("stencil_program.py")


@needs_mpi
@pytest.mark.parametrize("ranks", [3, 7])
def test_same_bits(ranks: int) -> None:
    outcome = run_ranks(ranks, PROGRAM)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("all the same bits") == ranks
