# SPDX-License-Identifier: Apache-2.0
"""Two processes of one thread each that PyTorch connects by gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

RANKS = 2
THREADS = 1  # Threads of a rank.
PATIENCE = 1200.0  # seconds until all ranks have ended
ROOT = Path(__file__).resolve().parents[3]


def start_ranks(module: str, folder: Path, arguments: Sequence[str]) -> None:
    """Run a module as every rank, with a folder that they share as its first argument.

    Raises
    ------
    RuntimeError
        If a rank fails.
    """
    (folder / "meeting").unlink(missing_ok=True)
    command = [sys.executable, "-m", module, str(folder.resolve()), *arguments]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONPATH": paths}
    started = [
        subprocess.Popen(command, cwd=ROOT, env={**own, "RANK": str(rank)}) for rank in range(RANKS)
    ]
    try:
        codes = [one.wait(PATIENCE) for one in started]
    finally:
        for one in started:
            one.kill()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")


@contextmanager
def connected(folder: Path) -> Iterator[None]:
    """Connect this process, whose number RANK of the environment tells, with the others."""
    torch.set_num_threads(THREADS)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=RANKS)
    yield
    dist.destroy_process_group()
