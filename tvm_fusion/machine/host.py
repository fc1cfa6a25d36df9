# SPDX-License-Identifier: Apache-2.0
"""Processor of this machine: its features, and the number of cores that the process may use.

Facts that only LLVM knows come from TVM's compiler, which is imported when needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import math
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ..errors import TargetError

TILE_FEATURES = frozenset({"amx-tile", "amx-int8", "amx-bf16"})
"""Features of tile registers, whose use a process asks of Linux."""
_ARCH_PRCTL = 158  # a system call of x86-64
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18  # number of the state of these registers


_LLVM_NAMES = {
    # x86-64
    "abm": "lzcnt",
    "amx_bf16": "amx-bf16",
    "amx_int8": "amx-int8",
    "amx_tile": "amx-tile",
    "avx512_bf16": "avx512bf16",
    "avx512_bitalg": "avx512bitalg",
    "avx512_fp16": "avx512fp16",
    "avx512_vbmi2": "avx512vbmi2",
    "avx512_vnni": "avx512vnni",
    "avx512_vpopcntdq": "avx512vpopcntdq",
    "avx_ifma": "avxifma",
    "avx_vnni": "avxvnni",
    "bmi1": "bmi",
    "lahf_lm": "sahf",
    "pclmulqdq": "pclmul",
    "pni": "sse3",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    # AArch64
    "asimd": "neon",
    "asimddp": "dotprod",
    "atomics": "lse",
    "crc32": "crc",
    "fp": "fp-armv8",
}
"""Names that differ; Linux's old ``avx512vbmi`` and most others are LLVM's too."""


@lru_cache(maxsize=1)
def flagged_features(source: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Features that the processor has and whose registers the system saves.

    Some are missing, since Linux does not list the newest. On other systems there are none.

    ``source``: linux's description of the processors; tests use another file than
    ``/proc/cpuinfo``.
    """
    try:
        lines = source.read_text().splitlines()
    except OSError:
        return frozenset()
    # Processors of one machine may differ: only their common features count.
    flags = [
        set(value.split())
        for key, _, value in (line.partition(":") for line in lines)
        if key.strip() in ("flags", "Features")
    ]
    common = set.intersection(*flags) if flags else set()
    return frozenset(_LLVM_NAMES.get(flag, flag) for flag in common)


def host_arch() -> str:
    """Name of the processor's architecture as LLVM's triples spell it."""
    return canonical_arch(platform.machine())


def canonical_arch(name: str) -> str:
    """One name for each architecture: ``x86_64``, ``aarch64``, or ``name`` itself."""
    aliases = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}
    return aliases.get(name.lower(), name.lower())


def host_cpu() -> str:
    """LLVM's name for this processor, for example ``znver3``."""
    from tvm.target import codegen

    return str(codegen.llvm_get_system_cpu())


@lru_cache(maxsize=1)
def probe_features() -> dict[str, bool]:
    """Features as LLVM reads them from the processor: present ones, and some absent ones.

    It asks the processor and the operating system and not a table of models, so that a feature
    which a virtual machine hides, or whose registers the system does not save, counts as absent.
    """
    import tvm

    probe = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")
    return {str(name): bool(there) for name, there in probe().items()}


def host_features() -> frozenset[str]:
    """Names of the features that code may use on this machine, as LLVM spells them."""
    return frozenset(name for name, there in probe_features().items() if there)


@cache
def may_use_tiles() -> bool:
    """Ask Linux for the tile registers (AMX), once; return whether this process may use them.

    It ends a process that uses them without having asked. The answer holds for all threads and for
    forked processes, not for programs that they start.
    """
    if platform.system() != "Linux" or host_arch() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def check_host(features: Iterable[str], arch: str | None = None) -> None:
    """Refuse code that this machine cannot run, or that Linux does not let this process run.

    ``features``: the features that the code needs, from :func:`required_features`. ``arch``: the
    architecture that it is for. Raises TargetError if code cannot run; the message names the
    architecture or the missing features.
    """
    features = set(features)
    if arch is not None and arch != host_arch():
        raise TargetError(
            f"the model is compiled for {arch} and this machine is {host_arch()}; "
            "run it on such a machine, or compile it again with target='native'"
        )
    missing = sorted(features - flagged_features())
    if missing:  # or Linux does not list them: ask LLVM, which is exact and large
        missing = sorted(set(missing) - host_features())
    if missing:
        others = "" if set(missing) - TILE_FEATURES else ", or with target='x86-64-v4'"
        raise TargetError(
            f"this CPU ({host_cpu()}) has no {', '.join(missing)}, which the model is compiled "
            f"for; compile it again on this machine with target='native'{others}"
        )
    if features & TILE_FEATURES and not may_use_tiles():
        raise TargetError(
            "Linux does not let this process use the tile registers (AMX) that the model is "
            "compiled for; compile it again with target='x86-64-v4', or allow the system call "
            "arch_prctl, which containers may forbid"
        )


def usable_processors() -> int:
    """Number of processors, hyper-threads included, that this process may run on."""
    return len(_affinity())


def physical_cores(root: Path = Path("/")) -> int:
    """Number of physical cores that this process may use.

    Hyper-threads of one core count once, processors outside the process's affinity mask do not
    count, and the quota of processor time (:func:`time_limit`) bounds the number.

    ``root``: the folder with the system's ``sys`` and ``proc``; tests use another one than ``/``.
    """
    affinity = _affinity()
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = [_read(root / topology.format(cpu)) for cpu in affinity]
    cores = len(set(siblings)) if all(siblings) else len(affinity)
    return max(1, min(cores, time_limit(root) or cores))


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def time_limit(root: Path = Path("/")) -> int | None:
    """Number of processors whose time this process may use, rounded up; None if unlimited.

    The least quota of its control groups and of those that hold them, of either version. A
    container that sees the names of its host, but not the folders, has its own quota at the top.
    """
    mounted = root / "sys/fs/cgroup"
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/", "1:cpu:/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        own = PurePosixPath(path.strip("/"))
        groups = [PurePosixPath()] if ".." in own.parts else [own, *own.parents]
        for mount in {controllers, "cpu"} if controllers else ("", "unified"):
            quotas += [_quota(mounted / mount / group, not controllers) for group in groups]
    return min((math.ceil(quota) for quota in quotas if quota is not None), default=None)


def _quota(group: Path, is_unified: bool) -> float | None:
    """Processors whose time a control group may use; None where it has no limit."""
    if is_unified:
        quota, _, period = _read(group / "cpu.max").partition(" ")
    else:
        quota, period = (_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    with contextlib.suppress(ValueError, ZeroDivisionError):
        share = int(quota) / int(period)
        return share if share > 0 else None
    return None


def _read(path: Path) -> str:
    """Text of a file without its newline, or an empty one if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


CROSS_TRIPLES = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}


def arch_of_triple(triple: Any) -> str:
    """The architecture that an LLVM triple begins with; refuses those that are not supported."""
    arch = canonical_arch(str(triple).split("-")[0])
    if arch not in CROSS_TRIPLES:
        raise TargetError(
            f"mtriple {triple!r} is for {arch!r}; this version compiles for "
            f"{' and '.join(CROSS_TRIPLES)}, for example {CROSS_TRIPLES['aarch64']!r}"
        )
    return arch


def cpu_title(options: Mapping[str, Any]) -> str:
    """LLVM's name of a target's CPU, and the features in which the target differs from it.

    ``options``: those of an LLVM target, ``mcpu`` and maybe ``mattr``.
    """
    signs = {
        feature[1:]: feature[:1] for feature in options.get("mattr", ())
    }  # the last one counts
    changes = [
        f"{word} {', '.join(names)}"
        for sign, word in (("+", "with"), ("-", "without"))
        if (names := [name for name in signs if signs[name] == sign])
    ]
    return f"{options['mcpu']} {' and '.join(changes)}".rstrip()


PACKAGES = ("apache-tvm", "onnx", "numpy", "onnxruntime", "openvino", "torch", "torchvision")


def host_info() -> dict[str, Any]:
    """Return the processor, the system, and the versions of installed packages."""
    return {
        "cpu": cpu_name(),
        "physical_cores": physical_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def cpu_name() -> str:
    """Return the processor's name as its maker spells it."""
    name = ""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    else:
        lines = Path("/proc/cpuinfo")
        text = lines.read_text() if lines.exists() else ""
        fields = (line.partition(":") for line in text.splitlines())
        name = next((value for key, _, value in fields if key.strip() == "model name"), "")
    return name.strip() or platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def launched_rank() -> int:
    """Rank that ``mpiexec`` or ``srun`` gave to this process; 0 where neither started it."""
    given = next((os.environ[name] for name in _VARIABLES if name in os.environ), "0")
    return int(given) if given.isdecimal() else 0


def how_it_ended(process: subprocess.Popen, log: IO[bytes]) -> tuple[str, str]:
    """Wait for a process that is ending.

    Returns its exit code or signal, and the last line of its log, maybe empty.
    """
    code = process.wait()
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    log.seek(0)
    said = log.read().decode(errors="replace").strip().splitlines()
    return how, said[-1] if said else ""
