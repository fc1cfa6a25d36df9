# SPDX-License-Identifier: Apache-2.0
"""End of a worker process of tuning jobs and races."""

from __future__ import annotations

import signal
import subprocess
from typing import IO


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
