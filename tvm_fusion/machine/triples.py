# SPDX-License-Identifier: Apache-2.0
"""LLVM's triples of the architectures that code can be compiled for."""

from __future__ import annotations

from typing import Any

from ..errors import TargetError
from .host import canonical_arch

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
