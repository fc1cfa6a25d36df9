# SPDX-License-Identifier: Apache-2.0
"""Machines as predictions use them: by name, from a file, or this one; CPUs with their threads."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tvm.target import Target

from schedules.cost.machine import Figure, Machine, load_machine
from schedules.cpu.core.machine import CPUInfo, MeasuredCPU

from ..compiler.targets.target import resolve
from ..errors import PredictionError
from ..machine.host import host_cpu
from ..runtime.thread_pool import choose_threads

NATIVE = "native"
_MEASURED = "znver4"
"""The family whose networks were predicted before they ran."""
_OF_ALL_THREADS = ("peak_flops.", "capacity.L1", "capacity.L2", "bandwidth.L2", "bandwidth.L3")


def calibrations() -> Path:
    """Folder of this user's calibrations, ``$XDG_CACHE_HOME/tvm-fusion/machines``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "tvm-fusion", "machines")


def calibration_path(threads: int) -> Path:
    """File in which ``calibrate`` leaves the figures of this CPU with so many threads."""
    return calibrations() / f"{host_cpu()}-{threads}.json"


def find_machine(name: str | os.PathLike[str], threads: int | None = None) -> Machine:
    """Read a machine: ``native``, the name of a known one, or a file.

    Parameters
    ----------
    name : str or path
        ``native`` is this CPU: its newest calibration, else the data of its family.
    threads : int, optional
        Threads of a CPU; by default those of the file, of ``native`` one a physical core.

    Raises
    ------
    PredictionError
        If there is no such machine, or ``native`` is of an unknown family and was not calibrated.
    """
    machine = _native(threads) if name == NATIVE else load_machine(name)
    if machine.kind != "cpu":
        if threads is not None:
            raise PredictionError(f"machine {machine.name!r} is a GPU; threads are for CPUs")
        return machine
    return _with_threads(_with_spread(machine), threads or int(machine["multiprocessors"]))


def _with_spread(machine: Machine) -> Machine:
    """The CPU with intervals of kernels in networks, if it lacks them those of another family."""
    measured = load_machine(_MEASURED).figures.items()
    spread = {name: figure for name, figure in measured if name.startswith("network.")}
    return replace(machine, figures={**spread, **machine.figures})


def _native(threads: int | None) -> Machine:
    count = choose_threads(threads)
    files = list(calibrations().glob(f"{host_cpu()}-*.json"))
    if files:
        exact = calibration_path(count)
        newest = max(files, key=lambda path: path.stat().st_mtime)
        return _with_threads(load_machine(exact if exact in files else newest), count)
    try:
        return _with_threads(load_machine(host_cpu()), count)
    except PredictionError:
        raise PredictionError(
            f"nothing is known about this CPU, {host_cpu()!r}: run `tvm-fusion calibrate` first"
        ) from None


def _with_threads(machine: Machine, threads: int) -> Machine:
    """The machine with another number of threads: all but L3 and memory grow with it."""
    known = int(machine["multiprocessors"])
    if threads == known:
        return machine
    note = f", scaled from {known} to {threads} threads"
    figures = {
        name: Figure(figure.value * threads / known, figure.origin + note)
        if name.startswith(_OF_ALL_THREADS)
        else figure
        for name, figure in machine.figures.items()
    }
    figures["multiprocessors"] = Figure(threads, "given")
    return replace(machine, figures=figures)


def cpu_target(machine: Machine) -> Target:
    """Target of code for a CPU, whose name LLVM knows; this machine's own features if it is here.

    Raises
    ------
    TargetError
        If LLVM knows no CPU of this name.
    """
    threads = int(machine["multiprocessors"])
    if machine.name == host_cpu():
        return resolve(NATIVE, cores=threads)
    return resolve({"kind": "llvm", "mcpu": machine.name, "num-cores": threads})


def gpu_target(machine: Machine) -> Target:
    """Target of code for an NVIDIA GPU.

    Raises
    ------
    PredictionError
        If the machine has no figure ``compute_capability``.
    TargetError
        If our code cannot run on it.
    """
    return resolve("cuda", machine=machine)


def predicted_cpu(machine: Machine, target: Target, kept_bytes: int) -> MeasuredCPU:
    """The CPU of a machine for the cost models; see :meth:`.MeasuredCPU.of`."""
    return MeasuredCPU.of(CPUInfo.from_target(target), machine, kept_bytes)
