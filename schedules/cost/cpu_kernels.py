# SPDX-License-Identifier: Apache-2.0
"""Time of our CPU kernels, whose operators begin with ``cpu.``.

With cycles ``c`` of the kernel's own cost model where it has one, or else with FLOPs and elementary
functions, bytes ``a`` of activations and ``w`` of weights,

    convolutions   t = f c / clock
    others         t = f (fork + (compute^p + memory^p)^(1/p))

    compute        = c / (DENSE clock), or (flops / PLAIN + functions FUNCTION_FLOPS) / peak
    memory         = a / copy bandwidth + w / bandwidth, each of the level that holds them

Activations are in the nearest level that holds all that the kernel reads and writes of them,
weights in the one half of which holds those of the whole model and the largest activations: all are
read before the same ones are read again. ``f``, the bandwidths, the clock and ``fork`` are figures
of the machine that ``tvm-fusion calibrate`` measures: ``cpu.conv2d.factor`` is the median ratio of
measured to predicted times.

The interval is that of kernels in a whole network: the 10th and 90th percentiles of measured over
predicted times, ``network.cpu.conv2d.low`` and ``.high``, of networks that were predicted before
they ran; those of operators that few networks have are ``network.convolutions`` and
``network.loops``. Most of it is error of the model: kernels alone repeat within a few percent, but
loops whose data another core has written, or that a cache has lost, take several times as long as
those that are calibrated. It ends no lower than RESOLUTION above the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .elementwise import STREAMING
from .kernel_call import KernelCall, Prediction, element_bytes, roofline
from .machine import Machine

LEVELS = ("L2", "L3", "memory")
CONVOLUTIONS = (
    *("cpu.conv2d", "cpu.fused_conv2d", "cpu.planar_conv2d", "cpu.winograd_conv2d"),
    *("cpu.tile_conv2d", "cpu.tile_pair"),
)
CYCLES = "cpu.cycles"
"""Work whose cycles say all."""

P = 2.0  # arithmetic and traffic of short loops overlap in part
PLAIN = 0.4  # share of the peak without multiply-adds, and with loads
FUNCTION_FLOPS = 50.0  # Flops of exp, tanh, erf.
DENSE = 0.87  # share of the peak that register tiles of a matrix product reach
FORK = 1.2e-6  # seconds of waking the threads
WARM = 0.5  # share of the last-level cache whose contents last from run to run
COPY = 0.45  # bandwidth of copies over that of reads: a line is read before it is written
FALLBACK = 10.0  # loops that no rule has scheduled well

# Ranges of ratios of measured to predicted times where no network was measured.
LOW, HIGH = 0.8, 1.4
RESOLUTION = 0.1e-6  # seconds by which calls of a kernel that does nothing differ


def predict_cpu_kernel(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict one of our CPU kernels; None if the machine is no CPU."""
    if machine.kind != "cpu":
        return None
    bare, bound = _bare(call, machine)
    known = f"{call.op}.factor" in machine.figures
    seconds = bare * machine.get(f"{call.op}.factor", FALLBACK if call.op in SLOW else 1.0)
    low, high = _spread(call.op, machine)
    model = "cost model" if call.op in CONVOLUTIONS else "bandwidth and cycles"
    origin = "calibrated" if known else "not calibrated"
    least = min(seconds, roofline(call, machine)[0])
    return Prediction(
        seconds,
        low * seconds,
        high * seconds + RESOLUTION,
        bound,
        least,
        f"{model}, {origin}",
        known,
    )


def _spread(op: str, machine: Machine) -> tuple[float, float]:
    """Ends of the interval over the prediction, of the operator itself or of those like it."""
    like = "network.convolutions" if op in CONVOLUTIONS else "network.loops"
    names = (f"network.{op}", like, op)
    name = next((name for name in names if f"{name}.low" in machine.figures), "")
    return machine.get(f"{name}.low", LOW), machine.get(f"{name}.high", HIGH)


SLOW = ("cpu.fallback", "cpu.none")


def bare_seconds(call: KernelCall, machine: Machine) -> float:
    """Seconds without the factor ``f``."""
    return _bare(call, machine)[0]


def _bare(call: KernelCall, machine: Machine) -> tuple[float, str]:
    """Seconds without the factor, and the bound."""
    clock, cycles = machine["clock"], call.sizes.get("cycles", 0)
    if call.op in (*CONVOLUTIONS, CYCLES):
        compute = call.flops / machine["peak_flops.float32"]
        seconds = cycles / clock
        return seconds, "compute" if compute > seconds / 2 else "memory"
    compute = cycles / (DENSE * clock)
    if not cycles:
        operations = call.flops / PLAIN + call.sizes.get("functions", 0) * FUNCTION_FLOPS
        compute = operations / machine["peak_flops.float32"]
    memory = memory_seconds(call, machine)
    fork = machine.get("overhead.fork", FORK) if call.sizes.get("parallel") else 0.0
    busy = (compute**P + memory**P) ** (1 / P)
    bound = "latency" if fork > busy else "compute" if compute > memory else "memory"
    return fork + busy, bound


def memory_seconds(call: KernelCall, machine: Machine) -> float:
    """Seconds in which all cores move the bytes of a kernel, each from its level."""
    activations = call.sizes.get("activation_bytes", int(call.moved_bytes))
    weights = call.sizes.get("weight_bytes", 0)
    near = level_of(activations, machine)
    far = weights_level(call.sizes.get("kept_bytes", weights), machine)
    copy = machine.get(f"bandwidth.copy.{near}", COPY * machine[f"bandwidth.{near}"])
    return activations / copy + weights / machine[f"bandwidth.{far}"]


def weights_level(kept_bytes: float, machine: Machine) -> str:
    """Level from which a model with so many bytes of weights and activations reads its weights."""
    return level_of(kept_bytes / WARM, machine)


def level_of(size: float, machine: Machine) -> str:
    """Nearest level that holds ``size`` bytes."""
    levels = LEVELS[:-1]
    return next((name for name in levels if size <= machine[f"capacity.{name}"]), LEVELS[-1])


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
    """Factors that the three figures are multiplied by."""
    weights = weight_bytes(call)
    level = level_of(held_bytes(call), machine)
    compute = call.flops / machine.peak_flops(call.dtype) if call.flops else 0.0
    moving = (call.moved_bytes - weights) / machine[f"bandwidth.{level}"]
    return 1.0, compute, moving + weights / machine["bandwidth.memory"]


def predict_cpu_library(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a kernel of PyTorch; None for GPUs, and for what was not calibrated.

        t = latency + compute flops / peak + memory bytes / bandwidth

    with the bandwidth of the level that holds all operands; weights of linear layers and
    convolutions come from memory, as in a model whose weights exceed the caches. ``latency``
    (seconds), ``compute`` and ``memory`` are figures ``pytorch.OPERATOR.latency`` and so on of the
    machine, fitted by least squares of relative errors; a term that is not there is zero. The
    interval is that of the errors of each measured size between others by a fit to those.
    """
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
