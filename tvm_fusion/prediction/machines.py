# SPDX-License-Identifier: Apache-2.0
"""Machines as predictions use them: by name, from a file, or this one; CPUs with their threads."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from tvm.target import Target

from schedules.cost.machine import Figure, Machine, estimate_note, load_machine
from schedules.cpu.core.machine import CPUInfo, MeasuredCPU
from schedules.cpu.core.machine_costs import measured_family

from ..compiler.targets import arch_of_cpu, resolve
from ..errors import PredictionError
from ..machine.host import cpu_name
from ..paths import user_cache
from ..runtime.thread_pool import choose_threads

NATIVE = "native"
_MEASURED = "znver4"
"""The family whose networks were predicted before they ran."""
_SYSTEM = "as the system describes this CPU, else typical"
_OF_ALL_THREADS = ("peak_flops.", "capacity.L1", "capacity.L2", "bandwidth.L2", "bandwidth.L3")


def calibrations() -> Path:
    """Folder of this user's calibrations, ``$XDG_CACHE_HOME/tvm-fusion/machines``."""
    return user_cache() / "machines"


def calibration_path(threads: int) -> Path:
    """File in which ``calibrate`` leaves the figures of this CPU with so many threads."""
    return calibrations() / f"{_file_name()}-{threads}.json"


def calibrated() -> list[Path]:
    """Such files of this CPU, not those of one whose name goes on, such as ``skylake-avx512``."""
    cpu = _file_name()
    files = calibrations().glob(f"{cpu}-*.json")
    return [path for path in files if path.stem.removeprefix(f"{cpu}-").isdecimal()]


def native_name() -> str:
    """Name of this CPU as a machine: that of its family, or a target if a system hides features."""
    return CPUInfo.from_target(resolve(NATIVE)).name


def _file_name() -> str:
    return re.sub(r"[^\w.-]+", "_", native_name())


def find_machine(
    # ``native`` is this CPU: its newest calibration, else the data of its family, else those of the
    # most similar one, which the machine's ``note`` says; so are other CPUs of which there are no
    # data.
    name: str | os.PathLike[str],
    # Threads of a CPU; by default those of the file, of ``native`` one a physical core.
    threads: int | None = None,
) -> Machine:
    """Read a machine: ``native``, the name of a known one or of any CPU, or a file.

    Raises ``PredictionError`` if there is no such machine.
    """
    machine = _native(threads) if name == NATIVE else _other(name, threads)
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


def _other(name: str | os.PathLike[str], threads: int | None) -> Machine:
    """A machine that there are data of, else a CPU that the compiler knows, estimated."""
    try:
        return load_machine(name)
    except PredictionError as error:
        if not isinstance(name, str) or os.path.isfile(name):  # noqa: PTH113  see load_machine
            raise
        if arch_of_cpu(name) is None:
            raise PredictionError(f"{error}, or a CPU such as sapphirerapids") from None
        cpu = CPUInfo.from_target(resolve(name, choose_threads(threads, elsewhere=True)))
        return _similar(cpu, name)


def _native(threads: int | None) -> Machine:
    count = choose_threads(threads)
    if files := calibrated():
        exact = calibration_path(count)
        newest = max(files, key=lambda path: path.stat().st_mtime)
        return _with_threads(load_machine(exact if exact in files else newest), count)
    cpu = CPUInfo.from_target(resolve(NATIVE, count))
    return _similar(cpu, f"{cpu_name()} ({cpu.family})")


def _similar(cpu: CPUInfo, title: str) -> Machine:
    """A CPU by the data of its family, else by those of the most similar one."""
    known = load_machine(measured_family(cpu.family, cpu.vector_bits))
    machine = _with_threads(known, cpu.num_cores)
    return machine if known.name == cpu.name else _estimated(cpu, machine, title)


def _estimated(cpu: CPUInfo, known: Machine, title: str) -> Machine:
    """A CPU by the figures of another one with as many threads, but for its caches."""
    kept = {f"peak_flops.{dtype}" for dtype in cpu.tiles}
    figures = {
        name: Figure(figure.value, f"estimated, of {known.name}: {figure.origin}")
        for name, figure in known.figures.items()
        if name in kept or not name.startswith("peak_flops.")
    }
    flops = 2 * cpu.lanes("float32") * cpu.fma_per_cycle * cpu.num_cores * known["clock"]
    estimates = {
        "peak_flops.float32": (flops, f"estimated, at the clock of {known.name}"),
        "capacity.L1": (cpu.l1d_bytes * cpu.num_cores, _SYSTEM),
        "capacity.L2": (cpu.l2_bytes * cpu.num_cores, _SYSTEM),
        "capacity.L3": (cpu.l3_bytes, _SYSTEM),
    }
    figures |= {name: Figure(float(value), origin) for name, (value, origin) in estimates.items()}
    title = f"{title}, estimated from {known.title}"
    return Machine(cpu.name, "cpu", title, figures, estimate_note(cpu.name, known.name))


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

    Raises ``TargetError`` if LLVM knows no CPU of this name.
    """
    here = machine.name == native_name()
    return resolve(NATIVE if here else machine.name, cores=int(machine["multiprocessors"]))


def gpu_target(machine: Machine) -> Target:
    """Target of code for an NVIDIA GPU.

    Raises ``PredictionError`` if the machine has no figure ``compute_capability``. Raises
    ``TargetError`` if our code cannot run on it.
    """
    return resolve("cuda", machine=machine)


def predicted_cpu(machine: Machine, target: Target, kept_bytes: int) -> MeasuredCPU:
    """The CPU of a machine for the cost models; see :meth:`.MeasuredCPU.of`."""
    return MeasuredCPU.of(CPUInfo.from_target(target), machine, kept_bytes)
