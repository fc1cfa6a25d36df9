# SPDX-License-Identifier: Apache-2.0
"""Launch of one kernel as the models of its time see it, the answer of a model, and the roofline.

Operators and the names of their sizes; those in brackets may be left out and are 1 then, ``full``
0:

========================== ===============================================================
``gemm``                   [B], M, N, K: B products of M x K by K x N; one is a linear layer
``bmm``                    B, M, N, K: a batched product, also of a single one
``conv2d``                 B, IC, OC, H, W (of the input), FH, FW, OH, OW, [groups]
``attention``              [B], [L], S, H, KV, D, [full]: L queries of H heads behind the last of S
                           keys of KV heads, D elements each, causal unless ``full``
``softmax, layer_norm``    B rows of H elements that are normalised
element-wise (see below)   none; the bytes and ``flops`` of the call say all
``copy``, ``concat``, ...  none; the bytes say all
``embedding_bag``          B, T, E, L, D: batch, tables, rows, lookups a bag, width,
                           [rows_per_block]
``embedding_bag_backward`` the same
``gather``                 E, L, D: L rows of width D read from a table of E
``gpu.reduce``             our reductions on a GPU: those of :mod:`.gpu_kernels`
========================== ===============================================================

Element-wise operators are ``add``, ``sub``, ``mul``, ``div``, ``pow`` of two tensors, of one and
a number ``add_scalar`` ..., ``relu``, ``gelu``, ``tanh``, ``sigmoid``, ``exp`` ..., and
``elementwise`` for a fused chain of any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from schedules.errors import PredictionError

from .machine import Machine

FLOPS_PER_ELEMENT = {
    "sigmoid": 4,
    "silu": 5,
    "tanh": 180,
    "gelu": 175,
    "softmax": 174,
    "layer_norm": 5,
    "batch_norm": 2,
    "dropout": 10,
    **dict.fromkeys(("copy", "concat", "transpose", "tril"), 0),
}
"""Floating-point operations an element, of other element-wise operators 1; from ``sigmoid`` to
``softmax`` as counted by the code of the dissertation's author."""


def element_bytes(dtype: str) -> int:
    """Bytes of an element: the bits that the name of a dtype ends with; 1 for ``bool``."""
    bits = re.search(r"\d+$", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


@dataclass(frozen=True)
class KernelCall:
    """Launch of one kernel."""

    op: str
    """Operator by which the model is chosen: ``gemm``, ``conv2d``, ``softmax``, ``relu`` ..."""
    sizes: Mapping[str, float]
    """Sizes by the names that the operator's model gives them, such as B, M, N, K of ``gemm``; only
    cycles and round trips may be no integers."""
    dtype: str = "float32"  # Element type of the operands.
    flops: float = 0.0  # Floating-point operations, two for each multiply-add.
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    """``read_bytes`` and ``written_bytes``: bytes of all operands that are read, and of all
    results, each counted once."""
    name: str = field(default="", compare=False)
    """Name in reports: that of the layer, or of the generated function."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", MappingProxyType(dict(self.sizes)))

    def __hash__(self) -> int:
        return hash((self.op, frozenset(self.sizes.items()), self.dtype))

    def size(self, name: str, default: int | None = None) -> int:
        """Size by its name.

        Raises ``PredictionError`` if the call has no such size and there is no default, or it is
        not positive.
        """
        size = self.sizes.get(name, default)
        if size is None or not 0 < size < 1 << 53:
            raise PredictionError(
                f"{self.op} {self.name!r}: size {name!r} is {size}; expected a positive number, "
                f"got sizes {dict(self.sizes)}"
            )
        return int(size)

    @property
    def moved_bytes(self) -> float:
        """Bytes that are read or written."""
        return self.read_bytes + self.written_bytes


_SHARE = 0.4  # Typical share of the roofline of kernels too short to be seen behind the harness.


@dataclass(frozen=True)
class Prediction:
    """Time of one launch."""

    seconds: float  # Most likely time, as the model's data were timed.
    low: float
    high: float
    """``low`` and ``high``: interval that holds four of five measured times, in seconds."""
    bound: str  # ``compute``, ``memory`` or ``latency``.
    roofline_seconds: float  # Least time by the machine's peak and bandwidth.
    model: str  # Model that said so: ``roofline``, or the name of a kernel model and its origin.
    in_range: bool
    """Whether the sizes lie in the range that the model was fitted to, on this machine."""
    harness: float = 0.0
    latency: float = 0.0
    """``harness`` and ``latency``: where launches were timed one by one, no time is below the
    host's ``harness``, and longer ones hold ``latency`` seconds that are not the kernel's. Zero for
    times of kernels alone."""
    extrapolated: tuple[str, ...] = ()
    """Those of ``machine``, ``type``, ``size`` and ``mask`` that the model was not fitted to."""

    @property
    def roofline_share(self) -> float:
        """Share of the roofline that is reached."""
        return self.roofline_seconds / self.seconds

    @property
    def device_seconds(self) -> float:
        """Seconds of the kernel alone, as a profiler shows them in a run of many launches.

        A kernel that was hidden behind the harness is taken for a typical share of its roofline.
        """
        if not self.harness:
            return self.seconds
        kernel = max(self.seconds - self.latency, self.roofline_seconds)
        hidden = min(kernel, self.roofline_seconds / _SHARE)
        seen = min(max(4 * (self.seconds / self.harness - 1), 0.0), 1.0)
        return seen * kernel + (1 - seen) * hidden


def roofline(call: KernelCall, machine: Machine) -> tuple[float, str]:
    """Return the least seconds of a launch, and its bound, ``compute`` or ``memory``.

    Its arithmetic at the peak, or its bytes at the bandwidth.

    (Dissertation, section 4.3.2.1.2.)

    Raises ``PredictionError`` if the machine has no peak for the dtype, or no bandwidth of its
    memory.
    """
    arithmetic = call.flops / machine.peak_flops(call.dtype) if call.flops else 0.0
    traffic = call.moved_bytes / machine["bandwidth.memory"]
    return max(arithmetic, traffic), "compute" if arithmetic > traffic else "memory"
