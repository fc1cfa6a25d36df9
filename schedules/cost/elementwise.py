# SPDX-License-Identifier: Apache-2.0
"""Kernels that stream their operands: element-wise operators, copies, softmax, normalised rows.

t = (harness^p + (latency + max(bytes/BW, FLOP/peak))^p)^(1/p): what the host does hides what the
device does, so the shorter of the two hardly counts. (Dissertation, section 4.3.2.1.2, whose
roofline has neither harness nor latency.) Harness, latency and BW are fitted by machine and
operator, figures ``time.OPERATOR.harness`` and so on of the machine; a machine that was never
measured takes the operator ``elementwise``, or constants.

Softmax and layer normalisation have B rows of H elements. For them, GPUs that were measured have a
learned model each, all others a law whose constants are fitted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .kernel_call import KernelCall, Prediction, element_bytes
from .learned import LearnedKernel, Limits, Sizes, divisibility, predict_learned
from .machine import PORT_BYTES, Machine

STREAMING = frozenset(
    "add sub mul div pow add_scalar mul_scalar div_scalar pow_scalar relu gelu tanh sigmoid exp log"
    " sqrt rsqrt erf silu abs neg minimum maximum clip where compare cast elementwise".split()
)
"""Element-wise operators; those without figures of their own count as ``elementwise``."""

BY_BYTES = frozenset(
    "copy concat transpose tril dropout batch_norm pool reduce slice pad conv1d".split()
)
"""Operators that nothing was measured of: priced like element-wise ones, and marked."""

SHARPNESS = 12.0
"""Exponent p: least squares over 66 sweeps ends at this bound in 62 of them."""

# Medians over the GPUs measured; the interval is that of one GPU predicted from the others.
_UNSEEN = {"bandwidth": 0.83, "harness": 30e-6, "latency": 15e-6, "low": 0.85, "high": 1.2}
_UNMEASURED_SPREAD = 2.0


def combine(harness: float, kernel: float, sharpness: float = SHARPNESS) -> float:
    """p-norm of two times: a soft maximum."""
    longer, shorter = max(harness, kernel), min(harness, kernel)
    return longer * (1 + (shorter / longer) ** sharpness) ** (1 / sharpness)


def predict_streaming(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict an operator whose bytes say how long it takes."""
    # Fitted bandwidths hold the arithmetic of named operators, which counts of FLOPs overrate.
    is_named = call.op in STREAMING and call.op != "elementwise"
    arithmetic = 0.0 if is_named else call.flops / machine["peak_flops.float32"]
    traffic = call.moved_bytes / machine["bandwidth.memory"]
    bound = "compute" if arithmetic > traffic else "memory"
    op = next((o for o in (call.op, "elementwise") if f"time.{o}.bandwidth" in machine.figures), "")
    if not op and machine.kind != "gpu":
        return None
    share = 1.0 if op else _UNSEEN["bandwidth"]
    bandwidth = machine.get(f"time.{op}.bandwidth", share * machine["bandwidth.memory"])
    harness = machine.get(f"time.{op}.harness", 0.0 if op else _UNSEEN["harness"])
    latency = machine.get(f"time.{op}.latency", 0.0 if op else _UNSEEN["latency"])
    kernel = latency + max(call.moved_bytes / bandwidth, arithmetic)
    if kernel <= 0:
        return None
    seconds = combine(harness, kernel)
    if harness >= kernel or latency > kernel / 2:
        bound = "latency"
    is_known = bool(op) and call.op not in BY_BYTES
    spread = 1.0 if is_known or not op else _UNMEASURED_SPREAD
    low, high = (machine.get(f"time.elementwise.{end}", _UNSEEN[end]) for end in ("low", "high"))
    title = f"streaming, {op or 'never measured'}"
    return Prediction(
        seconds,
        seconds * min(low, 1.0) ** spread,
        seconds * max(high, 1.0) ** spread,
        bound,
        max(arithmetic, traffic),
        title,
        is_known,
        harness,
        latency,
    )


_WARPS = (1, 4, 8, 32)

_SHARPNESS = 4.0
"""Exponent by which the longer of instructions and bytes hides the other."""

_WARP_ROW = 1024
"""Longest row that a warp has in its registers; longer ones have a block each."""


def _work(sizes: Sizes, width: int) -> tuple[np.ndarray, np.ndarray]:
    elements = sizes["B"] * sizes["H"]
    return 0.0 * elements, 2.0 * width * elements


def _law(sizes: Sizes, machine: Limits, width: int, constants: np.ndarray) -> np.ndarray:
    """Seconds of rows whose bytes fit into the second-level cache or do not.

    Constants, of short rows and of long ones: cycles of a multiprocessor for a row, and what
    reading rows again costs; then the cycles for each 32 elements.
    """
    b, h = sizes["B"], sizes["H"]
    _, moved = _work(sizes, width)
    is_long = h > _WARP_ROW
    row, again = (np.where(is_long, constants[at + 1], constants[at]) for at in (0, 2))
    ports = 0.5 * PORT_BYTES * machine.multiprocessors * machine.clock
    # Measured element-wise sweeps: all stays in the cache up to two thirds of it, and nothing does
    # of what is as large, since rows are evicted before the next launch reads them.
    kept = np.clip(3 * (1 - moved / machine.cache), 0, 1)
    near = kept / np.maximum(ports, machine.bandwidth)
    streamed = again * moved * (near + (1 - kept) / machine.bandwidth)
    cycles = row + constants[4] * np.ceil(h / 32)
    issued = b * cycles / (machine.multiprocessors * machine.clock)
    longer, shorter = np.maximum(streamed, issued), np.minimum(streamed, issued)
    return longer * (1 + (shorter / longer) ** _SHARPNESS) ** (1 / _SHARPNESS)


def _features(sizes: Sizes, machine: Limits, roofline: np.ndarray, width: int) -> np.ndarray:
    b, h = sizes["B"], sizes["H"]
    moved = 2.0 * width * b * h
    columns = [np.log(b), np.log(h), np.log(moved), np.log(roofline), np.log(moved / machine.cache)]
    columns += [divisibility(b), divisibility(h), h, h / 2.0 ** np.ceil(np.log2(h))]
    for warps in _WARPS:
        threads = 32.0 * warps
        rounds = b * threads / (2048.0 * machine.multiprocessors)
        columns += [np.log(rounds), rounds / np.ceil(rounds)]
        columns.append(h / (np.ceil(h / threads) * threads))
    return np.stack(columns + machine.features(len(b)), axis=1)


def _kernel(name: str) -> LearnedKernel:
    return LearnedKernel(
        name,
        ("B", "H"),
        _work,
        _features,
        lambda sizes: np.zeros(len(sizes["B"]), int),
        law=_law,
        start=(20.0, 500.0, 1.2, 1.5, 10.0),
    )


SOFTMAX = _kernel("softmax")
LAYER_NORM = _kernel("layer_norm")


def predict_softmax(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a softmax over rows."""
    return _predict(SOFTMAX, call, machine)


def predict_layer_norm(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a layer normalisation of rows."""
    return _predict(LAYER_NORM, call, machine)


def _predict(kernel: LearnedKernel, call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict by the learned model; of dtypes without one, by the bytes of the rows."""
    prediction = predict_learned(kernel, call, machine)
    if prediction is not None or machine.kind != "gpu":
        return prediction
    moved = float(call.size("B") * call.size("H") * element_bytes(call.dtype))
    streamed = KernelCall("elementwise", {}, call.dtype, 0.0, moved, moved, call.name)
    prediction = predict_streaming(streamed, machine)
    return prediction and replace(prediction, in_range=False)
