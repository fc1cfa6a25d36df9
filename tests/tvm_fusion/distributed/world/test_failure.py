# SPDX-License-Identifier: Apache-2.0
"""Failures of one rank: the whole job ends, with one line that says which, where, with whom."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_ranks import needs_mpi, run_ranks

from tvm_fusion.distributed.world import failure, watch
from tvm_fusion.errors import DistributedError, OpError

PROGRAM = Path(__file__).with_name("failing_program.py")
AFTER = r"after exchange 3 with rank 0"
SIZES = r"(rank . sent \d+ bytes in exchange 3, and rank . expected|MPI failed in exchange 3 with)"
WAITED = r"rank 0 of . waited 1 s for rank 1"
KILLED = r"rank 1( of 2 was killed or crashed,)?"  # the others, too, where it is seen late
BACK = r"rank 1 of . waited 1 s for rank 0"  # both wait for each other

CASES = {
    "exception": rf"rank 1 of 2 raised ValueError: a wrong value, {AFTER}",
    "exit": rf"rank 1 of 2 ended by sys\.exit\(3\), {AFTER}",
    "exit without a code": rf"({WAITED} in exchange 3; rank 1 is|{BACK} at the end of the session)",
    "immediate exit": rf"rank 1 of 2 called os\._exit\(0\), {AFTER}",
    "kill": rf"{KILLED} {AFTER}",
    "kill in the exchange": rf"{KILLED} in exchange 3 with rank 0",
    "crash": rf"{KILLED} {AFTER}",
    "hang": rf"{WAITED} in exchange 3; rank 1 is {AFTER}",
    "barrier": rf"({WAITED} in a barrier; rank 1 is in exchange 3|{BACK} in exchange 3; rank 0 is)",
    "short message": rf"rank . of 2: {SIZES}",
    "long message": rf"rank . of 2: {SIZES}",
    "argument": r"rank . of 2 failed: sizes \[1\] of loop 'i' sum up to 1; expected its",
    "late start": r"rank 0 waited 1 s for the other ranks to begin their session",
    "no start": r"rank 0 waited 1 s for the other ranks to begin their session",
}
SLOW = pytest.mark.slow
LIKE_OTHERS = ("exit", "crash", "long message", "late start")
"""Those that differ from another one in the text or the signal alone."""


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=SLOW) if mode in LIKE_OTHERS else mode for mode in CASES],
)
def test_one_line_and_a_code(mode: str) -> None:
    outcome = run_ranks(2, PROGRAM, mode)
    assert outcome.code != 0
    assert len(outcome.lines) == 1, outcome.stderr
    assert re.search(CASES[mode], outcome.lines[0]), outcome.lines
    assert "ended well" not in outcome.stdout
    assert ("Traceback" in outcome.stderr) == (mode == "exception")


@pytest.mark.slow
@needs_mpi
def test_the_first_of_several_that_wait() -> None:
    outcome = run_ranks(4, PROGRAM, "hang")
    assert outcome.code != 0
    [line] = outcome.lines
    assert re.search(r"waited 1 s for rank", line) and f"rank 1 is {AFTER}" in line


@pytest.mark.slow
@needs_mpi
def test_who_has_sent_is_not_waited_for() -> None:
    outcome = run_ranks(3, PROGRAM, "second hangs")
    assert outcome.code != 0
    [line] = outcome.lines
    assert "rank 0 of 3 waited 1 s for rank 2 in exchange 4; rank 2 is after exchange 3" in line


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("ranks", "the program is for 4 ranks, and this job has 3; start it by mpiexec -n 4"),
        ("ranks of one", "the program of rank 1 is for 4 ranks, and this job has 3; start it by"),
        ("plans", "rank 1 and rank 0 have different plans: start the same program"),
    ],
)
def test_what_all_ranks_find_wrong_is_told_once(mode: str, text: str) -> None:
    outcome = run_ranks(3, PROGRAM, mode)
    assert outcome.code == 1
    assert outcome.stderr.count(text) == 1, outcome.stderr
    assert outcome.stderr.count("Traceback") == 1


def test_several_ranks_that_are_gone_are_told_together(tmp_path: Path, capsys) -> None:
    path = tmp_path / "record"
    path.write_bytes(watch.record_bytes(7))
    for slot in range(7):
        watch.NodeRecord(str(path), slot).say(watch.slot_text(f"after exchange {slot}"))
    watch._tell(watch.NodeRecord(str(path)), {"ranks": range(7), "size": 7}, range(6))
    told = capsys.readouterr().err
    assert told == (
        "tvm-fusion: 6 of 7 ranks were killed or crashed: rank 0 after exchange 0; rank 1 after "
        "exchange 1; rank 2 after exchange 2; rank 3 after exchange 3; and 2 more\n"
    )


@pytest.mark.slow
@needs_mpi
def test_no_half_written_output(tmp_path: Path) -> None:
    outcome = run_ranks(2, PROGRAM, "output", str(tmp_path / "y.npz"))
    assert outcome.code != 0 and len(outcome.lines) == 1
    assert not (tmp_path / "y.npz").exists()
    assert [path.name[:6] for path in tmp_path.iterdir()] == [".y.npz"]


@pytest.mark.slow
def test_without_mpi(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from tvm_fusion import distributed\n"
        "with distributed.session(): pass"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "DistributedError: mpi4py is not installed; install both by: pip" in done.stderr


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit(), None),
        (SystemExit(0), None),
        (SystemExit("no\nfile"), "ended by sys.exit('no\\nfile')"),
        (KeyboardInterrupt(), "was interrupted"),
        (DistributedError("waited  for rank 1"), "waited for rank 1"),
        (OpError("a wrong axis"), "failed: a wrong axis"),
        (KeyError(), "raised KeyError"),
    ],
)
def test_words(error: BaseException, text: str | None) -> None:
    assert failure.describe(error) == text
