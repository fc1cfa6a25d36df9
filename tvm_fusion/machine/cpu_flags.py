# SPDX-License-Identifier: Apache-2.0
"""CPU features that Linux reports, under LLVM's names."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

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
    "atomics": "lse",
    "crc32": "crc",
    "fp": "fp-armv8",
}
"""Names that differ; Linux's old ``avx512vbmi`` and most others are LLVM's too."""


@lru_cache(maxsize=1)
def flagged_features(source: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Features that the processor has and whose registers the system saves.

    Some are missing, since Linux does not list the newest. On other systems there are none.

    Parameters
    ----------
    source : Path
        Linux's description of the processors; tests use another file than ``/proc/cpuinfo``.
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
