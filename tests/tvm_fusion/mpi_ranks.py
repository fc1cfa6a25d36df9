# SPDX-License-Identifier: Apache-2.0
"""Start of Python programs on several ranks, as a user does: by ``mpiexec``."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from without_torch import importing_from, python

ROOT = Path(__file__).resolve().parents[2]
_BESIDE = Path(sys.executable).with_name("mpiexec")
MPIEXEC = str(_BESIDE) if _BESIDE.exists() else shutil.which("mpiexec")

needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or MPIEXEC is None,
    reason="MPI is not installed: pip install -e '.[mpi]'",
)
_BANNER = re.compile(r"\n=+\n=   BAD TERMINATION .*?debugging suggestions\n", re.DOTALL)
"""Banner of mpiexec, if it notices that a rank was killed before it has killed them all."""


@dataclass(frozen=True)
class Outcome:
    """End of a job: exit code, seconds, and what its ranks printed."""

    code: int
    seconds: float
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        """The lines of ours on standard error."""
        found = self.stderr.splitlines()
        return [line for line in found if line.startswith("tvm-fusion:")]


IN_TURN = Path(__file__).with_name("programs_in_turn.py")


def run_in_turn(ranks: int, *commands: tuple[Path | str, ...]) -> Outcome:
    """Run several files, each with its arguments, one after the other in the same processes."""
    return run_ranks(ranks, IN_TURN, json.dumps([list(map(str, each)) for each in commands]))


def run_ranks(ranks: int, program: Path | str, *arguments: str) -> Outcome:
    """Run a file or a module of the checkout on some ranks, without PyTorch."""
    assert MPIEXEC is not None
    environment = importing_from(ROOT, Path(__file__).parent, ROOT / "tests" / "schedules")
    begin = time.monotonic()
    done = subprocess.run(
        [MPIEXEC, "-n", str(ranks), *python(str(program), *arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment | {"TVM_NUM_THREADS": "1"},
    )
    seconds = time.monotonic() - begin
    return Outcome(done.returncode, seconds, _BANNER.sub("", done.stdout), done.stderr)
