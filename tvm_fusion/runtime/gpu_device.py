# SPDX-License-Identifier: Apache-2.0
"""GPU of this machine, as TVM's runtime sees it, and the check that a model can run on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import tvm_ffi

from ..errors import TargetError
from .tvm_runtime import get_function, load_device_library

_EXISTS, _THREADS, _SHARED, _ARCH, _NAME, _MULTIPROCESSORS = 0, 1, 3, 4, 5, 7
"""Numbers of TVM's device attributes."""


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU of this machine."""

    kind: str  # ``cuda`` or ``opencl``.
    name: str  # Its name in the driver.
    arch: str  # Architecture of a CUDA device, such as ``sm_90``; else empty.
    max_threads: int  # Threads of one block.
    shared_bytes: int  # Shared memory of one block.
    multiprocessors: int  # Number of multiprocessors: blocks that run at once, at least.


@dataclass(frozen=True)
class DeviceNeeds:
    """Requirements of code for a GPU on the machine that it runs on."""

    kind: str  # ``cuda`` or ``opencl``.
    arch: str
    """Architecture of the machine code, such as ``sm_90``; empty where the driver compiles it."""
    max_threads: int  # Threads of the largest block that the schedules may form.
    shared_bytes: int  # Shared memory that they may take for a block.

    def __str__(self) -> str:
        """Kind and architecture."""
        return f"{self.kind} {self.arch}".strip()


def device_of(kind: str) -> tvm_ffi.Device:
    """The device that models of this kind run on, the first one."""
    return tvm_ffi.device(kind, 0)


def find_device(kind: str) -> DeviceInfo:
    """Describe the first GPU of a kind.

    Raises
    ------
    TargetError
        If there is none, or TVM's runtime for it cannot be loaded.
    """
    load_device_library(kind)
    if not _attribute(kind, _EXISTS):
        raise TargetError(f"no GPU for {kind} was found on this machine")
    version = str(_attribute(kind, _ARCH)) if kind == "cuda" else ""
    return DeviceInfo(
        kind=kind,
        name=str(_attribute(kind, _NAME)),
        arch=f"sm_{version.replace('.', '')}" if version else "",
        max_threads=int(_attribute(kind, _THREADS)),
        shared_bytes=int(_attribute(kind, _SHARED)),
        multiprocessors=int(_attribute(kind, _MULTIPROCESSORS)),
    )


def check_device(needs: DeviceNeeds) -> None:
    """Refuse code that no GPU of this machine can run.

    Raises
    ------
    TargetError
        If something is missing; the message names it and a remedy.
    """
    try:
        device = find_device(needs.kind)
    except TargetError as error:
        raise TargetError(f"the code is for {needs}, and {error}") from error
    again = f"compile it again on this machine with target={needs.kind!r}"
    if needs.kind == "cuda" and not runs_on(needs.arch, device.arch):
        raise TargetError(
            f"the model is compiled for {needs.arch}, and this machine's GPU ({device.name}) is "
            f"{device.arch}; {again}"
        )
    for what, need, there in (
        ("threads a block", needs.max_threads, device.max_threads),
        ("bytes of shared memory a block", needs.shared_bytes, device.shared_bytes),
    ):
        if need > there:
            raise TargetError(
                f"the model needs {need} {what}, and this machine's GPU ({device.name}) has "
                f"{there}; {again}"
            )


def runs_on(code: str, device: str) -> bool:
    """Return whether machine code of one architecture runs on a device of another.

    It runs on the same generation with the same or a larger minor number; with the letter ``a`` on
    that model only, with ``f`` on its family, which is the same generation, too.
    """
    made, there = (re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch) for arch in (code, device))
    if made is None or there is None or made[1] != there[1]:
        return False
    return made[2] == there[2] if made[3] == "a" else made[2] <= there[2]


def _attribute(kind: str, number: int) -> Any:
    device = device_of(kind)
    return get_function("runtime.GetDeviceAttr")(device.dlpack_device_type(), 0, number)
