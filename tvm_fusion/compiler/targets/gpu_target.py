# SPDX-License-Identifier: Apache-2.0
"""Targets of GPUs: options that a user leaves out, taken from the device or from TVM's defaults."""

from __future__ import annotations

import json
import re
from typing import Any

from tvm.target import Target

from schedules.cost.machine import Machine
from schedules.gpu.core.machine import GPUInfo

from ...errors import TargetError
from ...runtime.gpu_device import DeviceInfo, find_device
from .target_names import unknown_name

GPU_KINDS = ("cuda", "opencl")

ARCHITECTURES = tuple(
    f"sm_{name}"
    for name in "70 72 75 80 86 87 88 89 90 90a 100 100a 100f 101 101a 101f 103 103a 103f "
    "110 110a 110f 120 120a 120f 121 121a 121f".split()
)
"""NVIDIA's names; those with a letter run on that model or its family only."""

MODEL = "multiprocessors={}"
"""Format of the option ``model`` that the schedules read; TVM has none for multiprocessors."""

_DEFAULTS = {
    "cuda": {
        "max_num_threads": 1024,
        "max_shared_memory_per_block": 49152,
        "thread_warp_size": 32,
    },
    "opencl": {
        "max_num_threads": 256,
        "max_shared_memory_per_block": 16384,
        "thread_warp_size": 1,
    },
}


def spell_out_gpu(config: dict[str, Any]) -> None:
    """Fill in the missing options of a ``cuda`` or ``opencl`` target, and check the others.

    Raises
    ------
    TargetError
        If a value is invalid, or if there is no GPU for a ``cuda`` target without ``arch``.
    """
    kind = config["kind"]
    if kind == "cuda":
        if "arch" not in config:
            _ask_device(config)
        _check_arch(config["arch"])
        _check_model(config.get("model"))
    if "max_threads_per_block" in config:
        config.setdefault("max_num_threads", config["max_threads_per_block"])
    for name, value in _DEFAULTS[kind].items():
        config.setdefault(name, value)
    config.setdefault("max_threads_per_block", config["max_num_threads"])
    for name in (*_DEFAULTS[kind], "max_threads_per_block"):
        value = config[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise TargetError(f"target option {name} is {value!r}; expected a positive integer")
    for name in ("max_num_threads", "max_threads_per_block") if kind == "cuda" else ():
        if config[name] > 1024:
            raise TargetError(f"{name} is {config[name]}; a CUDA block has at most 1024 threads")


def take_machine(config: dict[str, Any], machine: Machine) -> None:
    """Fill in architecture and multiprocessors of a machine where a target names none.

    Raises
    ------
    TargetError
        If the machine is no NVIDIA GPU, or the target is another kind of GPU.
    PredictionError
        If the machine lacks a figure.
    """
    refuse_other_kind(machine, config["kind"])
    config.setdefault("arch", f"sm_{_capability(machine)}")
    config.setdefault("model", MODEL.format(int(machine["multiprocessors"])))


def refuse_other_kind(machine: Machine, kind: str) -> None:
    """Refuse a machine that has not the kind of a target: ``cuda`` for a GPU, ``llvm`` for a CPU.

    Raises
    ------
    TargetError
        If it has another one; the message names both.
    """
    expected = "cuda" if machine.kind == "gpu" else "llvm"
    if kind != expected:
        device = "an NVIDIA GPU" if machine.kind == "gpu" else "a CPU"
        raise TargetError(
            f"the machine {machine.name!r} is {device}, and the target is of kind {kind!r}: name a "
            f"target of kind {expected!r}, or another machine"
        )


def check_machine(target: Target, machine: Machine) -> None:
    """Refuse a machine that is not the device of a resolved target.

    Raises
    ------
    TargetError
        If its kind, its compute capability or its number of multiprocessors is another one; the
        message names both.
    PredictionError
        If the machine lacks a figure.
    """
    refuse_other_kind(machine, target.kind.name)
    if machine.kind != "gpu":
        return  # the cost models of CPUs compare the families
    gpu, arch = GPUInfo.from_target(target), _capability(machine)
    if gpu.arch != arch:
        raise TargetError(
            f"the machine {machine.name!r} has compute capability {arch / 10}, and the target is "
            f"for {target.attrs['arch']}: name a machine of that architecture, or the target "
            f"'cuda -arch=sm_{arch}'"
        )
    count = int(machine["multiprocessors"])
    if gpu.multiprocessors != count:
        raise TargetError(
            f"the machine {machine.name!r} has {count} multiprocessors, and the target "
            f"{gpu.multiprocessors}: leave them out of the target, or name "
            f"'-model={MODEL.format(count)}'"
        )


def _capability(machine: Machine) -> int:
    """Compute capability times ten."""
    return round(10 * machine["compute_capability"])


def named_after(target: Target, device: DeviceInfo) -> Target:
    """Name the device in an OpenCL target, by which records tell devices apart."""
    if target.kind.name != "opencl" or "model" in target.attrs:
        return target
    return Target({**json.loads(str(target)), "model": device.name})


def _ask_device(config: dict[str, Any]) -> None:
    """Take the missing options from the first GPU of this machine."""
    try:
        device: DeviceInfo = find_device("cuda")
    except TargetError as error:
        raise TargetError(
            f"a target 'cuda' without an architecture means this machine's GPU, and {error}; "
            "to compile for another machine name its architecture: 'cuda -arch=sm_90'"
        ) from error
    config["arch"] = device.arch
    config.setdefault("max_num_threads", device.max_threads)
    config.setdefault("max_shared_memory_per_block", device.shared_bytes)
    config.setdefault("model", MODEL.format(device.multiprocessors))


def _check_arch(arch: Any) -> None:
    number = re.fullmatch(r"sm_(\d+)[a-z]?", str(arch))
    if arch in ARCHITECTURES:
        return
    if number and int(number[1]) < 70:
        raise TargetError(f"architecture {arch} is too old; expected sm_70 or newer")
    raise unknown_name("CUDA architecture", str(arch), ARCHITECTURES, "'sm_80' or 'sm_90'")


def _check_model(model: Any) -> None:
    if model is not None and not re.fullmatch(MODEL.format(r"[1-9]\d*"), str(model)):
        raise TargetError(
            f"target option model is {model!r}; expected for example {MODEL.format(132)!r}"
        )
