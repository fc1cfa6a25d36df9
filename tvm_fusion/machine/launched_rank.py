# SPDX-License-Identifier: Apache-2.0
"""Rank that a launcher of parallel jobs gave to this process."""

from __future__ import annotations

import os

_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def launched_rank() -> int:
    """Rank that ``mpiexec`` or ``srun`` gave to this process; 0 where neither started it."""
    given = next((os.environ[name] for name in _VARIABLES if name in os.environ), "0")
    return int(given) if given.isdecimal() else 0
