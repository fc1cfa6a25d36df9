# SPDX-License-Identifier: Apache-2.0
"""Launch of one kernel as the models of its time see it: an operator, sizes and a dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class KernelCall:
    """Launch of one kernel.

    Parameters
    ----------
    op : str
        Operator by which the model is chosen: ``gemm``, ``conv2d``, ``softmax``, ``relu`` ...
    sizes : Mapping[str, int]
        Sizes by the names that the operator's model gives them, such as B, M, N, K of ``gemm``.
    dtype : str
        Element type of the operands.
    flops : float
        Floating-point operations, two for each multiply-add.
    read_bytes, written_bytes : float
        Bytes of all operands that are read, and of all results, each counted once.
    name : str
        What a report calls it: the layer, or the generated function.
    """

    op: str
    sizes: Mapping[str, int]
    dtype: str = "float32"
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", MappingProxyType(dict(self.sizes)))

    def __hash__(self) -> int:
        return hash((self.op, frozenset(self.sizes.items()), self.dtype))

    @property
    def moved_bytes(self) -> float:
        """Bytes that are read or written."""
        return self.read_bytes + self.written_bytes
