# SPDX-License-Identifier: Apache-2.0
"""Analysis of a loop by LLVM's model of a CPU: ``llvm-mca``, a tool of LLVM's own packages."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from examples.benchmarks.assembly import Instruction, Loop

VERSIONS = range(30, 13, -1)
ITERATIONS = 200


class ModelError(Exception):
    """Failure of llvm-mca: it is not installed, or does not know the CPU or the code."""


@dataclass(frozen=True)
class Prediction:
    """Cycles of one iteration of a loop.

    Parameters
    ----------
    bound : float
        Cycles of its multiply-adds alone.
    block : float
        Cycles of the busiest unit: llvm-mca's reciprocal throughput of the block.
    simulated : float
        Cycles with latencies and the sizes of the queues.
    """

    bound: float
    block: float
    simulated: float

    @property
    def share(self) -> float:
        """Share of the multiply-add bound in the loop; 1 is best."""
        return self.bound / self.block


def find_mca(path: str | None = None) -> str:
    """The program: ``path`` if given, else the newest that is installed.

    Raises
    ------
    ModelError
        If there is none.
    """
    names = [path] if path else [*(f"llvm-mca-{version}" for version in VERSIONS), "llvm-mca"]
    tool = next(filter(None, map(shutil.which, names)), None)
    if tool is None:
        raise ModelError(
            f"{path or 'llvm-mca'} was not found: install LLVM's tools, for example the package "
            "llvm, or name the program by --llvm-mca"
        )
    return tool


def predict(program: str, loop: Loop, cpu: str, machine: str) -> Prediction:
    """Predict the cycles of a loop that is one block of instructions.

    Parameters
    ----------
    program : str
        Result of :func:`find_mca`.
    loop : Loop
        An innermost loop with multiply-adds.
    cpu, machine : str
        The CPU's name in LLVM, and ``x86_64`` or ``aarch64``.

    Raises
    ------
    ModelError
        If the program does not know the CPU or an instruction.
    """
    widest = max((i.vectors[-1] for i in loop.instructions if i.is_fma), key="xyz".find)
    one = _cycles(program, _multiply_adds(widest), cpu, machine)[0] / _ALONE
    block, simulated = _cycles(
        program, tuple(_code(i) for i in loop.instructions if not i.leaves), cpu, machine
    )
    return Prediction(loop.fmas * one, block, simulated)


_ALONE = 12  # independent multiply-adds: more than can be in flight


def _multiply_adds(kind: str) -> tuple[str, ...]:
    if kind in "xyz":
        return tuple(
            f"vfmadd231ps %{kind}mm14, %{kind}mm15, %{kind}mm{number}" for number in range(_ALONE)
        )
    return tuple(f"fmla v{number}.4s, v30.4s, v31.4s" for number in range(_ALONE))


def _code(instruction: Instruction) -> str:
    # Constants and labels that stand elsewhere are no part of the text.
    return re.sub(r":lo12:[\w.]+", "0", instruction.text)


@functools.lru_cache(maxsize=256)
def _cycles(program: str, code: Sequence[str], cpu: str, machine: str) -> tuple[float, float]:
    done = subprocess.run(
        [
            program,
            f"-mtriple={machine}-linux-gnu",
            f"-mcpu={cpu}",
            f"-iterations={ITERATIONS}",
            "--json",
        ],
        input="\n".join(code) + "\n",
        capture_output=True,
        text=True,
    )
    if done.returncode or "not a recognized processor" in done.stderr:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ModelError(f"{program} has no answer for {cpu}: {lines[0]}")
    summary = json.loads(done.stdout)["CodeRegions"][0]["SummaryView"]
    return summary["BlockRThroughput"], summary["TotalCycles"] / summary["Iterations"]
