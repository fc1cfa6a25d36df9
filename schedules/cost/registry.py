# SPDX-License-Identifier: Apache-2.0
"""The one function that says how long a kernel takes on a machine."""

from __future__ import annotations

from collections.abc import Callable

from .cpu_kernels import predict_cpu_kernel
from .kernel_call import KernelCall
from .machine import Machine
from .prediction import Prediction
from .roofline import roofline

KernelModel = Callable[[KernelCall, Machine], Prediction | None]
"""Model of some operators: a prediction, or None where it has none for the call or the machine."""

MODELS: dict[str, KernelModel] = {}
"""Kernel models by operator."""


def predict(call: KernelCall, machine: Machine) -> Prediction:
    """Predict the time of one launch, by the operator's model, else by the roofline.

    Raises
    ------
    PredictionError
        If the machine lacks a figure that the roofline needs.
    """
    model = predict_cpu_kernel if call.op.startswith("cpu.") else MODELS.get(call.op)
    prediction = None if model is None else model(call, machine)
    return prediction or _by_roofline(call, machine)


def _by_roofline(call: KernelCall, machine: Machine) -> Prediction:
    seconds, bound = roofline(call, machine)
    floor = machine.get("launch_floor", 0.0)
    if floor > seconds:
        bound = "latency"
    least = max(seconds, floor)
    return Prediction(least, least, 4 * least, bound, seconds, "roofline", False)
