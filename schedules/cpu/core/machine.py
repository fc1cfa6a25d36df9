# SPDX-License-Identifier: Apache-2.0
"""Facts about the CPU that a schedule is written for.

Everything comes from the target; only the cache sizes are read from the running machine, and only
when the target names exactly this machine's CPU, so that cross-compiled code does not depend on
where it was compiled. Those of other CPUs that were measured are known by name, and a tuning job
for another machine gives them (:func:`described`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from tvm import DataType
from tvm.target import Target, codegen

from schedules.cost.cpu_kernels import FORK, weights_level
from schedules.cost.decisions import machine_in_use
from schedules.cost.machine import Machine, load_machine
from schedules.errors import TargetError
from schedules.workload.conv2d import WORDS

from .machine_costs import MachineCosts, costs_of, known_family

_SYSFS_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_DEFAULT_CACHES = (32 * 1024, 512 * 1024, 8 * 1024 * 1024)
_HALF_BITS = 256
TILE_BITS = 512
"""Bits of a row of a tile register."""
TILE_PRODUCTS = {"uint8": "amx-int8", "bfloat16": "amx-bf16"}
"""Features of CPUs whose tile registers multiply a type."""
_PRODUCTS = {
    *("amx-bf16", "amx-int8", "amx-tile", "avx512bf16", "avx512vnni", "avxvnni"),
    *("bf16", "dotprod", "i8mm"),
}
"""Features whose instructions multiply other types than float32."""
_SIZE_SUFFIXES = {"K": 1024, "M": 1024**2, "G": 1024**3}


@dataclass(frozen=True)
class CPUInfo:
    """Vector unit, registers, caches and cores of a target CPU.

    Parameters
    ----------
    vector_bits : int
        Width of one vector register: 512, 256 or 128.
    num_vector_registers : int
        Vector registers that a kernel may use: 32 for AVX-512 and AArch64, else 16.
    has_fma : bool
        Whether a multiply-add is one instruction.
    num_cores : int
        Number of threads that a kernel should use.
    l1d_bytes, l2_bytes : int
        Data caches of one core.
    l3_bytes : int
        Last-level cache, shared by all cores.
    family : str
        LLVM's name of the CPU; empty if the target names none.
    has_streaming_stores : bool
        Whether vectors can be stored past the caches.
    word_channels : int
        Products of bytes that are added to each int32 of a vector at once: four (VNNI, or the
        dot products of AArch64), or two of bytes in 16 bits where that is faster than floats
        (AVX2); else 0.
    byte_dots : str
        Instruction for products of bytes: ``"vpdpbusd"``; ``"maddubs"``, whose sums of two products
        have 16 bits; ``"usdot"`` of AArch64's I8MM; ``"sdot"``, both of whose factors are signed;
        or none.
    converts_halves : bool
        Whether vectors of float16 become float32 by an instruction.
    tiles : tuple[str, ...]
        Types whose products tile registers (AMX) add up: ``"uint8"``, ``"bfloat16"``.
    emulates_tiles : bool
        Whether loops do what tile registers do: to test kernels on a CPU without these.
    half_dots : str
        Instruction that multiplies pairs of bfloat16: ``"vdpbf16ps"``, for vectors of 512 bits;
        ``"bfdot"`` of AArch64; or none.
    unlike : tuple[str, ...]
        Features of such products that it lacks, or has besides those of its family, as in
        ``mattr``: a system may hide some. Empty where the kernels are those of the family.
    """

    vector_bits: int
    num_vector_registers: int
    has_fma: bool
    num_cores: int
    l1d_bytes: int
    l2_bytes: int
    l3_bytes: int
    family: str = ""
    has_streaming_stores: bool = False
    word_channels: int = 0
    byte_dots: str = ""
    converts_halves: bool = False
    tiles: tuple[str, ...] = ()
    emulates_tiles: bool = False
    half_dots: str = ""
    unlike: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tiles", "unlike"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has lists only.

    @property
    def name(self) -> str:
        """LLVM's name of the CPU, or the target that names what it lacks: of records and figures.

        Those of one CPU do not count for another of the family that multiplies otherwise.
        """
        if not self.unlike:
            return self.family
        return f"llvm -mcpu={self.family} -mattr={','.join(self.unlike)}"

    @cached_property
    def costs(self) -> MachineCosts:
        """Constants of this CPU in the cost models."""
        return costs_of(self.family, self.vector_bits)

    @cached_property
    def fma_per_cycle(self) -> float:
        """Multiply-adds of whole vectors that a core starts in a cycle."""
        return self.costs.fma_per_cycle(self.vector_bits)

    @property
    def multiplies_pairs(self) -> bool:
        """Return whether vectors of pairs of bfloat16 are multiplied, faster than float32."""
        return self.half_dots == "bfdot" or (
            self.half_dots == "vdpbf16ps" and self.costs.half_products > 1
        )

    @property
    def mmla(self) -> tuple[str, ...]:
        """Types of data of which AArch64 multiplies two rows by two columns of eight bytes."""
        found = {"uint8": self.byte_dots == "usdot", "bfloat16": self.half_dots == "bfdot"}
        return tuple(dtype for dtype, has in found.items() if has)

    @property
    def shifts_bytes(self) -> bool:
        """Return whether 128 is subtracted from unsigned bytes before they are multiplied."""
        return self.byte_dots == "sdot"

    @property
    def halves_pay(self) -> bool:
        """Return whether products of bfloat16 were found to be faster than those of float32."""
        return "bfloat16" in self.tiles or (self.half_dots != "bfdot" and self.multiplies_pairs)

    def lanes(self, dtype: str | DataType) -> int:
        """Number of elements of ``dtype`` in a vector register (at least 1)."""
        bits = max(8, DataType(str(dtype)).bits)
        return max(1, self.vector_bits // bits)

    @classmethod
    def from_target(cls, target: Target) -> CPUInfo:
        """Read the CPU from an ``llvm`` target.

        Parameters
        ----------
        target : Target
            A target of kind ``llvm``; ``mcpu``, ``mattr``, ``mtriple`` and ``num-cores`` are read.

        Returns
        -------
        CPUInfo
            The same object for equal targets; a :class:`MeasuredCPU` where decisions are for a
            machine that was measured.

        Raises
        ------
        TargetError
            If the target is no CPU, or not the one that was measured.
        """
        if target.kind.name != "llvm":
            raise TargetError(
                f"target kind is {target.kind.name!r}; the CPU schedules need 'llvm': "
                "pass an llvm target, for example {'kind': 'llvm', 'mcpu': 'x86-64-v3'}"
            )
        text, machine = str(target), machine_in_use()
        info = _described.get(text) or _from_text(text)
        return info if machine is None else MeasuredCPU.of(info, machine)


_described: dict[str, CPUInfo] = {}


@contextmanager
def described(target: Target, cpu: CPUInfo) -> Iterator[None]:
    """Let :meth:`CPUInfo.from_target` return ``cpu`` for a target, in all threads.

    For the CPU of another machine, whose caches only that machine knows.
    """
    text = str(target)
    before = _described.get(text)
    _described[text] = cpu
    try:
        yield
    finally:
        if before is None:
            del _described[text]
        else:
            _described[text] = before


@dataclass(frozen=True)
class MeasuredCPU(CPUInfo):
    """CPU of the cost models with the figures of a machine.

    Parameters
    ----------
    memory_bytes_per_cycle : float
        Bytes of weights that a core gets in a cycle while no more than ``memory_cores`` ask.
    memory_cores : float
        Cores that saturate what holds the weights.
    fork : float
        Cycles of waking the threads.
    """

    memory_bytes_per_cycle: float = 0.0
    memory_cores: float = 1.0
    fork: float = 0.0

    @cached_property
    def costs(self) -> MachineCosts:
        """Constants of the family, but for what the machine says."""
        family = costs_of(self.family, self.vector_bits)
        return replace(
            family,
            bytes_per_cycle=(*family.bytes_per_cycle[:3], self.memory_bytes_per_cycle),
            memory_cores=self.memory_cores,
            weight_bytes_per_cycle=self.memory_bytes_per_cycle,
            weight_cores=self.memory_cores,
            fork=self.fork,
        )

    @classmethod
    def of(cls, info: CPUInfo, machine: Machine, kept_bytes: float = math.inf) -> MeasuredCPU:
        """The CPU of a machine for the cost models.

        Parameters
        ----------
        info : CPUInfo
            What the target says.
        machine : Machine
            The CPU; its caches may differ from those of the target.
        kept_bytes : float
            Weights and largest activations of the model: weights that the last-level cache keeps
            from run to run come from there.

        Raises
        ------
        TargetError
            If the target is for another CPU.
        """
        if machine.kind != "cpu" or machine.name != info.name:
            raise TargetError(
                f"the machine is {machine.name!r}, and the target for {info.name or 'any CPU'!r}:"
                " name a machine of the target's family with its features, or a target with its"
                " mcpu"
            )
        family, cores = costs_of(info.family, info.vector_bits), info.num_cores
        l1d, l2, l3 = _caches_of(machine)
        level = weights_level(kept_bytes, machine)
        all_cores = machine[f"bandwidth.{level}"] / machine["clock"]
        core_bytes, nearest = all_cores / cores, family.bytes_per_cycle[2]
        if level == "memory":  # which a few cores saturate, if they read different weights
            few = all_cores / min(cores, family.memory_cores)
            core_bytes = max(core_bytes, min(few, family.weight_bytes_per_cycle))
        core_bytes = min(core_bytes, nearest)
        return cls(
            vector_bits=info.vector_bits,
            num_vector_registers=info.num_vector_registers,
            has_fma=info.has_fma,
            num_cores=cores,
            l1d_bytes=l1d,
            l2_bytes=l2,
            l3_bytes=l3,
            family=info.family,
            has_streaming_stores=info.has_streaming_stores,
            word_channels=info.word_channels,
            byte_dots=info.byte_dots,
            converts_halves=info.converts_halves,
            tiles=info.tiles,
            emulates_tiles=info.emulates_tiles,
            half_dots=info.half_dots,
            unlike=info.unlike,
            memory_bytes_per_cycle=core_bytes,
            memory_cores=all_cores / core_bytes,
            fork=machine.get("overhead.fork", FORK) * machine["clock"],
        )


@lru_cache(maxsize=64)
def _from_text(text: str) -> CPUInfo:
    target = Target(text)
    features = _features(target)
    bits, registers, fma = _vector_unit(features, _is_aarch64(target))
    l1d, l2, l3 = _caches(target)
    family = str(target.attrs.get("mcpu", ""))
    streams = "sse2" in features
    words, cores = _word_channels(features, bits), _num_cores(target)
    return CPUInfo(
        *(bits, registers, fma, cores, l1d, l2, l3, family, streams, words),
        byte_dots=_byte_dots(features, bits),
        converts_halves="f16c" in features or _is_aarch64(target),
        tiles=_tiles(features, bits),
        half_dots=_half_dots(features, bits),
        unlike=_unlike(target, features, bits),
    )


def _features(target: Target) -> set[str]:
    features = set(map(str, codegen.llvm_get_cpu_features(target)))
    if not _is_aarch64(target):
        features -= {"dotprod", "i8mm", "bf16"}  # ARM with 32 bits has other intrinsics.
    return features


def _unlike(target: Target, features: set[str], bits: int) -> tuple[str, ...]:
    """Features of products that differ from those of the family, with vectors as wide."""
    if "mcpu" not in target.attrs or "mattr" not in target.attrs:
        return ()
    family = _features(Target({k: v for k, v in target.export().items() if k != "mattr"}))
    read = (_tiles, _byte_dots, _half_dots)
    if all(found(features, bits) == found(family, bits) for found in read):
        return ()
    more, less = _PRODUCTS & features - family, _PRODUCTS & family - features
    return *(f"+{name}" for name in sorted(more)), *(f"-{name}" for name in sorted(less))


def _tiles(features: set[str], bits: int) -> tuple[str, ...]:
    """Types that tile registers multiply; what follows their products takes whole vectors."""
    if "amx-tile" not in features or bits != TILE_BITS:
        return ()
    found = {dtype for dtype, name in TILE_PRODUCTS.items() if name in features}
    return tuple(sorted(found if "avx512bf16" in features else found - {"bfloat16"}))


def _word_channels(features: set[str], bits: int) -> int:
    """Products of bytes that a lane adds at once.

    Those of 16 bits take a multiplication and an addition: on two ports for vectors of 512 bits
    they are no faster than two multiply-adds of floats.
    """
    if _byte_dots(features, bits) in ("vpdpbusd", "usdot", "sdot"):
        return WORDS["int8"]
    return WORDS["int16"] if bits == 256 else 0


def _byte_dots(features: set[str], bits: int) -> str:
    """Name of the instruction for products of bytes."""
    if ("avx512vnni" if bits == 512 else "avxvnni") in features:
        return "vpdpbusd"
    if ("avx512bw" if bits == 512 else "avx2") in features:
        return "maddubs"
    if "i8mm" in features:
        return "usdot"
    return "sdot" if "dotprod" in features else ""


def _half_dots(features: set[str], bits: int) -> str:
    """Name of the instruction for pairs of bfloat16."""
    if "avx512bf16" in features and bits == TILE_BITS:
        return "vdpbf16ps"
    return "bfdot" if {"bf16", "neon"} <= features else ""


def _vector_unit(features: set[str], aarch64: bool) -> tuple[int, int, bool]:
    """Vector bits, number of vector registers and whether there is a fused multiply-add."""
    if "avx512f" in features:
        return 512, 32, True
    if "avx2" in features:
        return 256, 16, "fma" in features
    if aarch64:
        return 128, 32, True
    return 128, 16, "fma" in features or "vfp4" in features


def _is_aarch64(target: Target) -> bool:
    triple = str(target.attrs.get("mtriple", ""))
    return bool(target.attrs.get("feature.is_aarch64", False)) or triple.startswith(
        ("aarch64", "arm64")
    )


def _num_cores(target: Target) -> int:
    """The target's ``num-cores``, else the processors that this process may use."""
    cores = target.attrs.get("num-cores")
    if cores is not None:
        return max(1, int(cores))
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _caches(target: Target) -> tuple[int, int, int]:
    """L1 data, L2 and L3 bytes: of this machine if the target names its CPU, else by its name."""
    family = str(target.attrs.get("mcpu", ""))
    known = known_family(family)
    usual = _DEFAULT_CACHES if known is None else _caches_of(load_machine(known))
    if family != str(codegen.llvm_get_system_cpu()):
        return usual
    found = _read_sysfs_caches(_SYSFS_CACHE)
    l1d, l2, l3 = (found.get(level, size) for level, size in zip((1, 2, 3), usual, strict=True))
    return l1d, l2, l3


def _caches_of(machine: Machine) -> tuple[int, int, int]:
    """L1 data and L2 bytes of a core, and those of the L3."""
    cores = machine["multiprocessors"]
    l1d, l2 = (int(machine[f"capacity.{level}"] / cores) for level in ("L1", "L2"))
    return l1d, l2, int(machine["capacity.L3"])


def _read_sysfs_caches(root: Path) -> dict[int, int]:
    """Bytes of the data or unified cache of each level below ``root``; empty if unreadable."""
    sizes: dict[int, int] = {}
    for index in sorted(root.glob("index*")):
        try:
            level = int((index / "level").read_text())
            kind = (index / "type").read_text().strip()
            size = _parse_size((index / "size").read_text().strip())
        except (OSError, ValueError):
            continue
        if kind != "Instruction" and size > 0:
            sizes[level] = size
    return sizes


def _parse_size(text: str) -> int:
    """Bytes of a text such as ``512K``."""
    factor = _SIZE_SUFFIXES.get(text[-1:].upper())
    return int(text[:-1]) * factor if factor else int(text)


def vector_sizes(cpu: CPUInfo) -> tuple[int, ...]:
    """Bits of whole vectors, and of half ones where other CPUs have whole ones of these."""
    half = cpu.vector_bits // 2
    return (cpu.vector_bits, half) if half >= _HALF_BITS else (cpu.vector_bits,)
