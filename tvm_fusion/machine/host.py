# SPDX-License-Identifier: Apache-2.0
"""Processor of this machine: its features, and the number of cores that the process may use.

Facts that only LLVM knows come from TVM's compiler, which is imported when needed.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from ..errors import TargetError
from .cpu_flags import flagged_features


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


def check_host(features: Iterable[str], arch: str | None = None) -> None:
    """Refuse code that this machine cannot run.

    Parameters
    ----------
    features : iterable of str
        The features that the code needs, from :func:`required_features`.
    arch : str, optional
        The architecture that it is for.

    Raises
    ------
    TargetError
        If code cannot run; the message names the architecture or the missing features.
    """
    if arch is not None and arch != host_arch():
        raise TargetError(
            f"the model is compiled for {arch} and this machine is {host_arch()}; "
            "run it on such a machine, or compile it again with target='native'"
        )
    missing = sorted(set(features) - flagged_features())
    if missing:  # or Linux does not list them: ask LLVM, which is exact and large
        missing = sorted(set(missing) - host_features())
    if missing:
        raise TargetError(
            f"this CPU ({host_cpu()}) has no {', '.join(missing)}, which the model is compiled "
            "for; compile it again on this machine with target='native'"
        )


def usable_processors() -> int:
    """Number of processors, hyper-threads included, that this process may run on."""
    return len(_affinity())


def physical_cores(root: Path = Path("/sys")) -> int:
    """Number of physical cores that this process may use.

    Hyper-threads of one core count once, processors outside the process's affinity mask do not
    count, and the CPU quota of a control group bounds the number.

    Parameters
    ----------
    root : Path
        The system's description of the processors; tests use another folder than ``/sys``.
    """
    affinity = _affinity()
    topology = "devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = [_read(root / topology.format(cpu)) for cpu in affinity]
    cores = len(set(siblings)) if all(siblings) else len(affinity)
    return max(1, min(cores, _time_limit(root / "fs/cgroup") or cores))


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _time_limit(root: Path) -> int | None:
    """Number of processors of the control group's CPU quota, rounded up; None if unlimited."""
    quota, _, period = _read(root / "cpu.max").partition(" ")
    if not quota:
        quota = _read(root / "cpu/cpu.cfs_quota_us")
        period = _read(root / "cpu/cpu.cfs_period_us")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        share = int(quota) / int(period)
        return math.ceil(share) if share > 0 else None
    return None


def _read(path: Path) -> str:
    """Text of a file without its newline, or an empty one if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
