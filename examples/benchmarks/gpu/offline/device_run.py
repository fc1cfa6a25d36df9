# SPDX-License-Identifier: Apache-2.0
"""Run of all stages on a GPU without TVM, within a number of seconds; ``device_run.sh`` starts it.

    python -m examples.benchmarks.gpu.offline.device_run PACKED RESULTS SECONDS [STAGE...]

A stage is a process; one that dies is started again behind the case that killed it. The results are
RESULTS/DEVICE/run-N, such as h200/run-1: run.jsonl with a line a result, table.txt, and reports of
NVIDIA's tools. What the machine lacks is said, and left out.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tvm_fusion.errors import TargetError
from tvm_fusion.machine.cuda_toolkit import find_program
from tvm_fusion.runtime.tvm_runtime import find_device

from ..machine import folder_name
from .kernel_cases import small_cases, timed_cases
from .model_cases import MODELS
from .stages import NO_GPU, Log, packed, read_log
from .table import table

STAGES = {
    "device": 40,
    "check": 60,
    "reduction": 120,
    "product": 70,
    "attention": 50,
    "norm": 60,
    "convolution": 70,
    "model": 90,
}
"""Most seconds of each stage."""
CANDIDATES = "candidates"
"""The stage that races candidates of a tuning job, and their folder among the cases."""
CANDIDATE_SECONDS = 120.0
ATTEMPTS = 4
_SPARE = 5.0  # seconds in which a stage ends by itself, before it is killed
_LEAST = 8.0  # seconds that a stage needs at all
NCU = "ncu"
NCU_SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "MemoryWorkloadAnalysis")
NCU_CASES = (
    "product/4096x4096x4096",
    "attention/1x16x2048x64",
    "convolution/resnet-50 stage 3, batch 8",
    "norm/softmax 8192x8192",
    "reduction/sweep float32 2^24",
)
SANITIZER = "compute-sanitizer"
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*")


class Run:
    """The stages of a run.

    Parameters
    ----------
    cases : Path
        Folder of the compiled ones.
    folder : Path
        Folder of the results; it exists.
    seconds : float
        All that there is.
    """

    def __init__(self, cases: Path, folder: Path, seconds: float) -> None:
        self.cases, self.folder = cases, folder
        self.path = folder / "run.jsonl"
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def command(self, stage: str, seconds: float, *names: str) -> list[str]:
        """Command of a stage."""
        module = [sys.executable, "-m", "examples.benchmarks.gpu.offline.stages"]
        return [*module, str(self.cases), str(self.path), stage, f"{seconds:.0f}", *names]

    def stage(self, name: str, most: float) -> int | None:
        """Run a stage, again where it died in the middle; the last exit code, None for no end."""
        end = min(time.monotonic() + most, self.end)
        for _ in range(ATTEMPTS):
            seconds = end - time.monotonic()
            if seconds < _LEAST:
                self.tell(name, "no time is left")
                return None
            start, before = time.monotonic(), len(Log(self.path, name).begun)
            code = self.call(self.command(name, seconds - _SPARE), seconds, self.folder / "log.txt")
            ended = "its time was over" if code is None else f"ended with {code}"
            self.tell(name, f"{ended} after {time.monotonic() - start:.0f} s, {self.left:.0f} left")
            begun = [line["case"] for line in read_log(self.path) if "begun" in line]
            if code in (0, NO_GPU, None) or len(Log(self.path, name).begun) == before:
                break
            Log(self.path, name).put(
                begun[-1], engine="tvm-fusion", problem=f"the process ended with {code}"
            )
        return code

    def stages(self, names: Sequence[str]) -> None:
        """Run stages of which something was packed; those with PyTorch's clock need its GPU."""
        groups = {
            case.group for case in packed(self.cases, [*small_cases(), *timed_cases(), *MODELS])
        }
        has_gpu = True
        for name in names:
            if name == "device":
                has_gpu = self.stage(name, STAGES[name]) != NO_GPU
            elif (name == "check" and "small" in groups) or (name in groups and has_gpu):
                self.stage(name, STAGES[name])
            else:
                self.tell(name, "left out: " + ("nothing was packed" if has_gpu else "no GPU"))

    def candidates(self) -> None:
        """Race candidates, if some were packed; records.jsonl is for tvm-fusion tune --import."""
        folder = self.cases / CANDIDATES
        if not folder.exists() or self.left < _LEAST:
            self.tell(CANDIDATES, "no time is left" if folder.exists() else "none were packed")
            return
        seconds = min(CANDIDATE_SECONDS, self.left)
        limits = [str(self.folder / "records.jsonl"), f"{seconds - _SPARE:.0f}"]
        module = [sys.executable, "-m", "tvm_fusion.tuning.candidates"]
        code = self.call([*module, str(folder), *limits], seconds, self.folder / "candidates.txt")
        self.tell(CANDIDATES, f"ended with {code}, see candidates.txt, {self.left:.0f} left")

    def counters(self) -> None:
        """Counters of a few kernels by Nsight Compute."""
        tool = find_program(NCU)
        if tool is None or self.left < _LEAST:
            self.tell(NCU, "is not on this machine" if tool is None else "no time is left")
            return
        sections = [word for name in NCU_SECTIONS for word in ("--section", name)]
        report = ["--csv", "--page", "details", "--log-file", str(self.folder / "ncu.csv")]
        clocks = ["--clock-control", "none"]
        command = self.command(NCU, self.left, *NCU_CASES)
        most = min(60.0, self.left)
        code = self.call(
            [str(tool), *sections, *report, *clocks, *command], most, self.folder / "ncu.txt"
        )
        self.tell(NCU, f"ended with {code}, see ncu.csv")

    def sanitize(self) -> None:
        """The small kernels under each tool of compute-sanitizer, in what time is left."""
        tool = find_program(SANITIZER)
        if tool is None:
            self.tell(SANITIZER, "is not on this machine")
            return
        names = [case.name for case in small_cases()]
        for kind in SANITIZER_TOOLS:
            if self.left < _LEAST:
                self.tell(kind, "no time is left")
                continue
            report = self.folder / f"{kind}.txt"
            checks = ["--tool", kind, "--error-exitcode", "9", "--log-file", str(report)]
            command = self.command(kind, self.left, *names)
            code = self.call([str(tool), *checks, *command], self.left, self.folder / "log.txt")
            text = report.read_text(errors="replace") if report.exists() else ""
            told = _SUMMARY.findall(text)
            self.tell(kind, f"ended with {code}: {told[-1] if told else 'no summary'}")
            if code != 0:
                Log(self.path, kind).put(SANITIZER, problem=f"{kind} ended with {code}")

    def call(self, command: Sequence[str], seconds: float, log: Path) -> int | None:
        """Exit code of a process; None if it was killed, as its time was over."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True
            )
            try:
                return process.wait(max(seconds, 1.0))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # Ends what torch.compile has started, too.
                process.wait()
                return None

    def tell(self, what: str, text: str) -> None:
        """Print a line at once."""
        print(f"{what}: {text}", flush=True)


def new_folder(parent: Path) -> Path:
    """A folder for one run, numbered after those that there are."""
    number = 1
    while (parent / f"run-{number}").exists():
        number += 1
    folder = parent / f"run-{number}"
    folder.mkdir(parents=True)
    return folder


def main(arguments: Sequence[str]) -> int:
    """Run all stages, or those named, and print the table; 1 if a result of ours is wrong."""
    cases, results, seconds, *names = arguments
    known = (*STAGES, CANDIDATES, NCU, SANITIZER)
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown stage {unknown[0]!r}; expected one of {', '.join(known)}")
        return 2
    try:
        name = folder_name(find_device("cuda").name)
    except TargetError as error:
        print(f"no GPU can be used: {error}")
        return 2
    folder = new_folder(Path(results) / name)
    run = Run(Path(cases), folder, float(seconds))
    run.stages([stage for stage in STAGES if not names or stage in names])
    later = {CANDIDATES: run.candidates, NCU: run.counters, SANITIZER: run.sanitize}
    for stage, work in later.items():
        if not names or stage in names:
            work()
    lines = read_log(run.path)
    index = Path(cases) / "cases.json"
    text = table(lines, json.loads(index.read_text()) if index.exists() else {})
    (folder / "table.txt").write_text(text + "\n")
    print(text, flush=True)
    ours = [line for line in lines if line.get("engine") == "tvm-fusion"]
    return 1 if any("problem" in line for line in ours) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
