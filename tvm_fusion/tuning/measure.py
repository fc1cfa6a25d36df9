# SPDX-License-Identifier: Apache-2.0
"""Measurement of settings: they are built here, and race in a process of their own.

The process runs on this machine (:class:`Host`), or is started there by a server
(:class:`.remote.RemoteHost`); what it does is the same.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo

from ..codegen.device_code import machine_code_of
from ..codegen.linker import SharedLinker
from ..codegen.nvrtc import tvm_compiler
from ..compiler.targets.target import host_of, is_gpu
from ..errors import TuningError
from ..machine.ended_process import how_it_ended
from ..machine.host import physical_cores
from ..machine.host_info import cpu_name
from ..runtime.device import DeviceInfo
from .database import measuring
from .worker import BEACON, REFERENCE

PATIENCE = 10.0
"""Seconds without a new call after which a candidate counts as hanging."""
REFERENCE_PATIENCE = 300.0

_LONGEST_VECTOR = 1024  # of the code that writes a tensor

ROOT = Path(__file__).resolve().parents[2]
# TVM's runtime imports PyTorch where it finds it, which would be most of a measuring process.
_BOOT = (
    "import runpy, sys; sys.modules['torch'] = None; "
    "sys.path[:1] = [sys.argv.pop(1)]; runpy.run_module({!r}, run_name={!r})"
)


@dataclass(frozen=True)
class KernelSequence:
    """Kernels that are called one after another.

    Parameters
    ----------
    mod : IRModule
        Their functions.
    calls : tuple of (str, tuple of int)
        Functions with the numbers of their arguments: the task's tensors, the output last, then
        constants, then buffers.
    constants : tuple of array
        Weights of these kernels alone.
    buffers : tuple of (shape, dtype)
        Tensors between the kernels.
    """

    mod: tvm.IRModule
    calls: tuple[tuple[str, tuple[int, ...]], ...]
    constants: tuple[np.ndarray, ...] = ()
    buffers: tuple[tuple[tuple[int, ...], str], ...] = ()


class Subject(Protocol):
    """Subject of a session: a task whose settings are numbered, the default being 0.

    ``weights`` are the numbers of those of its tensors that are weights; the last ``outputs``
    tensors are outputs.
    """

    machine: Any
    weights: tuple[int, ...]
    outputs: int

    @property
    def name(self) -> str:
        """For messages."""

    def program(self, number: int, target: Target) -> KernelSequence:
        """Write a setting."""

    def reference(self, target: Target) -> KernelSequence:
        """Return what computes the right output."""

    def tensors(self, generator: np.random.Generator) -> list[np.ndarray]:
        """Draw the tensors that all settings share, the outputs last."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a setting's measurement.

    Parameters
    ----------
    ratio : float | None
        Its time over that of the default, the geometric mean of ``states``; None for a failure.
    failure : str
        ``compile``, ``hang``, ``crash`` or ``wrong``; empty otherwise.
    reason : str
        Of the failure.
    states : tuple of float
        The ratio in each state of the caches, median over its rounds.
    """

    ratio: float | None
    failure: str = ""
    reason: str = ""
    states: tuple[float, ...] = ()

    @classmethod
    def of_rounds(cls, rounds: Sequence[Sequence[Any]], position: int, states: int) -> Outcome:
        """Compare the candidate at ``position`` with the one at 0, round by round."""
        ratios = [turn[position] / turn[0] for turn in rounds]
        found = tuple(statistics.median(ratios[state::states]) for state in range(states))
        return cls(statistics.geometric_mean(found), states=found)


class LostWorker(Exception):
    """A measuring process that hangs or died while a candidate ran."""

    def __init__(self, candidate: int, failure: str, reason: str) -> None:
        super().__init__(reason)
        self.candidate, self.failure, self.reason = candidate, failure, reason


class LostHost(Exception):
    """A machine that no longer answers; its work can be done by another."""


class Worker(Protocol):
    """A measuring process, here or elsewhere."""

    def call(self, patience: float, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer; the machine measures nothing else."""

    def close(self) -> None:
        """End the process."""


class Host:
    """A machine on which settings race: this one."""

    @property
    def processor(self) -> str:
        """Name of the processor as its maker spells it."""
        return cpu_name()

    def start(self, threads: int, folder: Path) -> Worker:
        """Start a measuring process, whose files lie in ``folder``."""
        return MeasuringWorker(threads, folder)

    def place(self, path: Path) -> str:
        """Make a file readable there, and return the name by which its process opens it."""
        return str(path)

    def clear(self) -> None:
        """Remove the files that were placed."""


class DeviceHost(Host):
    """A GPU of this machine.

    Parameters
    ----------
    device : DeviceInfo
        The GPU.
    """

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device

    @property
    def processor(self) -> str:
        """Name of the GPU in its driver."""
        return self.device.name

    def start(self, threads: int, folder: Path) -> Worker:
        """Start a measuring process, which holds the GPU's runtime."""
        return MeasuringWorker(threads, folder, self.device.kind)


class Pool:
    """Machines of a job, which have the same CPU or GPU: this one.

    Parameters
    ----------
    target : Target
        What is compiled for them.
    cpu : CPUInfo | None
        Their CPU; None where kernels run on a GPU.
    hosts : sequence of Host
        The machines.
    """

    def __init__(self, target: Target, cpu: CPUInfo | None, hosts: Sequence[Host]) -> None:
        self.target, self.cpu, self.hosts = target, cpu, hosts
        self.notes: list[str] = []

    def replace(self, host: Host, error: LostHost) -> Host | None:
        """Return another machine for a lost one, if there is one."""
        return None

    def stop(self) -> None:
        """End all calls that wait for an answer."""

    def close(self) -> None:
        """Give the machines back."""


class MeasuringWorker:
    """A measuring process on this machine.

    Parameters
    ----------
    threads : int
        Threads of a kernel.
    folder : Path
        For its files.
    device : str
        Kind of the GPU on which kernels run; empty for the CPU.
    """

    def __init__(self, threads: int, folder: Path, device: str = "") -> None:
        self._log = tempfile.TemporaryFile()
        self._beacon_file = tempfile.NamedTemporaryFile(dir=folder)
        self._beacon_file.truncate(BEACON.size)
        self._beacon = mmap.mmap(self._beacon_file.fileno(), BEACON.size)
        self._answers, theirs = os.pipe()
        module = "device_worker" if device else "worker"
        boot = _BOOT.format(f"{__package__}.{module}", "__main__")
        command = [sys.executable, "-c", boot, str(ROOT), str(theirs)]
        self._process = subprocess.Popen(
            [*command, self._beacon_file.name, device or str(threads)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TVM_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs],
            start_new_session=True,  # Ctrl-C is for the parent
        )
        os.close(theirs)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def call(self, patience: float, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer, while no other job measures on this machine.

        Raises
        ------
        LostWorker
            If the process dies, or begins no new call for ``patience`` seconds.
        """
        with measuring():
            return self._call(patience, request)

    def _call(self, patience: float, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        text, seen = b"", self._position()
        while not text.endswith(b"\n"):
            if select.select([self._answers], [], [], patience)[0]:
                piece = os.read(self._answers, 1 << 16)
                if not piece:
                    reason = ": ".join(filter(None, how_it_ended(self._process, self._log)))
                    raise LostWorker(self._position()[0], "crash", reason)
                text += piece
                continue
            if self._position() == seen:
                raise LostWorker(seen[0], "hang", f"no answer for {patience:g} s")
            seen = self._position()
        return json.loads(text)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._answers)
        self._beacon.close()
        self._beacon_file.close()
        self._log.close()

    def _position(self) -> tuple[int, int]:
        return BEACON.unpack(self._beacon[: BEACON.size])


class Session:
    """Measurements of one task's settings, each against the default.

    Parameters
    ----------
    task : Subject
        The kernel, or the forms of a layer or a pair.
    target : Target
        The machine on which they race.
    seed : int
        Of the tensors and of the order of turns.
    host : Host, optional
        Where they race; by default on this machine.
    patience : float
        Seconds after which a candidate counts as hanging.
    """

    def __init__(
        self,
        task: Subject,
        target: Target,
        seed: int,
        host: Host | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self.task, self.target, self.seed, self.patience = task, target, seed, patience
        self.host = host or Host()
        self._folder = tempfile.TemporaryDirectory(prefix="tvm-fusion-tune-")
        self.folder = Path(self._folder.name)
        self._worker: Worker | None = None
        self._built: dict[int, _Built | Outcome] = {}
        self._reference: _Built | None = None
        self._races = 0

    def __enter__(self) -> Session:
        """Return the session; its process starts with the first race."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End the process, and remove all files."""
        try:
            self.end_worker()
            self.host.clear()
        except LostHost:
            pass  # nothing is left there
        finally:
            self._folder.cleanup()

    def end_worker(self) -> None:
        """End the process; the next race begins in a fresh one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def build(self, numbers: Sequence[int]) -> None:
        """Build settings into libraries, two or more at a time; failures are outcomes."""
        todo = [number for number in dict.fromkeys(numbers) if number not in self._built]
        pool = ThreadPoolExecutor(physical_cores())
        try:
            built = pool.map(self._build_one, todo)
            self._built |= dict(zip(todo, built, strict=True))
        finally:
            pool.shutdown(cancel_futures=True)

    def _build_one(self, number: int) -> _Built | Outcome:
        try:
            return self._compiled(self.task.program(number, self.target), str(number))
        except Exception as error:  # TVM and LLVM raise anything
            text = " ".join(str(error).split())[-200:]
            return Outcome(None, "compile", f"{type(error).__name__}: {text}")

    def _compiled(self, program: KernelSequence, name: str, target: Target | None = None) -> _Built:
        """Compile a program into files of this name, for another target if one is given."""
        constants = []
        for number, array in enumerate(program.constants):
            constants.append(self.folder / f"{name}-{number}.npy")
            np.save(constants[-1], array, allow_pickle=False)
        path = library(program.mod, target or self.target, self.folder / f"{name}.so")
        return _Built(path, program.calls, tuple(constants), program.buffers)

    def race(
        self, numbers: Sequence[int], rounds: tuple[int, int], seconds: float
    ) -> tuple[dict[int, Outcome], float]:
        """Build and race settings against the default, which is number 0.

        Returns
        -------
        tuple[dict[int, Outcome], float]
            Outcome of each of ``numbers``, and the default's seconds: of its medians in the states
            of the caches the geometric mean.

        Raises
        ------
        TuningError
            If the default itself, or the reference, fails.
        """
        self.build([0, *numbers])
        outcomes: dict[int, Outcome] = {}
        while True:
            racers = [0, *(number for number in numbers if number not in outcomes and number)]
            for number in racers:
                built = self._built[number]
                if isinstance(built, Outcome):
                    outcomes[number] = built
            racers = [number for number in racers if number not in outcomes]
            self._check_default(outcomes)
            try:
                found = self._race_once(racers, rounds, seconds)
            except LostWorker as lost:
                self.end_worker()
                if lost.candidate == REFERENCE:
                    raise TuningError(
                        f"the reference of {self.task.name} failed: {lost.reason}"
                    ) from lost
                outcomes[racers[lost.candidate]] = Outcome(None, lost.failure, lost.reason)
                self._check_default(outcomes)
                continue
            break
        for position, error in found["wrong"].items():
            outcomes[racers[int(position)]] = Outcome(None, "wrong", error)
        self._check_default(outcomes)
        times = found["times"]
        states = min(found["states"], len(times))
        for position, number in enumerate(racers):
            if number not in outcomes:
                outcomes[number] = Outcome.of_rounds(times, position, states)
        own = [statistics.median(turn[0] for turn in times[s::states]) for s in range(states)]
        return outcomes, statistics.geometric_mean(own)

    def _check_default(self, outcomes: dict[int, Outcome]) -> None:
        if 0 in outcomes and outcomes[0].failure:
            found = outcomes[0]
            raise TuningError(
                f"the default of {self.task.name} failed ({found.failure}): {found.reason}"
            )

    def _race_once(
        self, racers: Sequence[int], rounds: tuple[int, int], seconds: float
    ) -> dict[str, Any]:
        if self._worker is None:
            self._worker = self._start()
        self._races += 1
        return self._worker.call(
            self.patience,
            action="race",
            candidates=[self._placed(self._built[number]) for number in racers],
            rounds=rounds,
            seconds=seconds,
            seed=self.seed + self._races,
        )

    def _placed(self, built: _Built | Outcome) -> dict[str, Any]:
        """Bring the files of a program to the machine, and describe it to its process."""
        assert isinstance(built, _Built)
        place = self.host.place
        return {
            "library": place(built.library),
            "calls": built.calls,
            "constants": [place(path) for path in built.constants],
            "buffers": built.buffers,
        }

    def _start(self) -> Worker:
        """Start a process with the task's tensors and reference."""
        tensors = self.task.tensors(np.random.default_rng(self.seed))
        host = host_of(self.target)
        if self._reference is None:
            self._reference = self._compiled(self.task.reference(host), "reference", host)
        place = self.host.place
        about = self._outputs() if is_gpu(self.target) else self._cpu_inputs(tensors[0])
        worker = self.host.start(int(host.attrs["num-cores"]), self.folder)
        try:
            for is_positive in (False, True):  # as what roots and logarithms are taken of
                ready = worker.call(
                    REFERENCE_PATIENCE,
                    action="prepare",
                    arrays=[place(path) for path in self._saved(tensors, is_positive)],
                    reference=self._placed(self._reference),
                    **about,
                )
                if ready["finite"]:
                    return worker
            raise TuningError(f"the reference of {self.task.name} is not finite")
        except BaseException:
            worker.close()
            raise

    def _outputs(self) -> dict[str, Any]:
        """Description of the tensors for the process of a GPU."""
        return {"outputs": self.task.outputs}

    def _cpu_inputs(self, data: np.ndarray) -> dict[str, Any]:
        """Description of the tensors for the process of a CPU, with code that writes the first."""
        shape, path = planes(data.shape), self.folder / "writer.so"
        if not path.exists():
            written = writer(shape, str(data.dtype), self.task.machine.num_cores)
            library(written, self.target, path)
        return {
            "weights": self.task.weights,
            "writer": self.host.place(path),
            "planes": shape,
        }

    def _saved(self, tensors: Sequence[np.ndarray], is_positive: bool) -> list[Path]:
        """Write tensors, or their magnitudes, to files."""
        sign = "-positive" if is_positive else ""
        files = [self.folder / f"tensor-{number}{sign}.npy" for number in range(len(tensors))]
        for file, tensor in zip(files, tensors, strict=True):
            np.save(file, np.abs(tensor) if is_positive else tensor, allow_pickle=False)
        return files


@dataclass(frozen=True)
class _Built:
    """A program in files."""

    library: Path
    calls: tuple[tuple[str, tuple[int, ...]], ...]
    constants: tuple[Path, ...]
    buffers: tuple[tuple[tuple[int, ...], str], ...]


def library(module: tvm.IRModule, target: Target, path: Path) -> Path:
    """Compile a module with a function ``main`` into a shared library.

    CUDA kernels are machine code in it; no GPU is needed.
    """
    triple, rewrite = str(host_of(target).attrs["mtriple"]), None
    if target.kind.name == "cuda":
        arch = str(target.attrs["arch"])
        with tvm_compiler(arch):
            built = tvm.compile(module, target)
        rewrite = machine_code_of(built, arch)
    else:
        built = tvm.compile(module, target)
    built.export_library(str(path), fcompile=SharedLinker(triple, rewrite))
    return path


def planes(shape: Sequence[int]) -> list[int]:
    """A tensor as planes, rows and columns; of images the rows are rows of pixels.

    Long rows are cut into pieces of equal length.
    """
    count, rows, columns = 1, prod(shape[:-1]), prod(shape[-1:])
    if len(shape) >= 4:
        count, rows, columns = prod(shape[:2]), shape[2], prod(shape[3:])
    piece = columns
    if columns > _LONGEST_VECTOR:
        piece = max(size for size in range(1, _LONGEST_VECTOR + 1) if columns % size == 0)
    return [count, rows * (columns // piece), piece]


def writer(shape: Sequence[int], dtype: str, threads: int) -> tvm.IRModule:
    """Make a function that writes a tensor like a layer before: each thread a share of the rows.

    ``shape`` is that of :func:`planes`.
    """
    count, rows, columns = shape

    @T.prim_func
    def write(data: T.Buffer((count, rows, columns), dtype)):  # type: ignore[valid-type]
        for share in T.parallel(threads):
            for plane in range(count):
                for row in range((share + 1) * rows // threads - share * rows // threads):
                    for column in T.vectorized(columns):
                        data[plane, share * rows // threads + row, column] = data[
                            plane, share * rows // threads + row, column
                        ] * tirx.const(1, dtype)

    return tvm.IRModule({"main": write})
