# SPDX-License-Identifier: Apache-2.0
"""Processes of a job: the rank that a launcher gave to this one, and how a worker ended."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import IO

_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def launched_rank() -> int:
    """Rank that ``mpiexec`` or ``srun`` gave to this process; 0 where neither started it."""
    given = next((os.environ[name] for name in _VARIABLES if name in os.environ), "0")
    return int(given) if given.isdecimal() else 0


def how_it_ended(process: subprocess.Popen, log: IO[bytes]) -> tuple[str, str]:
    """Wait for a process that is ending.

    Returns
    -------
    how, last : str
        Its exit code or signal, and the last line of its log, maybe empty.
    """
    code = process.wait()
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    log.seek(0)
    said = log.read().decode(errors="replace").strip().splitlines()
    return how, said[-1] if said else ""
