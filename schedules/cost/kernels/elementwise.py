# SPDX-License-Identifier: Apache-2.0
"""Kernels that stream their operands: element-wise operators, copies, concatenations and others.

t = (harness^p + (latency + max(bytes/BW, FLOP/peak))^p)^(1/p): what the host does hides what the
device does, so the shorter of the two hardly counts. (Dissertation, section 4.3.2.1.2, whose
roofline has neither harness nor latency.) Harness, latency and BW are fitted by machine and
operator, figures ``time.OPERATOR.harness`` and so on of the machine; a machine that was never
measured takes the operator ``elementwise``, or constants.
"""

from __future__ import annotations

from ..kernel_call import KernelCall
from ..machine import Machine
from ..prediction import Prediction

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
