# SPDX-License-Identifier: Apache-2.0
"""Names that LLVM knows: architectures, CPUs and their features.

LLVM itself rejects no name: an unknown CPU becomes a generic one after a line on stderr, an unknown
feature is ignored, and an unknown triple ends the process.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import lru_cache

from tvm.target import Target, codegen

from ...errors import TargetError
from ...machine.host import CROSS_TRIPLES, canonical_arch, host_arch, probe_features

BASELINE = {"x86_64": "x86-64", "aarch64": "generic"}

CODEGEN_FEATURES = {
    "x86_64": frozenset(
        "cmov cx8 cx16 sahf sse sse2 sse3 ssse3 sse4.1 sse4.2 sse4a popcnt avx avx2 fma fma4 xop "
        "f16c bmi bmi2 tbm lzcnt movbe gfni pclmul vpclmulqdq avx512f avx512cd avx512bw avx512dq "
        "avx512vl avx512bf16 avx512bitalg avx512fp16 avx512ifma avx512vbmi avx512vbmi2 "
        "avx512vnni avx512vpopcntdq avxifma avxneconvert avxvnni avxvnniint8 avxvnniint16 "
        "amx-tile amx-int8 amx-bf16 avx10.1 avx10.2 egpr ndd ccmp nf zu cf ppx push2pop2".split()
    ),
    "aarch64": frozenset("fp-armv8 neon crc lse dotprod i8mm bf16 sve sve2".split()),
}
"""Features whose instructions LLVM may generate by itself. The other features of a CPU model
(system instructions, ciphers, tuning hints) never occur in a kernel; on AArch64 these are also
those that can be read from the running machine."""


def triple_for(arch: str) -> str:
    """A triple of the architecture: this system's own if the architecture is the same."""
    system = str(codegen.llvm_get_system_triple())
    return system if canonical_arch(system.split("-")[0]) == arch else CROSS_TRIPLES[arch]


@lru_cache(maxsize=2)
def known_cpus(arch: str) -> frozenset[str]:
    """CPUs of the architecture that LLVM can generate 64-bit code for."""
    triple = CROSS_TRIPLES[arch]
    names = codegen.llvm_get_cpu_archlist(Target({"kind": "llvm", "mtriple": triple}))
    return frozenset(
        str(name) for name in names if arch != "x86_64" or "64bit" in _cpu_features(arch, name)
    )


def arch_of_cpu(name: str) -> str | None:
    """The architecture of a CPU that LLVM knows, this machine's first; None if there is none."""
    arches = sorted(CROSS_TRIPLES, key=lambda arch: arch != host_arch())
    return next((arch for arch in arches if name in known_cpus(arch)), None)


@lru_cache(maxsize=2)
def known_features(arch: str) -> frozenset[str]:
    """Every feature that LLVM knows for the architecture from a CPU or from this machine."""
    here = set(probe_features()) if arch == host_arch() else set()
    return frozenset(here.union(*(_cpu_features(arch, name) for name in known_cpus(arch))))


def _cpu_features(arch: str, cpu: str) -> set[str]:
    triple = CROSS_TRIPLES[arch]
    target = Target({"kind": "llvm", "mtriple": triple, "mcpu": str(cpu)})
    return {str(name) for name in codegen.llvm_get_cpu_features(target)}


def unknown_name(what: str, name: str, known: Iterable[str], example: str = "") -> TargetError:
    """Create the error for an unknown name; it lists the most similar known ones."""
    near = difflib.get_close_matches(name, sorted(set(known)), n=5, cutoff=0.6)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    if not near and example:
        hint = f"; expected for example {example}"
    return TargetError(f"unknown {what} {name!r}{hint}")
