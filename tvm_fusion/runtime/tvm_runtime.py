# SPDX-License-Identifier: Apache-2.0
"""Runtime part of TVM, without the compiler.

``import tvm`` loads the compiler with LLVM and takes 170 MiB and most of a second. A saved model
needs a hundredth of that: ``libtvm_runtime``, from the same package. It is loaded as TVM itself
would load it, so that a later ``import tvm`` reuses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm_ffi.libinfo import load_lib_ctypes

from ..errors import TargetError
from ..machine.cuda_toolkit import find_libraries

_POOLED_ALLOCATOR = 2
_CPU = 1


def get_function(name: str) -> Callable[..., Any]:
    """Return a global function of TVM's runtime.

    Raises ValueError if there is none of that name.
    """
    _load()
    return tvm_ffi.get_global_func(name)


def version() -> str:
    """Version of the installed TVM."""
    if "tvm" not in sys.modules:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version("apache-tvm")
    return str(importlib.import_module("tvm").__version__)


def start_machine(library: tvm_ffi.Module, device: tvm_ffi.Device | None = None) -> tvm_ffi.Module:
    """Make the virtual machine that runs the program in a compiled library.

    ``library``: a library that holds a Relax program; its functions are those of the machine.
    ``device``: device of its tensors; the CPU if None. Shapes are computed on the CPU in any case.
    Raises RuntimeError if the program calls an unknown function.
    """
    try:
        return _start(library, device)
    except RuntimeError:
        if "tvm" in sys.modules:
            raise
    # A few operators (Unique, NonZero) are Python functions of TVM's compiler package.
    importlib.import_module("tvm")
    return _start(library, device)


def _start(library: tvm_ffi.Module, device: tvm_ffi.Device | None) -> tvm_ffi.Module:
    machine = library["vm_load_executable"]()
    places = [(_CPU, 0)]
    if device is not None and device.dlpack_device_type() != _CPU:
        places.insert(0, (device.dlpack_device_type(), device.index))
    settings = [(*place, _POOLED_ALLOCATOR) for place in places]
    machine["vm_initialization"](*(number for setting in settings for number in setting))
    return machine


def copied(program: tvm_ffi.Module) -> tvm_ffi.Module:
    """Copy a Relax program, but not the kernels that it imports.

    A virtual machine that starts adds a memory scope for each constant to its program, and TVM
    prints a warning for each of them whenever it saves the program, or loads it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        program.write_to_file(str(path), program.kind)
        copy = get_function(f"ffi.Module.load_from_file.{program.kind}")(str(path))
    for module in program.imports:
        copy.import_module(module)
    return copy


def load_device_library(kind: str) -> None:
    """Load the part of TVM's runtime that drives GPUs of a kind, ``cuda`` or ``opencl``.

    Raises TargetError if this TVM has none, or one of its dependencies is not installed.
    """
    if _has_device(kind):
        return
    reason = _try_to_load(f"tvm_runtime_{kind}")
    needed = re.search(r"libcudart\.so\.\d+", reason)
    for path in find_libraries(needed[0]) if needed else ():
        # A library that is loaded already is found by its name, whatever its path.
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(path))
            reason = _try_to_load(f"tvm_runtime_{kind}")
            break
    if not _has_device(kind):
        raise TargetError(_why_no_device(kind, reason))


def _try_to_load(name: str) -> str:
    """Load a library of TVM; return the reason of a failure, or nothing."""
    try:
        load_lib_ctypes("tvm", name, "RTLD_LOCAL", extra_lib_paths=_folders())
    except (RuntimeError, OSError) as error:
        return str(error).strip().splitlines()[0]
    return ""


def _has_device(kind: str) -> bool:
    _load()
    return tvm_ffi.get_global_func(f"device_api.{kind}", allow_missing=True) is not None


def _why_no_device(kind: str, reason: str) -> str:
    if "libcuda.so" in reason:
        return "this machine has no NVIDIA driver (libcuda.so.1)"
    if "libcudart" in reason:
        return f"{reason}: install the CUDA runtime with: pip install 'tvm-fusion[cuda]'"
    known = {"cuda": "CUDA", "opencl": "OpenCL"}[kind]
    return (
        f"the installed TVM {version()} has no {known} runtime; install a TVM that was built with "
        f"USE_{known.upper()}"
    )


@cache
def _load() -> None:
    """Load the runtime from the package of TVM, unless that is imported already."""
    if "tvm" in sys.modules:
        return
    folders = _folders()
    load_lib_ctypes("tvm", "tvm_runtime", "RTLD_GLOBAL", extra_lib_paths=folders)
    with contextlib.suppress(RuntimeError, OSError):  # sorting; not every build has it
        load_lib_ctypes("tvm", "tvm_runtime_extra", "RTLD_LOCAL", extra_lib_paths=folders)


def _folders() -> list[Path]:
    """Possible folders of TVM's libraries."""
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'tvm'; install apache-tvm", name="tvm")
    package = Path(spec.origin).parent
    # TVM's own order: its variable, a wheel, a build inside a checkout.
    named = os.environ.get("TVM_LIBRARY_PATH")
    folders = [Path(named)] if named else []
    return [*folders, package / "lib", package / "../../build/lib", package / "../../lib"]


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

    Raises TargetError if there is none, or TVM's runtime for it cannot be loaded.
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

    Raises TargetError if something is missing; the message names it and a remedy.
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
