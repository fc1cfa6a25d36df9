# SPDX-License-Identifier: Apache-2.0
"""Kernels of PyTorch on a CPU, by what ``tvm-fusion calibrate`` has measured of them.

    t = latency + compute flops / peak + memory bytes / bandwidth

with the bandwidth of the level that holds all operands; weights of linear layers and convolutions
come from memory, as in a model whose weights exceed the caches. ``latency`` (seconds), ``compute``
and ``memory`` are figures ``pytorch.OPERATOR.latency`` and so on of the machine, fitted by least
squares of relative errors; a term that is not there is zero. The interval is that of the errors of
each measured size between others by a fit to those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..kernel_call import KernelCall, element_bytes
from ..machine import Machine
from ..prediction import Prediction
from .cpu_kernels import level_of
from .elementwise import STREAMING

PREFIX = "pytorch"
TERMS = ("latency", "compute", "memory")
_FARTHER = 2.0  # the interval, on a logarithmic scale, beyond the measured sizes
_REACH = 4.0  # times the bytes of the largest measured size that count as measured
_LOOKUPS = ("embedding_bag", "gather")


def family(call: KernelCall) -> str:
    """Kernels that are fitted together: operators, and kinds of convolutions and products."""
    sizes = call.sizes
    stem, backward = call.op.removesuffix("_backward"), call.op.endswith("_backward")
    if stem == "conv2d":
        if sizes.get("groups", 1) > 1:
            stem = "conv2d_grouped"
        elif sizes.get("FH") == sizes.get("FW") == 1:
            stem = "conv2d_pointwise"
    if stem == "gemm" and min(sizes.get("M", 2), sizes.get("N", 2)) == 1:
        stem = "gemm_vector"
    return f"{stem}_backward" if backward else stem


def held_bytes(call: KernelCall) -> float:
    """Bytes that a level of the memory must hold: of lookups all rows, of others what is moved."""
    if call.op.removesuffix("_backward") not in _LOOKUPS:
        return call.moved_bytes
    rows = call.sizes.get("T", 1) * call.sizes["E"] * call.sizes["D"] * element_bytes(call.dtype)
    return rows + call.written_bytes


def weight_bytes(call: KernelCall) -> float:
    """Bytes of the weights of a layer, at most what it reads; 0 for other operators."""
    sizes = call.sizes
    if call.op == "gemm":
        elements = sizes["N"] * sizes["K"]
    elif call.op == "conv2d":
        channels = sizes["OC"] * sizes["IC"] / sizes.get("groups", 1)
        elements = channels * sizes["FH"] * sizes["FW"]
    else:
        return 0.0
    return min(elements * element_bytes(call.dtype), call.read_bytes)


def terms(call: KernelCall, machine: Machine) -> tuple[float, float, float]:
    """What the three figures are multiplied by."""
    weights = weight_bytes(call)
    level = level_of(held_bytes(call), machine)
    compute = call.flops / machine.peak_flops(call.dtype) if call.flops else 0.0
    moving = (call.moved_bytes - weights) / machine[f"bandwidth.{level}"]
    return 1.0, compute, moving + weights / machine["bandwidth.memory"]


def predict_cpu_library(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a kernel of PyTorch; None for GPUs, and for what was not calibrated."""
    if machine.kind != "cpu" or call.dtype != "float32":
        return None
    name = next((name for name in _names(call) if _is_known(name, machine.figures)), None)
    if name is None:
        return None
    each = [
        machine.get(f"{PREFIX}.{name}.{term}", 0.0) * size
        for term, size in zip(TERMS, terms(call, machine), strict=True)
    ]
    seconds = sum(each)
    bound = ("latency", "compute", "memory")[each.index(max(each))]
    in_range = call.moved_bytes <= _REACH * machine[f"{PREFIX}.{name}.most"]
    spread = 1.0 if in_range else _FARTHER
    low, high = (machine[f"{PREFIX}.{name}.{end}"] ** spread for end in ("low", "high"))
    _, compute, memory = terms(call, machine)
    title = f"pytorch {name}, calibrated"
    least = min(max(compute, memory), seconds)
    return Prediction(seconds, low * seconds, high * seconds, bound, least, title, in_range)


def _names(call: KernelCall) -> Sequence[str]:
    """Families to look for: its own, and an addition for element-wise operators."""
    own = family(call)
    return (own, "add") if call.op.removesuffix("_backward") in STREAMING else (own,)


def _is_known(name: str, figures: Mapping[str, object]) -> bool:
    return f"{PREFIX}.{name}.most" in figures
