# SPDX-License-Identifier: Apache-2.0
"""Measurement of settings: they are built here, and race in a process of their own.

The process runs on this machine (:class:`Host`), or is started there by a server
(:class:`.remote.RemoteHost`); what it does is the same.
"""

from __future__ import annotations

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

from ..codegen.library_bin import machine_code_of
from ..codegen.linker import SharedLinker
from ..codegen.nvrtc import tvm_compiler
from ..compiler.targets import host_of, is_gpu
from ..machine.host import cpu_name, physical_cores
from ..runtime.tvm_runtime import DeviceInfo
from .contest import PATIENCE, Contest, MeasuringWorker, Outcome, Worker, prepared

_LONGEST_VECTOR = 1024  # Lanes in the code that writes a tensor.


@dataclass(frozen=True)
class KernelSequence:
    """Kernels that are called one after another."""

    mod: tvm.IRModule  # Their functions.
    calls: tuple[tuple[str, tuple[int, ...]], ...]
    """Functions with the numbers of their arguments: the task's tensors, the output last, then
    constants, then buffers."""
    constants: tuple[np.ndarray, ...] = ()  # Weights of these kernels alone.
    buffers: tuple[tuple[tuple[int, ...], str], ...] = ()  # Tensors between the kernels.


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
        """Name in messages."""

    def program(self, number: int, target: Target) -> KernelSequence:
        """Write a setting."""

    def reference(self, target: Target) -> KernelSequence:
        """Return what computes the right output."""

    def tensors(self, generator: np.random.Generator) -> list[np.ndarray]:
        """Draw the tensors that all settings share, the outputs last."""


class LostHost(Exception):
    """A machine that no longer answers; its work can be done by another."""


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


class Session(Contest):
    """Measurements of one task's settings, each against the default.

    Parameters
    ----------
    task : Subject
        The kernel, or the forms of a layer or a pair.
    target : Target
        The machine on which they race.
    seed : int
        Seed of the tensors and of the order of turns.
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
        super().__init__(task.name, seed, patience)
        self.task, self.target = task, target
        self.host = host or Host()
        self._folder = tempfile.TemporaryDirectory(prefix="tvm-fusion-tune-")
        self.folder = Path(self._folder.name)
        self._built: dict[int, _Built | Outcome] = {}
        self._reference: _Built | None = None

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
        built = ((number, self._built[number]) for number in {0, *numbers})
        failed = {number: one for number, one in built if isinstance(one, Outcome)}
        return self.race_built(numbers, failed, rounds, seconds)

    def about(self, number: int) -> dict[str, Any]:
        """Describe a candidate as :meth:`Contest.about` states."""
        return self._placed(self._built[number])

    def program_of(self, number: int) -> dict[str, Any] | Outcome:
        """The description of a setting that was built, with its files placed, or its failure."""
        built = self._built[number]
        return built if isinstance(built, Outcome) else self._placed(built)

    def reference_of(self, host: Target) -> dict[str, Any]:
        """The description of the reference, compiled for the host, with its files placed."""
        if self._reference is None:
            self._reference = self._compiled(self.task.reference(host), "reference", host)
        return self._placed(self._reference)

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

    def start(self) -> Worker:
        """Start a process with the task's tensors and reference."""
        tensors = self.task.tensors(np.random.default_rng(self.seed))
        host = host_of(self.target)
        place = self.host.place
        about = self._outputs() if is_gpu(self.target) else self._cpu_inputs(tensors[0])
        about["reference"] = self.reference_of(host)
        worker = self.host.start(int(host.attrs["num-cores"]), self.folder)
        return prepared(
            worker,
            self.name,
            lambda is_positive: [place(path) for path in self._saved(tensors, is_positive)],
            **about,
        )

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
