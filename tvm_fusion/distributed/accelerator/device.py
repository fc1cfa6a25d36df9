# SPDX-License-Identifier: Apache-2.0
"""Devices as a user names them, and the figures that predictions assume of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from tvm import s_tir
from tvm.target import Target

from schedules.cost.machine import Machine, load_machine
from schedules.cpu.core.machine import CPUInfo
from schedules.distribute.cost import Processor
from schedules.distribute.partition import is_count
from schedules.distribute.split import Accelerator

from ...compiler.targets import is_gpu, resolve
from ...errors import InvalidInputError, TargetError
from ...machine.host import usable_processors
from .driver import Driver

Schedule = Callable[[s_tir.Schedule], None]

_NUMBERED = re.compile(r"(cuda|opencl):(\d+)(\s.*)?")
_MACHINES = {
    "sm_70": "v100",
    "sm_75": "t4",
    "sm_80": "a100-80",
    "sm_86": "a40",
    "sm_89": "l4",
    "sm_90": "h100",
}
_NEWEST, _OPENCL = "h100", "p4"  # stand for architectures without a file, and for other OpenCL
_ENQUEUE_SECONDS = 2e-5  # Seconds of a copy or a kernel by an OpenCL on the cores of the host.


@dataclass(frozen=True)
class Device:
    """A GPU, or another accelerator, that computes rows of a rank.

    Parameters
    ----------
    target : str, mapping or tvm.target.Target
        What its kernels are compiled for, as in :func:`tvm_fusion.compile`: ``"cuda"``,
        ``"cuda -arch=sm_90"``, ``"opencl"``; with its number, ``"cuda:1"``.
    index : int
        Its number among the devices of this kind, from 0; of OpenCL, devices of all platforms, GPUs
        first.
    schedule : callable, optional
        Binds the loops of the function of some rows to blocks and threads, in place; by default the
        rules of this package do.
    chunks : int, optional
        Pieces in which rows are copied and computed; by default as many as are predicted to be
        fastest, but of a program with ``repeat`` the rows stay on the device.
    in_place : bool, optional
        Whether it computes in the host's memory, without copies; by default an OpenCL device of
        this machine does that can, unless chunks are given or several steps share an exchange.
    figures : Accelerator, optional
        Figures of the predictions; by default those of a GPU of its architecture, or of the cores
        of the host, where its OpenCL device is this CPU.
    """

    target: str | Mapping[str, Any] | Target = "cuda"
    index: int = 0
    schedule: Schedule | None = None
    chunks: int | None = None
    in_place: bool | None = None
    figures: Accelerator | None = None


@dataclass(frozen=True)
class ResolvedDevice:
    """A device with a complete target."""

    target: Target  # Target with a host.
    index: int  # Its number among the devices of its kind.
    schedule: Schedule | None
    chunks: int | None
    """``schedule`` and ``chunks``: as given."""
    accelerator: Accelerator  # Figures of its operations.
    has_cores: bool = True  # Whether it computes on other cores than the CPU.
    in_place: bool = False  # Whether it computes in the host's memory.
    cpu: Target | None = None
    """Target of an OpenCL device that is a CPU, with the cores that are left to it."""

    @property
    def kind(self) -> str:
        """``cuda`` or ``opencl``."""
        return str(self.target.kind.name)

    @property
    def kernels(self) -> Hashable:
        """Identity of its kernels, which devices that share them have in common."""
        return str(self.target), str(self.cpu), self.schedule

    @property
    def name(self) -> str:
        """Kind and number, such as ``cuda:0``."""
        return f"{self.kind}:{self.index}"

    def beside(self, ranks: int) -> ResolvedDevice:
        """The device where so many ranks and devices of a CPU, itself among them, compute."""
        cores = self.accelerator.cores
        if cores is None:
            return self
        return replace(self, accelerator=replace(self.accelerator, cores=cores.beside(ranks)))


def resolve_devices(
    # Devices of every rank, or of some ranks.
    devices: Sequence[str | Device] | Mapping[int, Sequence[str | Device]],
    ranks: int,  # Number of ranks.
    host: Target,  # The CPU of every rank.
    processor: Processor,
) -> tuple[tuple[ResolvedDevice, ...], ...]:
    """Devices of each rank.

    Raises ``InvalidInputError`` if devices are no sequence, or given for a rank that is none, or a
    field of one is not what its name says, or one that copies chunks, or a GPU of NVIDIA, is to
    compute in place. Raises ``TargetError`` if a target is unknown or is no GPU, or means a GPU of
    this machine and there is none.
    """
    lists = devices.values() if isinstance(devices, Mapping) else [devices]
    for each in lists:
        if not isinstance(each, Sequence) or isinstance(each, str):
            raise InvalidInputError(f"devices are {each!r}; expected a list of them")
    if isinstance(devices, Mapping):
        strange = sorted(set(devices) - set(range(ranks)))
        if strange:
            raise InvalidInputError(
                f"devices are given for rank {strange[0]}; ranks are 0 to {ranks - 1}"
            )
        return tuple(
            tuple(_resolve(device, host, processor) for device in devices.get(rank, ()))
            for rank in range(ranks)
        )
    return (tuple(_resolve(device, host, processor) for device in devices),) * ranks


def accelerator_of(machine: Machine) -> Accelerator:
    """Figures of a GPU of which there is a file, or that was calibrated.

    Raises
    ------
    PredictionError
        If a figure is missing.
    """
    return Accelerator(
        machine["peak_flops.float32"],
        machine["bandwidth.memory"],
        machine["bandwidth.pcie"],
        machine["launch_floor"],
    )


def host_accelerator(
    # ``device``, ``host``: the CPU, with the cores of the device and those of the kernels beside
    # it.
    device: Target,
    host: Target,
    processor: Processor,  # Figures of the latter.
) -> Accelerator:
    """Figures of an OpenCL device that is this CPU, on those of its cores that are left.

    Copies go through its memory, and are read and written by the cores that compute.
    """
    cores = processor.slower(_cores(host) / _cores(device))
    return Accelerator(
        cores.rate,
        cores.bandwidth,
        cores.bandwidth / 2,
        _ENQUEUE_SECONDS,
        overlaps=False,
        cores=cores,
    )


def _resolve(device: str | Device, host: Target, processor: Processor) -> ResolvedDevice:
    if isinstance(device, str):
        device = Device(device)
    if not isinstance(device, Device):
        raise InvalidInputError(f"a device is {device!r:.60}; expected its name, or a Device")
    numbered = (
        _NUMBERED.fullmatch(device.target.strip()) if isinstance(device.target, str) else None
    )
    if numbered is not None:
        kind, index, options = numbered.groups()
        device = replace(device, target=f"{kind}{options or ''}", index=int(index))
    _check(device)
    target = resolve(device.target)
    if not is_gpu(target):
        raise TargetError(
            f"device {device.target!r} is a CPU, which computes its rows without being named here; "
            "expected 'cuda', 'cuda -arch=sm_90' or 'opencl'"
        )
    units = _cpu_units(device.index) if target.kind.name == "opencl" else 0
    left = usable_processors() - _cores(host)
    cpu = None
    if units:
        cpu = Target({**host.export(), "num-cores": max(1, min(units, left))})
        figures = host_accelerator(cpu, host, processor)
    elif target.kind.name == "cuda":
        arch = str(target.attrs["arch"]).rstrip("af")
        figures = accelerator_of(load_machine(_MACHINES.get(arch, _NEWEST)))
    else:
        figures = accelerator_of(load_machine(_OPENCL))
    in_place = _in_place(device, target)
    figures = device.figures or figures
    if in_place:
        figures = replace(figures, link=math.inf)
    return ResolvedDevice(
        Target(target, host),
        device.index,
        device.schedule,
        device.chunks,
        figures,
        not units or left > 0,
        in_place,
        cpu,
    )


def _check(device: Device) -> None:
    """Refuse fields that are not what their names say."""
    is_index = isinstance(device.index, Integral) and device.index >= 0
    if not is_index or not (device.chunks is None or is_count(device.chunks)):
        raise InvalidInputError(
            f"the device {device.target} has index {device.index!r} and {device.chunks!r} chunks; "
            "expected an index from 0, and at least 1 chunk, or None"
        )
    if not (device.schedule is None or callable(device.schedule)):
        raise InvalidInputError(
            f"schedule of device {device.target} is {device.schedule!r:.60}; expected a function"
        )
    if not isinstance(device.figures, Accelerator | None):
        raise InvalidInputError(
            f"figures of device {device.target} are {device.figures!r:.60}; expected an Accelerator"
        )


def _in_place(device: Device, target: Target) -> bool:
    """Whether a device computes in the host's memory."""
    can = target.kind.name == "opencl" and device.chunks is None
    if device.in_place and not can:
        raise InvalidInputError(
            f"the device {device.target} with {device.chunks} chunks is to compute in place; "
            "expected OpenCL, and no chunks"
        )
    if device.in_place is None:
        return can and _shares_memory(device.index)
    return device.in_place


def _cores(cpu: Target) -> int:
    return CPUInfo.from_target(cpu).num_cores


def open_driver(
    kind: str,  # ``cuda`` or ``opencl``.
    index: int,  # Its number among those of its kind.
) -> Driver:
    """Open a device of this machine.

    Raises ``TargetError`` if there is none, or its driver or package is not installed.
    """
    if kind == "opencl":
        from .opencl_driver import OpenCLDriver

        return OpenCLDriver(index)
    from .cuda_driver import CUDADriver

    return CUDADriver(index)


def _cpu_units(index: int) -> int:
    """Compute units of an OpenCL device of this machine that is its CPU, else 0."""
    with suppress(TargetError):  # compiled where there is no OpenCL
        from .opencl_driver import cpu_units

        return cpu_units(index)
    return 0


def _shares_memory(index: int) -> bool:
    """Whether an OpenCL device of this machine computes in any memory of the host."""
    with suppress(TargetError):
        from .opencl_driver import shares_memory

        return shares_memory(index)
    return False
